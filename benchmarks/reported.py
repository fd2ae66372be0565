"""Claims and tables again from the raw samples of benchmarks' files: `python -m benchmarks.reported FILE [FILE...]`.

Several files of one benchmark count as further launches, for example of another day.  `--write` puts the claims that
are ratios of seconds, of losses, or of launches, back into a single file; the samples stay as they are.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.comms import run as comms
from benchmarks.comms import tables
from benchmarks.convergence import choices
from benchmarks.convergence.cells import Cell
from benchmarks.hybrid import run as hybrid
from benchmarks.planner.worth import WorthRow, worth_claims
from jhpt.bench import kernels, train
from jhpt.bench.memory import run as memory
from jhpt.bench.ratios import WORD
from jhpt.bench.results import Claim, print_claims, print_table

Rows = Sequence[Mapping[str, Any]]

FORMER = {"framework_ratio"}
"""Names that ratios of seconds have had in older files."""


def _train(rows: Rows) -> dict[str, Claim]:
    setup = rows[-1]["setup"]
    samples = {row["competitor"].split()[0]: row["samples_s"] for row in rows if row["setup"] == setup}
    return train.ratio_claims(samples, place=setup)


def _planner(rows: Rows) -> dict[str, Claim]:
    return worth_claims([WorthRow.from_json(row) for row in rows if row["part"] == "worth"])


def _memory(rows: Rows) -> dict[str, Claim]:
    made = [dict(row) for row in rows if row["kind"] == "choice"]
    return memory.choice_claims(made) if made else {}


def _choices(rows: Rows) -> tuple[dict[Cell, choices.Result], dict[Cell, str]]:
    """The rows that compare choices of tokens, by cell, and the kinds of all such cells."""
    kinds = choices.cells(quick=False)
    of_name = {Cell(**row["settings"]).name: row for row in rows}
    return {cell: of_name[cell.name] for cell in kinds if cell.name in of_name}, kinds


CLAIMS: dict[str, Callable[[Rows], dict[str, Claim]]] = {
    "hybrid": hybrid.claims,
    "comms": comms.claims,
    "train": _train,
    "planner": _planner,
    "memory": _memory,
    "convergence": lambda rows: choices.claims_of(*_choices(rows)),
    "kernels": lambda rows: kernels.claims([dict(row) for row in rows]),
}
"""What each benchmark makes of its rows; of others nothing is divided by anything."""


def joined(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of all files, with their launches numbered on."""
    rows: list[Mapping[str, Any]] = []
    for report in reports:
        first = 1 + max((row.get("launch", 0) for row in rows), default=-1)
        rows += [{**row, "launch": first + row.get("launch", 0)} for row in report["rows"]]
    return rows


def with_claims(report: Mapping[str, Any]) -> dict[str, Any]:
    """A file's content with its ratios computed again."""
    made = CLAIMS[report["bench"]](report["rows"])
    kept = {name: claim for name, claim in report["claims"].items() if WORD not in name and name not in FORMER}
    return {**report, "claims": kept | {name: asdict(claim) for name, claim in made.items()}}


def print_tables(bench: str, rows: Rows) -> None:
    """The tables of the emulated benchmarks, and of choices of tokens."""
    if bench == "hybrid":
        hybrid.print_entries(hybrid.entries(rows))
    elif bench == "comms":
        for table in tables.TABLES:
            tables.print_entries(rows, table)
    elif bench == "convergence":
        print_table("which tokens are sent in 8 bits", choices.COLUMNS, choices.lines(*_choices(rows)), words=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints tables and claims, and writes the file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    reports = [json.loads(file.read_text()) for file in options.files]
    benches = {report["bench"] for report in reports}
    if len(benches) > 1 or not benches <= CLAIMS.keys():
        parser.error(f"give files of one of {', '.join(CLAIMS)}, found {', '.join(sorted(benches))}")
    if options.write and len(reports) > 1:
        parser.error("--write is for a single file")
    (bench,) = benches
    rows = joined(reports) if len(reports) > 1 else reports[0]["rows"]
    print_tables(bench, rows)
    print_claims(CLAIMS[bench](rows))
    if options.write:
        options.files[0].write_text(json.dumps(with_claims(reports[0]), indent=1) + "\n")


if __name__ == "__main__":
    main()
