"""What memory costs: `jhpt bench memory`.

choices     what lives on the host, chosen greedily with repair, against the best of all (300 random instances)
largest     the model with most parameters on 24 GiB of an H100 and 110 GiB of its host, with blocks there and without
bytes       of planned steps in budgets, as predicted and as compiled for an H100; needs `jhpt[deviceless]`
steps       on an NVIDIA GPU: the planned step in a budget against what people do without a planner
"""

import statistics
import sys
from typing import Any

import numpy as np

from jhpt.bench.memory.footprints import BUDGETS, MODELS, Footprint, as_row, footprints
from jhpt.bench.memory.instances import best, instance
from jhpt.bench.memory.steps import device_memory, measured
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.catalogue import find_cluster
from jhpt.core.errors import NotHere
from jhpt.core.plan import SavedTensors
from jhpt.planner.api import capped
from jhpt.planner.search.largest_model import largest_trainable
from jhpt.planner.search.offload_buckets import choose

GIB = 1 << 30
INSTANCES = 300
DEVICE, HOST = 24 * GIB, 110 * GIB

LARGEST: dict[str, dict[str, Any]] = {
    "all on the device": {"offload": (None,)},
    "the same, weights rounded as they are used": {"offload": (None,), "zero": 3},
    "blocks on the host": {"offload": ("both",)},
    "the same, which step in the backward pass": {"offload": ("both",), "update_in_backward": True},
}
"""Ways to train a model, as `largest_trainable` takes them."""


def run(*, quick: bool, json_path: str | None) -> int:
    """Runs the benchmark; returns the exit status."""
    if json_path:
        check_writable(json_path)
    rows, claims = _choices()
    print_table("choices", ("instances", "fitting", "95 %", "worst"), [_choice_line(rows)])
    more = _largest()
    rows, claims = rows + more[0], claims | more[1]
    try:
        more = _bytes(quick)
        rows, claims = rows + more[0], claims | more[1]
    except NotHere as error:
        print(f"bytes: not compiled: {error}", file=sys.stderr)
    if memory := device_memory():
        more = _steps(memory, rounds=1 if quick else 3)
        rows, claims = rows + more[0], claims | more[1]
    else:
        print("steps: not measured: no NVIDIA GPU is here")
    print_claims(claims)
    if json_path:
        write_json(json_path, "memory", {"quick": quick, "device": DEVICE, "host": HOST}, rows, claims)
    return 0


Found = tuple[list[dict[str, Any]], dict[str, Claim]]


def _choices() -> Found:
    rows = []
    for seed in range(INSTANCES):
        buckets, link, budget = instance(seed)
        expected, found = best(buckets, link, budget), choose(buckets, link, budget)
        seconds = found.seconds if found else None
        rows.append({"kind": "choice", "seed": seed, "layers": len(buckets), "best_s": expected, "greedy_s": seconds})
    if wrong := [row["seed"] for row in rows if (row["best_s"] is None) != (row["greedy_s"] is None)]:
        raise AssertionError(f"the greedy choice fits where nothing does, or the other way round: seeds {wrong}")
    ratios = _ratios(rows)
    setup = f"{len(ratios)} of {INSTANCES} random instances of up to 8 blocks, the others fit nowhere"
    return rows, {
        "greedy_vs_optimal_p95": Claim(value=float(np.quantile(ratios, 0.95)), unit="x", setup=setup),
        "greedy_vs_optimal_max": Claim(value=max(ratios), unit="x", setup=setup),
    }


def _ratios(rows: list[dict[str, Any]]) -> list[float]:
    return [row["greedy_s"] / row["best_s"] for row in rows if row["best_s"]]


