"""A file of measured cells anew: the same settings, on the text and with the code of today.

    python -m benchmarks.convergence.again FILE --out FOLDER [--json FILE] [--cores N]

FILE is what `--json` of `jhpt bench convergence` or `jhpt bench precision` wrote.  Cells that have been run into FOLDER
are not run again.  Prints every cell's loss then and now, and their differences from the first cell.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.cells import Cell
from benchmarks.convergence.held_out import checked
from benchmarks.convergence.run import complete, finished, opened
from jhpt.bench.results import print_table, write_json
from jhpt.core.config import DataConfig
from jhpt.core.text_files import read_text, tree_of

Result = Mapping[str, Any]
"""The content of a cell's file."""

COLUMNS = ("cell", "seed", "loss then", "against the first", "now", "against the first")


def measured(file: Path) -> dict[Cell, Result]:
    """The cells of a file, with what was measured."""
    rows: list[Result] = tree_of(read_text(file))["rows"]
    return {Cell(**row["settings"]): row for row in rows}


def lines(then: Mapping[Cell, Result], now: Mapping[Cell, Result]) -> list[Sequence[str]]:
    """A line for every cell: its validation loss in both, and in percent of that of the first cell."""
    first = next(iter(then))
    rows: list[Sequence[str]] = []
    for cell, result in then.items():
        changes = {name: value for name, value in cell.changes.items() if first.changes.get(name) != value}
        words = " ".join(f"{name}={value}" for name, value in changes.items()) or "as it is"
        row = [words, str(cell.seed), *_against(result, then[first])]
        rows.append(row + (_against(now[cell], now[first]) if cell in now and first in now else ["", ""]))
    return rows


def _against(result: Result, first: Result) -> list[str]:
    return [f"{result['validation']:.4f}", f"{100 * (result['validation'] / first['validation'] - 1):+.2f} %"]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="measured cells")
    parser.add_argument("--out", required=True, help="folder of finished cells, which are not run again")
    parser.add_argument("--json", help="file for the samples")
    parser.add_argument("--cores", type=int, default=None, help="how many cells run at a time; default: one per core")
    options = parser.parse_args(arguments)
    text, then, place = checked(DataConfig()), measured(options.file), opened(options.out)
    complete(list(then), place, sorted(os.sched_getaffinity(0))[: options.cores])
    now = finished(list(then), place)
    print_table(f"{options.file.name}, then and now", COLUMNS, lines(then, now), words=1)
    if options.json:
        bench = json.loads(options.file.read_text())["bench"]
        write_json(options.json, bench, {"settings of": options.file.name}, list(now.values()), text, device=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
