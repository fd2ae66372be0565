"""`jhpt bench memory`: benchmarks of plans that save memory.

choices   what to offload, chosen greedily with repair, against the best choice (300 random instances)
largest   the largest model that trains on 24 GiB of an H100 and 110 GiB of its host, with CPU offload and without
steps     on an NVIDIA GPU: the planned step in a budget against the usual choices without a planner
bytes     of planned steps in budgets, predicted and as compiled for an H100; needs `jhpt[deviceless]`
"""

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jhpt.bench.memory.footprints import BUDGETS, HELD_OUT, MODELS, Footprint, as_row, footprints
from jhpt.bench.memory.instances import best, instance
from jhpt.bench.memory.largest_model import largest_trainable
from jhpt.bench.memory.steps import device_memory, measured
from jhpt.bench.ratios import ratio_unit, speed_claim, speed_claims, times_as_fast
from jhpt.bench.results import Claim, Report, chosen, last_lines, print_claims, print_table
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import NotHere
from jhpt.core.plan import SavedTensors
from jhpt.planner.api import capped
from jhpt.planner.search.offload_buckets import choose

GIB = 1 << 30
INSTANCES = 300
DEVICE, HOST = 24 * GIB, 110 * GIB

ON_DEVICE: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "the same, weights rounded as they are used": {"zero": 3},
    "the same, and moments in 8 bits": {"zero": 3, "optimizer": {"moments": "int8"}},
    "moments in 8 bits, weights in bfloat16 with their remainders": {
        "zero": 3,
        "optimizer": {"weights": "bfloat16_kahan", "moments": "int8"},
    },
    "moments in 8 bits, weights in bfloat16 rounded at random": {
        "zero": 3,
        "optimizer": {"weights": "bfloat16_stochastic", "moments": "int8"},
    },
}
"""Ways to train a model without the host, and the arguments of `largest_trainable` for them."""

ON_HOST: dict[str, dict[str, Any]] = {
    "moments offloaded": {"offload": ("optimizer",)},
    "blocks offloaded": {"offload": ("both",)},
    "the same, updated in the backward pass": {"offload": ("both",), "update_in_backward": True},
}
"""The same with the host."""


PARTS = ("choices", "largest", "steps", "bytes")
"""Parts in the order in which they run; the last compiles 40 plans, each of which takes a minute."""


def run(*, quick: bool, json_path: str | None, only: Sequence[str] = ()) -> int:
    """Runs the benchmark; returns the exit status.  only: of `PARTS`."""
    # Writing the device's name starts a backend in this process, which must leave the memory to other processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = Report(path=json_path, bench="memory", settings={"quick": quick, "device": DEVICE, "host": HOST})
    for part in chosen(PARTS, only):
        if part == "choices":
            report.add(*_choices())
        elif part == "largest":
            report.add(*_largest())
        elif part == "steps":
            _steps(report, rounds=1 if quick else 3)
        else:
            _bytes(report, quick)
    print_claims(report.claims)
    return 0


Part = tuple[list[dict[str, Any]], dict[str, Claim]]
"""Rows and claims."""


def _choices() -> Part:
    rows = []
    for seed in range(INSTANCES):
        buckets, link, budget = instance(seed)
        expected, choice = best(buckets, link, budget), choose(buckets, link, budget)
        seconds = choice.seconds if choice else None
        rows.append({"kind": "choice", "seed": seed, "layers": len(buckets), "best_s": expected, "greedy_s": seconds})
    if wrong := [row["seed"] for row in rows if (row["best_s"] is None) != (row["greedy_s"] is None)]:
        raise AssertionError(f"the greedy choice fits where nothing does, or the other way round: seeds {wrong}")
    print_table("choices: best / greedy", ("instances", "fitting", "5 %", "worst"), [_choice_line(rows)])
    return rows, choice_claims(rows)


def choice_claims(rows: list[dict[str, Any]]) -> dict[str, Claim]:
    """What the greedy choice's seconds are worth beside the best choice's."""
    ratios = _ratios(rows)
    setup = f"{len(ratios)} of {INSTANCES} random instances of up to 8 blocks, the others fit nowhere"
    unit = ratio_unit("the best choice", "the greedy choice", kind="predicted")
    return {
        "worst_greedy_vs_optimal": speed_claim(min(ratios), unit=unit, setup=setup),
        "greedy_vs_optimal_p5": speed_claim(float(np.quantile(ratios, 0.05)), unit=unit, setup=setup),
        "greedy_vs_optimal_geomean": speed_claim(statistics.geometric_mean(ratios), unit=unit, setup=setup),
    }


def _ratios(rows: list[dict[str, Any]]) -> list[float]:
    return [times_as_fast([row["best_s"]], [row["greedy_s"]]) for row in rows if row["best_s"]]


