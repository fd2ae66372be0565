"""How fast hosts compute at a moment.

A machine that others share may compute 20 % faster or slower some minutes later (docs/reports/hybrid.md), and passes of
few rows, which wait for their weights, not by as much as passes of many.  What a host gains by computing alone changes,
too: it was 1.00 to 1.24 times as fast in launches of one model on one machine.  So layers are timed again in turn with
the steps that are predicted.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, Series, in_turn
from benchmarks.hybrid.task import Task

Seconds = Mapping[str, float]
"""Seconds of layers by the names of their programs."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """By number of rows of a pass.

    pace: seconds of layers over those that they took before.
    alone: how many times as fast the first host is while the others wait, never below 1.
    """

    pace: Mapping[int, float]
    alone: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Programs of layers without tensor ranks, and the seconds that they took on this host before."""

    series: Mapping[str, Series]
    seconds: Seconds

    def among(
        self, hosts: Hosts[Task], steps: Mapping[str, Call], rounds: int, times: Mapping[str, int] | None = None
    ) -> tuple[dict[str, list[float]], Moment]:
        """(seconds of every step in turn, how fast hosts computed meanwhile).

        In every round all hosts time their layers once, and one host does alone.  Steps have run before.

        times: of steps that run several times in every round, how often.
        """
        together, alone = list[dict[str, float]](), list[dict[str, float]]()

        def of_all() -> None:
            together.append(self._now())

        def of_one() -> None:
            alone.append(self._now() if hosts.rank == 0 else {})

        layers = {"layers of all hosts": of_all, "layers of one host": of_one}
        samples = in_turn(hosts, {**steps, **layers}, rounds, warmup=False, times=times)
        return {name: samples[name] for name in steps}, moment(hosts, self.seconds, together, alone)

    def _now(self) -> dict[str, float]:
        return {name: each.seconds() for name, each in self.series.items()}


def moment(hosts: Hosts[Task], before: Seconds, together: Sequence[Seconds], alone: Sequence[Seconds]) -> Moment:
    """What follows from the seconds of this host's layers, medians over rounds, and of the pace the geometric mean over
    hosts.

    A gain by being alone is that of a round, so that a change of the machine's pace is not taken for one.

    Args:
      together: in every round, while all hosts compute.  alone: while only the first one does; of the others empty.
    """
    slower = _medians([by_rows(each, before) for each in together])
    faster = _medians([by_rows(of_all, of_one) for of_all, of_one in zip(together, alone, strict=True) if of_one])
    everyone = hosts.everyone({"slower": list(slower.values()), "faster": list(faster.values())})
    pace = map(statistics.geometric_mean, zip(*(each["slower"] for each in everyone), strict=True))
    gains = (max(1.0, gain) for gain in everyone[0]["faster"])
    return Moment(pace=dict(zip(slower, pace, strict=True)), alone=dict(zip(slower, gains, strict=True)))


def by_rows(seconds: Seconds, others: Seconds) -> dict[int, float]:
    """Seconds of all programs together over other seconds of them, by number of rows.

    So a program counts by what it takes, as in a step.  Embeddings and heads of few rows take 0.1 ms, much of it for
    the call: among steps of mlp they took up to 15 % longer than before, when blocks took 5 % less.
    """
    sums: dict[int, list[float]] = {}
    for name, each in seconds.items():
        both = sums.setdefault(rows_of(name), [0.0, 0.0])
        both[0] += each
        both[1] += others[name]
    return {rows: its / other for rows, (its, other) in sums.items()}


def rows_of(name: str) -> int:
    """The number of rows of a layer's call."""
    return int(name.rpartition("|")[2].split()[0])


def _medians(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {rows: statistics.median(each[rows] for each in rounds) for rows in (rounds[0] if rounds else ())}
