"""How far a prediction may be off: quantiles of the published runs that are most like the plan.

    range = predicted x [q10, q90] of measured / predicted, over published runs, each weighted by

    w = exp(-distance / 4)
    distance = |log10 of parameters apart| / 0.5 + |log2 of devices apart| / 2
               + 1 if the architecture differs + 1/2 for every kind of parallelism that only one of them has

The 4 makes the range hold for 77 % of the runs when runs of the same source do not count (2: 76 %, 1: 71 %).  The
ratios come from figures that were fitted without the run's source (`benchmarks/calibration/fit.py`), so they hold what
a new framework on a new machine adds.  A measured profile has no such range: its seconds are this machine's own.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jhpt.core.calibration import Residual, architecture, residuals
from jhpt.core.catalogue import capability_by_driver, device_named
from jhpt.core.plan import Plan

QUANTILES = (0.1, 0.9)

BEYOND = 2.0
"""Factor by which sizes may lie outside of those of the runs."""

FADING = 4.0
"""Distance over which the weight of a run falls to 1 / e."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Factors on predicted seconds: eight of ten runs of this kind lie between them."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """What decides which runs are alike.  kinds: as `parallelism` names them."""

    architecture: str
    devices: int
    parameters: float
    kinds: str


def parallelism(data: int, tensor: int, pipe: int, zero: int) -> str:
    """The kinds of parallelism in use, in alphabetical order: data (replicas), pipe, tensor, zero3."""
    kinds = {"data": data > 1, "pipe": pipe > 1, "tensor": tensor > 1, "zero3": data > 1 and zero == 3}
    return " ".join(name for name, used in kinds.items() if used)


def case_of(plan: Plan, device: str, parameters: float) -> Case:
    """The case of a plan on devices that the driver calls `device`."""
    pipe, tensor, data = len(plan.stages), max(plan.degrees), plan.replicas
    return Case(
        architecture=architecture(capability_by_driver(device)),
        devices=plan.devices,
        parameters=parameters,
        kinds=parallelism(data, tensor, pipe, plan.zero),
    )


@functools.cache
def architecture_of(kind: str) -> str:
    """The architecture of a kind of the catalogue, as far as figures depend on it."""
    return architecture(capability_by_driver(device_named(kind).name))


def range_of(case: Case, runs: Sequence[Residual] | None = None) -> Range | None:
    """The range of a case's seconds, relative to the prediction; None for a model or a number of devices more than
    `BEYOND` times as large as in any of the runs, or as small.

    Args:
      runs: None: those that come with jhpt.
    """
    runs = residuals() if runs is None else runs
    sizes = ((case.parameters, [run.parameters for run in runs]), (case.devices, [run.devices for run in runs]))
    if any(not min(known) / BEYOND <= size <= max(known) * BEYOND for size, known in sizes):
        return None
    ratios = np.array([run.ratio for run in runs])
    weights = np.array([math.exp(-_distance(case, run) / FADING) for run in runs])
    order = np.argsort(ratios)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, high = np.interp(QUANTILES, share, ratios[order])
    return Range(low=float(low), high=float(high))


def _distance(case: Case, run: Residual) -> float:
    differ = set(case.kinds.split()) ^ set(run.kinds.split())
    size = abs(math.log10(case.parameters / run.parameters)) / 0.5
    return (
        size
        + abs(math.log2(case.devices / run.devices)) / 2
        + (architecture_of(run.device) != case.architecture)
        + len(differ) / 2
    )
