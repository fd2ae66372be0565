"""`jhpt bench precision`: what training state and matrix products in few bits cost in loss.

One run for every way to keep parameters and moments (`training.weights`, `training.moments`), and one with products in
8 bits (`models.products`), on one device, from the same initial parameters, on the same batches.  Computation is the
device's: float32 on CPU, whatever parameters are kept in.  Batches of `BATCH` sequences instead of the preset's 32, for
a run that ends within minutes on one core.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.cells import QUICK, Cell
from benchmarks.convergence.run import FLAGS, QUICK_FLAGS, complete, finished, opened
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json

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
"""What is in few bits -> changes of the preset."""

Found = Mapping[str, Any]
"""What a cell's file says."""

COLUMNS = ("in few bits", "validation loss", "against float32")


def cells(*, quick: bool) -> dict[str, Cell]:
    """By kind."""
    base = {"train.steps": STEPS, "evaluation.batches": BATCHES, "data.batch_size": BATCH}
    base |= {"log.tensorboard": False, "parallel.data": 1, **(QUICK if quick else {})}
    return {
        kind: Cell(group="precision", preset=PRESET, seed=SEED, changes=base | changes)
        for kind, changes in KINDS.items()
    }


def gap(found: Mapping[str, Found], kind: str) -> float:
    """Validation loss / that of float32 - 1."""
    return found[kind]["validation"] / found["float32"]["validation"] - 1


def lines(found: Mapping[str, Found]) -> list[tuple[str, ...]]:
    """A line for every kind that has been run."""
    against = {kind: f"{100 * gap(found, kind):+.2f} %" for kind in found if "float32" in found}
    return [(kind, f"{one['validation']:.4f}", against.get(kind, "")) for kind, one in found.items()]


def claims_of(found: Mapping[str, Found]) -> dict[str, Claim]:
    """Only of what has been run."""
    steps = {one["settings"]["changes"]["train.steps"] for one in found.values()}
    return {
        f"{kind.replace(', ', '_').replace(' ', '_')}_loss_gap": Claim(
            value=gap(found, kind),
            unit="validation loss / that with everything in float32 - 1",
            setup=f"{PRESET}, {kind}, {max(steps)} steps, 1 seed",
        )
        for kind in found
        if kind != "float32" and "float32" in found
    }


def run(*, quick: bool, json_path: str | None, folder: str | None) -> int:
    """Runs what is missing, prints the table and the claims; returns the exit status."""
    if json_path:
        check_writable(json_path)
    place, wanted = opened(folder or FOLDER), cells(quick=quick)
    complete(list(wanted.values()), place, sorted(os.sched_getaffinity(0)), QUICK_FLAGS if quick else FLAGS)
    report(wanted, place, {"quick": quick}, json_path)
    return 0


def report(wanted: Mapping[str, Cell], folder: Path, settings: Mapping[str, Any], json_path: str | None) -> None:
    """Table, claims and a file of the cells that are there."""
    there = finished(list(wanted.values()), folder)
    found = {kind: there[cell] for kind, cell in wanted.items() if cell in there}
    print_table("bench precision", COLUMNS, lines(found), words=1)
    claims = claims_of(found)
    print_claims(claims)
    if json_path:
        write_json(json_path, "precision", settings, list(found.values()), claims, device=False)
