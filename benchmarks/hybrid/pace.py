"""How fast hosts compute at a moment.

A machine that others share may compute 20 % faster or slower some minutes later (docs/reports/hybrid.md), and passes of
few rows, which wait for their weights, not by as much as passes of many.  What a host gains by computing alone changes,
too: 1.00 to 1.24 times as fast in launches of one model on one machine.  So both are measured again around the steps
that are predicted.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, typical_seconds
from benchmarks.hybrid.task import Task

ROUNDS = 3
"""How often all hosts time their layers, and in turn with them one host alone."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """By number of rows of a pass.

    pace: seconds of layers over those that they took before.
    alone: how many times as fast the first host is while the others wait, never below 1.
    """

    pace: Mapping[int, float]
    alone: Mapping[int, float]

    def mean(self, other: "Moment") -> "Moment":
        """The geometric mean of two moments."""
        return Moment(pace=_mean(self.pace, other.pace), alone=_mean(self.alone, other.alone))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Programs of layers without tensor ranks, and the seconds that they took on this host before."""

    calls: Mapping[str, Call]
    seconds: Mapping[str, float]

    def now(self, hosts: Hosts[Task]) -> Moment:
        """How fast hosts compute now: the geometric mean over programs, of `pace` also over hosts.

        All hosts and one of them are timed in turn, so that a change of the machine's pace is not taken for a gain by
        being alone.  It lifts the limit of links.
        """
        hosts.limit(None)
        slower, faster = list[dict[int, float]](), list[dict[int, float]]()
        for _ in range(ROUNDS):
            hosts.wait()
            together = typical_seconds(self.calls, 1)
            hosts.wait()
            slower.append(by_rows(together, self.seconds))
            faster.append(by_rows(together, typical_seconds(self.calls, 1) if hosts.rank == 0 else together))
        paces, gains = (
            [statistics.median(each[rows] for each in found) for rows in found[0]] for found in (slower, faster)
        )
        everyone = hosts.everyone({"pace": paces, "alone": gains})
        pace = map(statistics.geometric_mean, zip(*(one["pace"] for one in everyone), strict=True))
        alone = (max(1.0, gain) for gain in everyone[0]["alone"])
        return Moment(pace=dict(zip(slower[0], pace, strict=True)), alone=dict(zip(slower[0], alone, strict=True)))


def by_rows(seconds: Mapping[str, float], others: Mapping[str, float]) -> dict[int, float]:
    """Seconds of calls over other seconds of them: by number of rows the geometric mean."""
    ratios: dict[int, list[float]] = {}
    for name, each in seconds.items():
        ratios.setdefault(rows_of(name), []).append(each / others[name])
    return {rows: statistics.geometric_mean(each) for rows, each in ratios.items()}


def rows_of(name: str) -> int:
    """The number of rows of a layer's call."""
    return int(name.rpartition("|")[2].split()[0])


def _mean(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {rows: math.sqrt(one[rows] * other[rows]) for rows in one}