def _choice_line(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    ratios = _ratios(rows)
    return str(len(rows)), str(len(ratios)), f"{np.quantile(ratios, 0.05):.3f}", f"{min(ratios):.3f}"


def _largest() -> Part:
    cluster, rows = capped(find_cluster("h100x1x1"), DEVICE, HOST), list[dict[str, Any]]()
    for name, changes in (ON_DEVICE | ON_HOST).items():
        largest = largest_trainable(cluster, **{"offload": (None,)} | changes)
        assert largest is not None
        (stage,) = largest.estimate.stages
        rows.append(
            {
                "kind": "largest",
                "competitor": name,
                "parameters": largest.parameters,
                "device_bytes": stage.total_bytes,
                "host_bytes": stage.total_host_bytes,
            }
        )
    print_table(
        "largest model on 24 GiB of an H100, 110 GiB of its host",
        ("", "parameters", "device GiB", "host GiB"),
        [
            (
                str(row["competitor"]),
                f"{row['parameters'] / 1e9:.2f} G",
                f"{row['device_bytes'] / GIB:.1f}",
                f"{row['host_bytes'] / GIB:.1f}",
            )
            for row in rows
        ],
    )
    parameters = {row["competitor"]: row["parameters"] for row in rows}
    plain, offloaded = parameters["all on the device"], parameters["blocks offloaded"]
    leanest = {
        kind: max(ways, key=lambda name: parameters[name]) for kind, ways in (("without", ON_DEVICE), ("with", ON_HOST))
    }
    setup = "predicted; 8 sequences of 1,024 tokens; "
    lean = f"{setup}with the host ({leanest['with']}) / without ({leanest['without']}), the most parameters of each"
    ratio = parameters[leanest["with"]] / parameters[leanest["without"]]
    return rows, {
        "params_ratio_24gib": Claim(
            value=offloaded / plain,
            unit="parameters / parameters",
            setup=f"{setup}blocks offloaded / all on the device",
        ),
        "params_ratio_24gib_leanest": Claim(value=ratio, unit="parameters / parameters", setup=lean),
    }


def _bytes(report: Report, quick: bool) -> None:
    selection = (("gpt-6.7b",), BUDGETS[:1]) if quick else (HELD_OUT | MODELS, BUDGETS)
    compiled: list[Footprint] = []
    try:
        for footprint in footprints(*selection):
            compiled.append(footprint)
            report.add([as_row(footprint)])
    except NotHere as error:
        print(f"bytes: not compiled: {error}", file=sys.stderr)
        return
    print_table(
        "planned steps on one H100: GiB, predicted and compiled",
        ("model", "budget", "batch", "micro-batches", "on the host", "stay", "recompute")
        + ("device", "compiled", "host", "compiled"),
        [_byte_line(footprint) for footprint in compiled],
    )
    for held_out in sorted({footprint.held_out for footprint in compiled if footprint.plan}):
        report.add([], _byte_claims([f for f in compiled if f.plan and f.held_out == held_out], held_out))


def _byte_claims(plans: Sequence[Footprint], held_out: bool) -> dict[str, Claim]:
    models = (
        "models and lengths that no constant was counted in" if held_out else "models that constants were counted in"
    )
    setup = f"{len(plans)} plans, compiled for an H100; {models}"
    errors = [footprint.error for footprint in plans]
    over = max(footprint.device / footprint.budget - 1 for footprint in plans)
    name = "bytes_held_out" if held_out else "bytes"
    return {
        f"{name}_error_median": Claim(value=statistics.median(errors), unit="of bytes", setup=setup),
        f"{name}_error_max": Claim(value=max(errors), unit="of bytes", setup=setup),
        f"{name}_over_budget_max": Claim(value=over, unit="of the budget", setup=setup),
    }


def _byte_line(footprint: Footprint) -> tuple[str, ...]:
    if footprint.plan is None:
        return footprint.model, f"{footprint.budget / GIB:.0f}", "no plan", *[""] * 8
    offload = footprint.plan.get("offload")
    return (
        footprint.model,
        f"{footprint.budget / GIB:.0f}",
        str(footprint.batch),
        str(footprint.plan["micro_batches"]),
        "nothing" if offload is None else offload.get("kind", "both"),
        "all" if offload is None else str(offload.get("resident", 0)),
        _recomputed(footprint.plan),
        f"{sum(footprint.predicted.values()) / GIB:.2f}",
        f"{footprint.device / GIB:.2f}",
        f"{footprint.predicted_host / GIB:.1f}",
        f"{footprint.host / GIB:.1f}",
    )


def _recomputed(plan: dict[str, Any]) -> str:
    if not plan.get("recompute"):
        return "nothing"
    return f"all but {SavedTensors.model_validate(plan['saved']).text()}" if plan.get("saved") else "all"


def _steps(report: Report, rounds: int) -> None:
    memory = device_memory()
    if memory is None:
        print("steps: not measured: this machine has no NVIDIA GPU", file=sys.stderr)
        return
    rows = []
    for row in measured(memory, rounds):
        rows.append(row)
        report.add([row])
    print_table(
        "steps in a budget",
        ("set-up", "competitor", "ms", "predicted", "tokens/s", "peak GiB"),
        [_step_line(row) for row in rows],
        words=2,
    )
    report.add([], step_claims(rows))


def step_claims(rows: list[dict[str, Any]]) -> dict[str, Claim]:
    """The planned step against what is usual."""
    samples = {(row["setup"], row["competitor"]): row["samples_s"] for row in rows if row["samples_s"]}
    ratios = {
        setup: times_as_fast([statistics.median(samples[setup, "synchronous"])], [statistics.median(planned)])
        for (setup, competitor), planned in samples.items()
        if competitor == "planned" and (setup, "synchronous") in samples
    }
    unit = ratio_unit("synchronous", "the planned step")
    return speed_claims("vs_synchronous", ratios, unit=unit, place="on this device")


def _step_line(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["samples_s"]:
        return row["setup"], row["competitor"], last_lines(row["failed"] or "no steps", 1), "", "", ""
    median = statistics.median(row["samples_s"])
    return (
        row["setup"],
        row["competitor"],
        f"{median * 1e3:.0f}",
        f"{row['predicted_s'] * 1e3:.0f}" if row["predicted_s"] else "",
        f"{row['tokens'] / median:,.0f}",
        f"{max(row['peaks']) / GIB:.2f}",
    )
