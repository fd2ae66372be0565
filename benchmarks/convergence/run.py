"""The benchmark: runs the cells that have no results yet, side by side, and reports all of them.

Every cell is a process with a core of its own, because two of them side by side run more steps than one with two cores.
Its results are a file in a folder; if a file with the same settings lies there, the cell is not run again.

Losses are held-out losses of the final parameters *with compression off*; the loss with the compression of the training
is reported beside them.  Uncompressed runs use one device: tensor- and data-parallel ones equal them to rounding
(`tests/sharding/test_parity.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.convergence import choices, plots
from benchmarks.convergence.cells import Cell, cells
from benchmarks.convergence.compare import COLUMNS, LEAK_COLUMNS, claims_of, leak_lines, lines
from benchmarks.convergence.held_out import checked
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError

FOLDER = "runs/convergence"

FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Flags of XLA, which otherwise ends a process whose devices reach a collective 40 s late, as on a busy core."""

QUICK_FLAGS = f"{FLAGS} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Programs that compile faster and run slower, because a quick cell spends most of its time on compiling."""


class CellError(RuntimeError):
    """A cell failed."""


def run(*, quick: bool, json_path: str | None, folder: str | None) -> int:
    """Runs what is missing, prints the table and the claims; returns the exit status."""
    if json_path:
        check_writable(json_path)
    place = opened(folder or FOLDER)
    wanted, of_choices = cells(quick=quick), choices.cells(quick=quick)
    text = checked(DataConfig())
    complete([*wanted, *of_choices], place, sorted(os.sched_getaffinity(0)), QUICK_FLAGS if quick else FLAGS)
    report(wanted, place, {"quick": quick}, json_path, of_choices, text)
    return 0


def opened(folder: str) -> Path:
    """The folder of finished cells, made if it is not there."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {place} cannot be used: {error.strerror}; give a folder that can be written") from None
    return place


def report(
    wanted: Sequence[Cell],
    folder: Path,
    settings: Mapping[str, Any],
    json_path: str | None,
    of_choices: Mapping[Cell, str],
    of_text: Mapping[str, Claim],
) -> None:
    """Tables, claims, figures and a file of the cells that have been run.

    Args:
      of_choices: the cells of `choices`, with their kinds.  of_text: claims about the text.
    """
    results, chosen = finished(wanted, folder), finished(list(of_choices), folder)
    print_table("bench convergence", COLUMNS, lines(results), words=2)
    print_table("what earlier positions know of later tokens", LEAK_COLUMNS, leak_lines(results), words=2)
    print_table("which tokens are sent in 8 bits", choices.COLUMNS, choices.lines(chosen, of_choices), words=1)
    claims = {**claims_of(results), **choices.claims_of(chosen, of_choices), **of_text}
    print_claims(claims)
    for name, text in plots.pages(results).items():
        (folder / name).write_text(text, encoding="utf-8")
    if json_path:
        write_json(json_path, "convergence", settings, [*results.values(), *chosen.values()], claims, device=False)


def finished(wanted: Sequence[Cell], folder: Path) -> dict[Cell, Any]:
    """The results of the cells that have been run."""
    there = {cell: file_of(cell, folder) for cell in wanted}
    return {cell: json.loads(file.read_text()) for cell, file in there.items() if file.is_file()}


def file_of(cell: Cell, folder: Path) -> Path:
    """The file of a cell's results."""
    return folder / f"{cell.name}.json"


def complete(wanted: Sequence[Cell], folder: Path, cores: Sequence[int], flags: str = FLAGS) -> None:
    """Runs the cells that have no file, one on each core at a time, with these flags of XLA.

    Raises:
      CellError: some cells failed; all others have been run.
    """
    missing = [cell for cell in wanted if not file_of(cell, folder).is_file()]
    free: SimpleQueue[int] = SimpleQueue()
    for core in cores:
        free.put(core)

    def one(cell: Cell) -> str | None:
        core = free.get()
        try:
            print(f"{cell.name}: on core {core}", flush=True)
            return _run_cell(cell, folder, core, flags)
        finally:
            free.put(core)

    with ThreadPoolExecutor(len(cores)) as pool:
        errors = [error for error in pool.map(one, missing) if error]
    if errors:
        raise CellError("\n\n".join(errors))


def _run_cell(cell: Cell, folder: Path, core: int, flags: str = FLAGS) -> str | None:
    """Runs a cell on a core; its output if it failed."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cell.devices), "XLA_FLAGS": flags}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.convergence.cell", json.dumps(cell.settings), str(file_of(cell, folder))],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return f"{cell.name}, status {ended.returncode}:\n{ended.stdout[-4000:]}" if ended.returncode else None
