"""Fits `jhpt/core/calibration.yaml` to published runs, and shows by cross-validation how far it can be trusted.

    python benchmarks/calibration/fit.py RUNS.csv [--out FILE]

RUNS.csv has the columns of `jhpt bench predict --published`.  Every run is priced for the plan that was run, in the
program of the framework that ran it (`jhpt.bench.frameworks`).  With r the logarithm of predicted / measured seconds,
the figures minimise

    sum over runs of rho(w r)  +  sum over figures of (WEIGHT ln(figure / prior) / spread of the prior)^2

by Gauss-Newton steps on the logarithms of the figures.  rho is quadratic up to `SCALE` and linear beyond (soft L1), so
that runs which something else held up do not bend the others; w is smaller for runs that jhpt cannot express exactly.
Priors are what single operations reach, with the reason beside each.

Cross-validation predicts the runs of each source with figures that were fitted without them.  It starts from the
figures of the whole fit and keeps the Jacobian of its last step.  These residuals, and no others, give predictions
their range.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from jhpt.bench.published import PricedRun, PublishedRun, claims_of, predicted_seconds, price_runs, read_runs
from jhpt.core.calibration import Figures, grouped

Vector = npt.NDArray[np.float64]

SCALE = 0.06
"""Residual up to which a run counts by its square: the spread of equal plans in different frameworks."""

WEIGHT = 0.15
"""Residual that one spread of a prior is worth."""

APPROXIMATE = 0.4
"""Weight of the residual of a run that jhpt cannot express exactly."""

ORDER = 0.05
"""Error of the ratio of two plans where no two runs are plans of one model."""

STEP = 1e-3
"""Change of a logarithm for derivatives."""

STEPS = 8
"""Gauss-Newton steps of the whole fit; `FOLD_STEPS` of each fold, which starts there."""

FOLD_STEPS = 3


@dataclass(frozen=True)
class Prior:
    """What a figure is expected to be, by how much (in natural logarithms), and why."""

    value: float
    spread: float
    why: str


PRIORS: Mapping[str, Prior] = {
    "products.volta": Prior(
        1.05, 0.2, "the benchmark is of the first cuBLAS for tensor cores (2018); later ones are faster"
    ),
    "products.ampere": Prior(0.92, 0.2, "the benchmark's clock, held for hours"),
    "products.hopper": Prior(0.78, 0.2, "power limits the clock of an H100 under load"),
    "fused_attention.ampere": Prior(0.75, 0.4, "Dao 2023 (arXiv 2307.08691), figure 5: 150 to 190 of 230 TFLOP/s"),
    "fused_attention.hopper": Prior(0.5, 0.4, "Dao 2023, figure 7: about 330 of 620 TFLOP/s; made for Ampere"),
    "flash1": Prior(0.6, 0.4, "Dao 2023, figures 4 and 5: FlashAttention 2 is 1.3 to 2 times as fast"),
    "inside": Prior(0.9, 0.3, "of the rate net of protocol that NCCL reckons with: bus bandwidth on NVSwitch"),
    "network": Prior(0.8, 0.5, "NCCL over InfiniBand: 0.8 to 0.95 of the nominal rate on a few nodes"),
    "decline": Prior(0.08, 1.0, "congestion in a fat tree"),
    "sharing": Prior(0.1, 1.0, "rings of one node that meet at a port"),
    "traffic": Prior(1.7, 0.4, "masks, casts, biases, and statistics beside inputs and outputs"),
    "exposed_gathers": Prior(0.3, 0.7, "collectives take multiprocessors and bandwidth from what runs beside them"),
    "exposed_gradients": Prior(0.5, 0.7, "buckets that are not full when the backward pass ends"),
}


@dataclass(frozen=True)
class Fit:
    """Logarithms of the figures, in the order of `PRIORS`, and the derivatives of the residuals in the last step."""

    x: Vector
    jacobian: Vector


def figures_of(x: Vector) -> Figures:
    """The figures of such logarithms."""
    values = {name: math.exp(one) for name, one in zip(PRIORS, x, strict=True)}
    return grouped(values)


def residuals_at(x: Vector, runs: Sequence[PublishedRun]) -> Vector:
    """[runs] ln(predicted / measured)."""
    fitted = figures_of(x)
    return np.array([math.log(predicted_seconds(run, fitted) / run.measured) for run in runs])


def jacobian_at(x: Vector, at: Vector, runs: Sequence[PublishedRun]) -> Vector:
    """[runs, figures] derivatives of the residuals, which are `at` there."""
    columns = [(residuals_at(x + STEP * unit, runs) - at) / STEP for unit in np.eye(len(x))]
    return np.stack(columns, axis=1)


def step(x: Vector, residuals: Vector, jacobian: Vector, weights: Vector) -> Vector:
    """The next logarithms: the least squares of the linearised residuals and the priors, at most 0.3 away."""
    centre = np.array([math.log(prior.value) for prior in PRIORS.values()])
    spread = np.array([prior.spread for prior in PRIORS.values()])
    robust = weights**2 / np.sqrt(1 + (weights * residuals / SCALE) ** 2)
    normal = (jacobian * robust[:, None]).T @ jacobian + np.diag((WEIGHT / spread) ** 2)
    slope = (jacobian * robust[:, None]).T @ residuals + (WEIGHT / spread) ** 2 * (x - centre)
    after = x - np.clip(np.linalg.solve(normal, slope), -0.3, 0.3)
    shares = np.array([name in ("inside", "network") for name in PRIORS])
    return np.where(shares, np.minimum(after, 0.0), after)  # no link reaches more than its rate


def weights_of(runs: Sequence[PublishedRun]) -> Vector:
    """[runs] 1, or less for a run that jhpt cannot express exactly."""
    return np.array([APPROXIMATE if run.fit == "approx" else 1.0 for run in runs])


def fit(runs: Sequence[PublishedRun], steps: int = STEPS) -> Fit:
    """The figures that suit all runs."""
    x = np.array([math.log(prior.value) for prior in PRIORS.values()])
    for _ in range(steps):
        residuals = residuals_at(x, runs)
        jacobian = jacobian_at(x, residuals, runs)
        x = step(x, residuals, jacobian, weights_of(runs))
    return Fit(x, jacobian)


def without(source: str, runs: Sequence[PublishedRun], whole: Fit) -> tuple[Vector, Vector]:
    """(figures without the runs of a source, [runs] residuals of all runs with these)."""
    counts = weights_of(runs) * np.array([run.source != source for run in runs])
    x = whole.x
    for _ in range(FOLD_STEPS):
        x = step(x, residuals_at(x, runs), whole.jacobian, counts)
    return x, residuals_at(x, runs)


def cross_validated(runs: Sequence[PublishedRun], whole: Fit) -> tuple[Vector, Vector]:
    """([runs] residuals with figures fitted without the run's source, [sources, figures] these figures' logarithms)."""
    found, folds = np.zeros(len(runs)), []
    for source in sorted({run.source for run in runs}):
        x, residuals = without(source, runs, whole)
        folds.append(x)
        held_out = [at for at, run in enumerate(runs) if run.source == source]
        found[held_out] = residuals[held_out]
    return found, np.array(folds)


def order_errors(runs: Sequence[PublishedRun], residuals: Vector) -> list[float]:
    """For every two plans of one model on the same devices: |ln of (predicted / measured) ratio of their seconds|."""
    pairs = itertools.combinations(zip(runs, residuals, strict=True), 2)
    return [abs(a - b) for (one, a), (other, b) in pairs if one.group and one.group == other.group]


def priced(runs: Sequence[PublishedRun], residuals: Vector) -> list[PricedRun]:
    """The runs with the predictions that have these residuals."""
    return [
        PricedRun(run=run, predicted=run.measured * math.exp(one)) for run, one in zip(runs, residuals, strict=True)
    ]


def report(title: str, runs: Sequence[PublishedRun], residuals: Vector) -> None:
    """Prints errors, biases and ranks."""
    print(f"\n{title}: {len(runs)} runs")
    for name, claim in claims_of(priced(runs, residuals), title).items():
        print(f"  {name:<26} {claim.value:.3f}  {claim.setup}")
    for gpu in sorted({run.gpu for run in runs}):
        ratios = [math.exp(one) - 1 for run, one in zip(runs, residuals, strict=True) if run.gpu == gpu]
        print(f"  bias of {gpu:<18} {statistics.median(ratios):+.3f}  {len(ratios)} runs")


def tree_of(
    path: Path, runs: Sequence[PublishedRun], whole: Fit, folds: Vector, residuals: Vector
) -> dict[str, object]:
    """The contents of the calibration file."""
    figures = {
        name: {
            "value": float(f"{math.exp(one):.4g}"),
            "without_a_source": [float(f"{math.exp(edge):.3g}") for edge in (fold.min(), fold.max())],
            "prior": prior.value,
            "why": prior.why,
        }
        for (name, prior), one, fold in zip(PRIORS.items(), whole.x, folds.T, strict=True)
    }
    errors = order_errors(runs, residuals)
    rows = [
        [run.gpu, run.gpus, float(f"{run.parameters:.3g}"), run.kinds, float(f"{math.exp(-one):.4g}")]
        for run, one in zip(runs, residuals, strict=True)
    ]
    return {
        "fitted": f"{datetime.now(UTC):%Y-%m-%d} by benchmarks/calibration/fit.py to {len(runs)} runs of {path.name}",
        "figures": figures,
        "order": {
            "value": float(f"{statistics.median(errors or [ORDER]):.3g}"),
            "pairs": len(errors),
            "meaning": "median error of the predicted ratio of two plans of one model on the same devices",
        },
        "columns": ["device", "devices", "parameters", "kinds", "ratio"],
        "residuals": rows,
    }


def main() -> None:
    """Reads runs, fits, reports, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, help="calibration file to write; default: none")
    options = parser.parse_args()
    known, refused = price_runs(read_runs(options.runs))
    for name, reason in refused.items():
        print(f"left out: {name}: {reason}")
    runs = [one.run for one in known if one.run.fit != "noisy"]
    whole = fit(runs)
    report("fitted", runs, residuals_at(whole.x, runs))
    residuals, folds = cross_validated(runs, whole)
    report("cross-validated", runs, residuals)
    for name, one, fold in zip(PRIORS, whole.x, folds.T, strict=True):
        low, high = math.exp(fold.min()), math.exp(fold.max())
        print(f"  {name:<26} {math.exp(one):.4g}  without a source {low:.3g} - {high:.3g}")
    if options.out:
        tree = tree_of(options.runs, runs, whole, folds, residuals)
        options.out.write_text(yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None))


if __name__ == "__main__":
    main()
