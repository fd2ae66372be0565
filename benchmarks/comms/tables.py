"""The two tables, of tensor parallelism and of gradients: the names of their rows, gains, and printing."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comms import gradients, task
from benchmarks.emulated.entries import Measured, column, grouped, percent_apart
from benchmarks.emulated.launch import PLACE
from jhpt.bench.ratios import ratio_unit
from jhpt.bench.results import print_table


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.  kind: prefix of the names of its rows.  baseline: the variant that others are compared with."""

    title: str
    kind: str
    baseline: str

    @property
    def unit(self) -> str:
        """The unit of ratios."""
        return ratio_unit(self.baseline, "the variant")


TENSOR = Table(title="tensor parallelism", kind="", baseline=task.BASELINE)
GRADIENTS = Table(title="gradients of data parallelism", kind="gradient ", baseline=gradients.BASELINE)
TABLES = (TENSOR, GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class Entry(Measured):
    """All variants of a table at one rate."""

    rate: float
    baseline: str

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.0f} Mbit/s"

    def gain(self, name: str, baseline: str | None = None) -> float:
        """Seconds of the baseline, by default the table's / seconds of a variant."""
        return self.ratio(baseline or self.baseline, name)


def entries(rows: Iterable[Mapping[str, Any]], table: Table = TENSOR) -> list[Entry]:
    """The entries of a table, from rows of steps."""
    steps = (row for row in rows if row["row"] == f"{table.kind}step")
    return [
        Entry(
            rate=rate,
            baseline=table.baseline,
            samples=column(group, "variant", "samples_s"),
            predicted=column(group, "variant", "predicted_s"),
        )
        for rate, group in grouped(steps, lambda row: row["bits_per_s"]).items()
    ]


def counts(rows: Iterable[Mapping[str, Any]], table: Table = TENSOR) -> list[Mapping[str, Any]]:
    """Rows of bytes, counted and by the formula."""
    return [row for row in rows if row["row"] == f"{table.kind}bytes"]


def print_entries(rows: Sequence[Mapping[str, Any]], table: Table = TENSOR) -> None:
    """A line for every variant at every rate."""
    counted = {row["variant"]: row for row in counts(rows, table)}
    columns = ("Mbit/s", "variant", "MB sent", "ms", "quartiles", "launches apart", "predicted", "error")
    lines = []
    for entry in entries(rows, table):
        for name in entry.samples:
            low, _, high = statistics.quantiles(entry.rounds(name), n=4, method="inclusive")
            lines.append(
                (
                    f"{entry.rate / 1e6:.0f}",
                    name,
                    f"{counted[name]['counted'] / 1e6:.2f}" if name in counted else "",
                    f"{entry.median(name) * 1e3:.0f}",
                    f"{low * 1e3:.0f} - {high * 1e3:.0f}",
                    percent_apart(entry, name),
                    f"{statistics.median(entry.predicted[name]) * 1e3:.0f}",
                    f"{100 * entry.error(name):+.0f} %",
                    f"{entry.gain(name):.2f}",
                )
            )
    title = f"bench comms: {table.title}, {PLACE}, ms of a step"
    print_table(title, (*columns, f"{table.baseline} / it"), lines, words=2)