def _choice_line(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    ratios = _ratios(rows)
    return str(len(rows)), str(len(ratios)), f"{np.quantile(ratios, 0.95):.3f}", f"{max(ratios):.3f}"


def _largest() -> Found:
    cluster, rows = capped(find_cluster("h100x1x1"), DEVICE, HOST), list[dict[str, Any]]()
    for name, changes in LARGEST.items():
        found = largest_trainable(cluster, **changes)
        assert found is not None
        (stage,) = found.estimate.stages
        rows.append(
            {
                "kind": "largest",
                "competitor": name,
                "parameters": found.parameters,
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
    plain, lean, offloaded, stepping = (row["parameters"] for row in rows)
    setup = "predicted; 8 sequences of 1,024 tokens; blocks on the host / all on the device"
    leaner = f"{setup}, the leaner of both; clip=previous on the host"
    return rows, {
        "params_ratio_24gib": Claim(value=offloaded / plain, unit="x", setup=setup),
        "params_ratio_24gib_leanest": Claim(value=stepping / lean, unit="x", setup=leaner),
    }


def _bytes(quick: bool) -> Found:
    chosen = (("gpt-6.7b",), BUDGETS[:1]) if quick else (tuple(MODELS), BUDGETS)
    found = list(footprints(*chosen))
    print_table(
        "planned steps on one H100: GiB, predicted and compiled",
        ("model", "budget", "batch", "micro-batches", "on the host", "stay", "recompute")
        + ("device", "compiled", "host", "compiled"),
        [_byte_line(own) for own in found],
    )
    there = [own for own in found if own.plan]
    setup = f"{len(there)} plans, compiled for an H100"
    over = max(own.device / own.budget - 1 for own in there)
    return [as_row(own) for own in found], {
        "bytes_error_median": Claim(value=statistics.median(own.error for own in there), unit="of bytes", setup=setup),
        "bytes_error_max": Claim(value=max(own.error for own in there), unit="of bytes", setup=setup),
        "bytes_over_budget_max": Claim(value=over, unit="of the budget", setup=setup),
    }


def _byte_line(own: Footprint) -> tuple[str, ...]:
    if own.plan is None:
        return own.model, f"{own.budget / GIB:.0f}", "no plan", *[""] * 8
    offload = own.plan.get("offload")
    return (
        own.model,
        f"{own.budget / GIB:.0f}",
        str(own.batch),
        str(own.plan["micro_batches"]),
        "nothing" if offload is None else offload.get("what", "both"),
        "all" if offload is None else str(offload.get("resident", 0)),
        _recomputed(own.plan),
        f"{sum(own.predicted.values()) / GIB:.2f}",
        f"{own.device / GIB:.2f}",
        f"{own.predicted_host / GIB:.1f}",
        f"{own.host / GIB:.1f}",
    )


def _recomputed(plan: dict[str, Any]) -> str:
    if not plan.get("recompute"):
        return "nothing"
    return f"all but {SavedTensors.model_validate(plan['saved']).text()}" if plan.get("saved") else "all"


def _steps(memory: float, rounds: int) -> Found:
    rows = list(measured(memory, rounds))
    print_table(
        "steps in a budget",
        ("set-up", "competitor", "ms", "predicted", "tokens/s", "peak GiB"),
        [_step_line(row) for row in rows],
        words=2,
    )
    ratios = {}
    for row in rows:
        if row["competitor"] == "planned" and row["samples_s"]:
            other = next(
                (o for o in rows if (o["setup"], o["competitor"]) == (row["setup"], "synchronous") and o["samples_s"]),
                None,
            )
            if other:
                ratios[row["setup"]] = statistics.median(other["samples_s"]) / statistics.median(row["samples_s"])
    if not ratios:
        return rows, {}
    setup = max(ratios, key=lambda name: ratios[name])
    return rows, {"speedup_vs_synchronous": Claim(value=ratios[setup], unit="x", setup=setup)}


def _step_line(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["samples_s"]:
        return row["setup"], row["competitor"], row["failed"] or "no steps", "", "", ""
    median = statistics.median(row["samples_s"])
    return (
        row["setup"],
        row["competitor"],
        f"{median * 1e3:.0f}",
        f"{row['predicted_s'] * 1e3:.0f}" if row["predicted_s"] else "",
        f"{row['tokens'] / median:,.0f}",
        f"{max(row['peaks']) / GIB:.2f}",
    )
