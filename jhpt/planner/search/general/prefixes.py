"""The first stages of a plan, fixed, and bounds of the step of every plan that begins with them."""

from collections.abc import Iterator
from dataclasses import dataclass

from jhpt.core.plan import Schedule
from jhpt.planner.search.bounds import turns
from jhpt.planner.search.general.groups import Group, single
from jhpt.planner.search.layer_degrees import Option


@dataclass(frozen=True)
class Fixed:
    """One stage that is fixed."""

    device: int
    devices: int
    group: Group
    transfer: float
    """Seconds of the transfer to this stage; 0 for the first."""
    head: float
    """Seconds from the start of the step to the stage's first forward."""
    tail: float
    """Seconds from the end of the stage's last backward until it, and all before it, are updated."""

    @property
    def option(self) -> Option:
        """How it runs, or the least of the ways it may."""
        return self.group.least

    @property
    def both(self) -> float:
        """Forward and backward of a micro-batch."""
        return self.option.forward + self.option.backward

    @property
    def data(self) -> tuple[int, int, int]:
        """(first device, devices, data degree) as what leaves the stage sees them."""
        return self.device, self.devices, self.devices // self.option.degrees[-1]


@dataclass(frozen=True)
class Ahead:
    """What stages still open take at least: the transfer to them, their round trips, and how many they are."""

    transfer: float = 0.0
    trip: float = 0.0
    near: tuple[float, ...] = ()
    stages: int = 0


@dataclass(frozen=True)
class Prefix:
    """Stages that are fixed, and the first layer and device that are not."""

    stages: tuple[Fixed, ...] = ()
    stop: int = 0
    device: int = 0

    @property
    def head(self) -> float:
        """Seconds forward through all stages, without the transfer that follows."""
        last = self.stages[-1] if self.stages else None
        return last.head + last.option.forward if last else 0.0

    @property
    def tail(self) -> float:
        """Seconds back through all stages until they are updated, without the transfer before it."""
        last = self.stages[-1] if self.stages else None
        return last.option.backward + last.tail if last else 0.0

    @property
    def open(self) -> int | None:
        """The first stage with several ways to run."""
        return next((at for at, stage in enumerate(self.stages) if len(stage.group.members) > 1), None)

    def grown(self, devices: int, group: Group, transfer: float) -> "Prefix":
        """One stage more, on the next devices."""
        option = group.least
        after = option.sync - option.backward + option.update
        stage = Fixed(self.device, devices, group, transfer, self.head + transfer, max(self.tail + transfer, after))
        return Prefix((*self.stages, stage), self.stop + len(option.degrees), self.device + devices)

    def settled(self, at: int) -> Iterator["Prefix"]:
        """The same with stage `at` run in each of its ways."""
        for option in self.stages[at].group.members:
            prefix = Prefix()
            for index, stage in enumerate(self.stages):
                prefix = prefix.grown(stage.devices, single(option) if index == at else stage.group, stage.transfer)
            yield prefix


def turning(prefix: Prefix, ahead: Ahead, schedule: Schedule, m: int) -> float:
    """What the loop takes at least, by the turns that micro-batches make through the prefix, and beyond it.

    1f1b: `bound.turns` from every stage to the last fixed one, to those near ahead, and to the very last.
    gpipe: a round trip, and in each direction M - 1 times the slowest stage or link on the way.
    """
    if schedule == "gpipe":
        return _waves(prefix, ahead, m)
    beyond = 2 * ahead.transfer + ahead.trip
    targets = [(0, 0.0)]
    if ahead.stages:
        targets += [(j, 2 * ahead.transfer + near) for j, near in enumerate(ahead.near, 1) if j < ahead.stages]
        targets.append((ahead.stages, beyond))
    worst = 0.0
    for further, turn in targets:
        transfer = 0.0
        for distance, stage in enumerate(reversed(prefix.stages)):
            turn += 2 * transfer + stage.both
            transfer, j, left = stage.transfer, distance + further, distance + ahead.stages + 1
            if j and (k := turns(m, left, j)):
                own = (k + 1) * turn + (m - 1 - k * (2 * j + 1)) * stage.both
                worst = max(worst, stage.head + own + stage.tail)
    return worst


def _waves(prefix: Prefix, ahead: Ahead, m: int) -> float:
    forward = backward = ahead.transfer
    turn, transfer, worst = 2 * ahead.transfer + ahead.trip, 0.0, 0.0
    for stage in reversed(prefix.stages):
        forward, backward = max(forward, transfer, stage.option.forward), max(backward, transfer, stage.option.backward)
        turn += 2 * transfer + stage.both
        transfer = stage.transfer
        worst = max(worst, stage.head + turn + (m - 1) * (forward + backward) + stage.tail)
    return worst
