"""What was measured of all competitors at one set-up, over several launches of the hosts.

A launch compiles, measures layers and links, and plans anew; within it competitors run in turn, round by round.  Two
launches of the same program may lie further apart than two rounds, so both spreads are printed.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jhpt.bench.ratios import times_as_fast

Row = Mapping[str, Any]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a step by competitor.

    samples: of every launch, of every round, in which some run several times.  predicted: of every launch, which may
    have measured its parts anew.
    """

    samples: Mapping[str, Sequence[Sequence[float]]]
    predicted: Mapping[str, Sequence[float]]

    @property
    def launches(self) -> int:
        """How often the hosts were launched."""
        return max(map(len, self.samples.values()))

    def ratios(self, other: str, ours: str) -> list[float]:
        """Seconds of one competitor / seconds of the other, of every launch."""
        launches = zip(self.samples[other], self.samples[ours], strict=True)
        return [times_as_fast(*paired(theirs, mine)) for theirs, mine in launches]

    def ratio(self, other: str, ours: str) -> float:
        """The geometric mean over launches of `ratios`."""
        return statistics.geometric_mean(self.ratios(other, ours))

    def medians(self, name: str) -> list[float]:
        """Typical seconds in every launch."""
        return [statistics.median(samples) for samples in self.samples[name]]

    def median(self, name: str) -> float:
        """Typical seconds."""
        return statistics.median(self.medians(name))

    def rounds(self, name: str) -> list[float]:
        """The seconds of all rounds of all launches."""
        return [seconds for samples in self.samples[name] for seconds in samples]

    def errors(self, name: str) -> list[float]:
        """(predicted - measured) / measured, of every launch."""
        pairs = zip(self.predicted[name], self.medians(name), strict=True)
        return [predicted / measured - 1 for predicted, measured in pairs]

    def error(self, name: str) -> float:
        """The median over launches of `errors`."""
        return statistics.median(self.errors(name))

    def apart(self, name: str) -> float:
        """How far launches lie apart: the largest median / the smallest - 1; 0 with one launch."""
        medians = self.medians(name)
        return max(medians) / min(medians) - 1


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[list[float], list[float]]:
    """As many samples of both, from the same rounds in the same order: of what ran more often the medians of as many
    runs in a row as there are to one run of the other."""
    count = min(len(one), len(other))
    if len(one) % count or len(other) % count:
        raise ValueError(
            f"{len(one)} and {len(other)} samples are not of the same rounds: one number divides the other"
        )
    return _medians(one, count), _medians(other, count)


def _medians(samples: Sequence[float], count: int) -> list[float]:
    """Of so many pieces of equal length."""
    length = len(samples) // count
    return [statistics.median(samples[at * length : (at + 1) * length]) for at in range(count)]


def numbered(rows: Iterable[Row], launch: int) -> list[dict[str, Any]]:
    """The rows of one launch, with its number."""
    return [{**row, "launch": launch} for row in rows]


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Rows by set-up, in the order of launches."""
    groups: dict[Key, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.get("launch", 0)):  # a stable sort
        groups.setdefault(key(row), []).append(row)
    return groups


def column(rows: Iterable[Row], name: str, value: str) -> dict[str, list[Any]]:
    """A value of every row by competitor, in the order of launches.  name: the field that names the competitor."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        values.setdefault(row[name], []).append(row[value])
    return values


def in_every_launch(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of what all launches measured.  name: the field that names the competitor."""
    launches = {row.get("launch", 0) for row in rows}
    of = {one: {row.get("launch", 0) for row in rows if row[name] == one} for one in {row[name] for row in rows}}
    return [row for row in rows if of[row[name]] == launches]


def percent_apart(measured: Measured, name: str) -> str:
    """A cell of a table; empty with one launch."""
    return f"{100 * measured.apart(name):.0f} %" if measured.launches > 1 else ""
