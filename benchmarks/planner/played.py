"""Random plans: the planner's price compared with the events of the step (`benchmarks.planner.events`).

Prices are exact where nothing hides weights that are gathered: a layer's gather counts beside that layer in the price,
and beside the layer before it in the events.  Two stages that share a parameter wait for each other in the events
alone.
"""

import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.events import Played
from benchmarks.planner.instances import random_cluster, random_profile
from benchmarks.planner.settings import Settings, in_parallel
from jhpt.bench.results import Claim, print_table
from jhpt.core.cluster import Cluster
from jhpt.core.divisors import divisors
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Run, Schedule, Stage, Zero
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel

AGREE = 1e-9
"""Relative tolerance: both add the same numbers in different orders."""

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "eager-1f1b")


@dataclass(frozen=True, kw_only=True)
class PlayedRow:
    """One plan.  error: price / events - 1.  apart: the same if the stages of a shared parameter do not wait."""

    part: str = "events"
    instance: int
    zero: int
    schedule: str
    stages: int
    devices: int
    overlap: bool
    tied: bool
    priced: float
    played: float
    error: float
    apart: float

    @property
    def kind(self) -> str:
        """What the table groups by."""
        return f"{'one stage' if self.stages == 1 else self.schedule}, ZeRO-{self.zero}"

    @property
    def hides_gathers(self) -> bool:
        """Whether weights are gathered beside computation, or before a pipeline fills."""
        return self.zero > 0 and (self.overlap or (self.zero < 3 and self.stages > 1))


def played(settings: Settings) -> tuple[list[PlayedRow], dict[str, Claim]]:
    """Prices and plays random plans, and prints where the two disagree."""
    found = in_parallel(play, [(settings.seed, index) for index in range(settings.played)], settings.workers)
    rows = [row for row in found if row is not None]
    lines = []
    for kind, overlap in sorted({(row.kind, row.overlap) for row in rows}):
        some = [row for row in rows if (row.kind, row.overlap) == (kind, overlap)]
        errors = [row.error for row in some]
        equal = sum(abs(error) <= AGREE for error in errors)
        figures = (f"{100 * value:+.1f} %" for value in (min(errors), statistics.median(errors), max(errors)))
        lines.append((kind, "beside" if overlap else "in line", str(len(some)), str(equal), *figures))
    columns = ("plans", "communication", "number", "equal", "least error", "median", "largest")
    print_table("the price against the events of a step", columns, lines, words=2)
    exact = [row for row in rows if not row.hides_gathers]
    others = [abs(row.error) for row in rows if row.hides_gathers]
    setup = f"random plans of up to 6 layers on up to 8 devices, seed {settings.seed}"
    claims = {
        "events_exact_mismatches": Claim(
            value=sum(abs(row.apart) > AGREE for row in exact),
            unit="plans",
            setup=f"{len(exact)} {setup}, nothing gathered beside computation, waits for a shared parameter apart",
        )
    }
    if others:
        claims["events_error_median"] = Claim(
            value=statistics.median(others),
            unit="|price / events - 1|",
            setup=f"{len(others)} {setup}, weights gathered beside computation",
        )
    return rows, claims


def play(task: tuple[int, int]) -> PlayedRow | None:
    """One plan, which depends on its number alone; None if it cannot run."""
    seed, index = task
    plan, profile, cluster = random_plan(np.random.default_rng([seed, index]))
    try:
        priced = price(plan, CostModel(profile, cluster)).seconds
    except InputError:
        return None
    seconds, without = (Played(plan, profile, cluster, waits=waits).seconds() for waits in (True, False))
    return PlayedRow(
        instance=index,
        zero=plan.zero,
        schedule=plan.schedule,
        stages=len(plan.stages),
        devices=plan.devices,
        overlap=cluster.overlap,
        tied=any(kind.tied_parameters for kind in profile.kinds.values()),
        priced=priced,
        played=seconds,
        error=priced / seconds - 1,
        apart=priced / without - 1,
    )


def random_plan(rng: np.random.Generator) -> tuple[Plan, ModelProfile, Cluster]:
    """A plan with one tensor degree in a stage; ZeRO-2, which only one SPMD program runs, has one stage."""
    layers, devices = int(rng.integers(2, 7)), int(rng.integers(1, 9))
    profile = random_profile(rng, layers, min_layers=layers, degrees=(1, 2, 4))
    cluster = random_cluster(rng, devices, min_devices=devices)
    zero: Zero = (0, 1, 2, 3)[rng.integers(4)]
    stages = 1 if zero == 2 else int(rng.integers(1, min(layers, devices) + 1))
    batch = int(rng.choice([4, 8, 12]))
    cuts, owned = (_cuts(rng, total, stages) for total in (layers, devices))
    placed = []
    for first, stop, device, end in zip(cuts, cuts[1:], owned, owned[1:], strict=False):
        fit = [t for t in (1, 2, 4) if not (end - device) % t and all(not m % t for m in _most(profile, first, stop))]
        run = Run(layers=stop - first, tensor=int(rng.choice(fit)))
        placed.append(Stage(device=device, devices=end - device, chunks=(Chunk(first=first, runs=(run,)),)))
    plan = Plan(
        model=profile.name,
        cluster=cluster.name,
        space="spmd" if zero == 2 else "general",
        batch=batch,
        micro_batches=int(rng.choice(divisors(batch))),
        schedule=SCHEDULES[rng.integers(len(SCHEDULES))],
        zero=zero,
        stages=tuple(placed),
    )
    return plan, profile, cluster


def _cuts(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """Where `total` things are cut into so many parts, none of them empty; the ends too."""
    inner = rng.choice(np.arange(1, total), parts - 1, replace=False) if parts > 1 else np.zeros(0)
    return [0, *sorted(map(int, inner)), total]


def _most(profile: ModelProfile, first: int, stop: int) -> list[int]:
    return [profile.kinds[name].max_tensor for name in profile.layers[first:stop]]
