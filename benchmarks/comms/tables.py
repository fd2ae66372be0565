"""The two tables, of tensor parallelism and of gradients: the names of their rows, ratios, errors, and printing."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comms import gradients, task
from benchmarks.emulated.launch import PLACE
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
        return f"time of {self.baseline} / the variant"


TENSOR = Table(title="tensor parallelism", kind="", baseline=task.BASELINE)
GRADIENTS = Table(title="gradients of data parallelism", kind="gradient ", baseline=gradients.BASELINE)
TABLES = (TENSOR, GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All variants of a table at one rate: measured and predicted seconds of their steps.

    A ratio is the median of the ratios of the rounds, so that it does not depend on how busy the machine is.
    """

    rate: float
    baseline: str
    samples: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.0f} Mbit/s"

    def ratio(self, name: str, baseline: str | None = None) -> float:
        """Time of the baseline, by default the table's / time of a variant."""
        pairs = zip(self.samples[baseline or self.baseline], self.samples[name], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def median(self, name: str) -> float:
        """Typical seconds."""
        return statistics.median(self.samples[name])

    def error(self, name: str) -> float:
        """(predicted - measured) / measured."""
        return self.predicted[name] / self.median(name) - 1


def entries(rows: Iterable[Mapping[str, Any]], table: Table = TENSOR) -> list[Entry]:
    """The entries of a table, from rows of steps."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["row"] == f"{table.kind}step":
            by_rate.setdefault(row["bits_per_s"], []).append(row)
    return [
        Entry(
            rate=rate,
            baseline=table.baseline,
            samples={row["variant"]: row["samples_s"] for row in steps},
            predicted={row["variant"]: row["predicted_s"] for row in steps},
        )
        for rate, steps in by_rate.items()
    ]


def counts(rows: Iterable[Mapping[str, Any]], table: Table = TENSOR) -> list[Mapping[str, Any]]:
    """Rows of bytes, counted and by the formula."""
    return [row for row in rows if row["row"] == f"{table.kind}bytes"]


def print_entries(rows: Sequence[Mapping[str, Any]], table: Table = TENSOR) -> None:
    """A line for every variant at every rate."""
    counted = {row["variant"]: row for row in counts(rows, table)}
    columns = ("Mbit/s", "variant", "MB sent", "ms", "quartiles", "predicted", "error", f"{table.baseline} / it")
    lines = []
    for entry in entries(rows, table):
        for name, samples in entry.samples.items():
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
            lines.append(
                (
                    f"{entry.rate / 1e6:.0f}",
                    name,
                    f"{counted[name]['counted'] / 1e6:.2f}" if name in counted else "",
                    f"{entry.median(name) * 1e3:.0f}",
                    f"{low * 1e3:.0f} - {high * 1e3:.0f}",
                    f"{entry.predicted[name] * 1e3:.0f}",
                    f"{100 * entry.error(name):+.0f} %",
                    f"{entry.ratio(name):.2f}",
                )
            )
    print_table(f"bench comms: {table.title}, {PLACE}, ms of a step", columns, lines, words=2)
