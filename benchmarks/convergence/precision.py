"""`jhpt bench precision`: the cost in loss of low-precision training state and matrix products.

There is one run for every way to store parameters and moments (`training.weights`, `training.moments`), and one with
products in 8 bits (`models.products`); all run on one device, from the same initial parameters, on the same batches.
The compute dtype is the device's, float32 on CPU, however parameters are stored.  Batches have `BATCH` sequences
instead of the preset's 32, so that a run ends within minutes on one core.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.cells import QUICK, Cell
from benchmarks.convergence.held_out import checked
from benchmarks.convergence.run import FLAGS, QUICK_FLAGS, complete, finished, opened
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.config import DataConfig

FOLDER = "runs/precision"

PRESET, SEED, STEPS = "gpt-tiny", 0, 2000
BATCH, BATCHES = 8, 160
"""Sequences in a step, and held-out batches of as many."""

KINDS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16_kahan": {"optimizer.weights": "bfloat16_kahan"},
    "bfloat16": {"optimizer.weights": "bfloat16"},
    "int8 moments": {"optimizer.moments": "int8"},
    "bfloat16_stochastic": {"optimizer.weights": "bfloat16_stochastic"},
    "bfloat16_kahan, int8 moments": {"optimizer.weights": "bfloat16_kahan", "optimizer.moments": "int8"},
    "float8 products": {"model.matmul_dtype": "float8"},
}
"""What is in low precision -> changes of the preset."""

Result = Mapping[str, Any]
"""The content of a cell's file."""

COLUMNS = ("in few bits", "validation loss", "against float32")


def cells(*, quick: bool) -> dict[str, Cell]:
    """The cells by kind."""
    base = {"train.steps": STEPS, "evaluation.batches": BATCHES, "data.batch_size": BATCH}
    base |= {"log.tensorboard": False, "parallel.data": 1, **(QUICK if quick else {})}
    return {
        kind: Cell(group="precision", preset=PRESET, seed=SEED, changes=base | changes)
        for kind, changes in KINDS.items()
    }


def gap(results: Mapping[str, Result], kind: str) -> float:
    """Validation loss / that of float32 - 1."""
    return results[kind]["validation"] / results["float32"]["validation"] - 1


def lines(results: Mapping[str, Result]) -> list[tuple[str, ...]]:
    """A line for every kind that has been run."""
    against = {kind: f"{100 * gap(results, kind):+.2f} %" for kind in results if "float32" in results}
    return [(kind, f"{one['validation']:.4f}", against.get(kind, "")) for kind, one in results.items()]


def claims_of(results: Mapping[str, Result]) -> dict[str, Claim]:
    """Claims about the kinds that have been run."""
    steps = {one["settings"]["changes"]["train.steps"] for one in results.values()}
    return {
        f"{kind.replace(', ', '_').replace(' ', '_')}_loss_gap": Claim(
            value=gap(results, kind),
            unit="validation loss / that with everything in float32 - 1",
            setup=f"{PRESET}, {kind}, {max(steps)} steps, 1 seed",
        )
        for kind in results
        if kind != "float32" and "float32" in results
    }


def run(*, quick: bool, json_path: str | None, folder: str | None) -> int:
    """Runs what is missing, prints the table and the claims; returns the exit status."""
    if json_path:
        check_writable(json_path)
    place, wanted = opened(folder or FOLDER), cells(quick=quick)
    checked(DataConfig())
    complete(list(wanted.values()), place, sorted(os.sched_getaffinity(0)), QUICK_FLAGS if quick else FLAGS)
    report(wanted, place, {"quick": quick}, json_path)
    return 0


def report(wanted: Mapping[str, Cell], folder: Path, settings: Mapping[str, Any], json_path: str | None) -> None:
    """Table, claims and a file of the cells that have been run."""
    there = finished(list(wanted.values()), folder)
    results = {kind: there[cell] for kind, cell in wanted.items() if cell in there}
    print_table("bench precision", COLUMNS, lines(results), words=1)
    claims = claims_of(results)
    print_claims(claims)
    if json_path:
        write_json(json_path, "precision", settings, list(results.values()), claims, device=False)
