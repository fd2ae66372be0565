"""Which buckets live on the host, so that a step fits the device and is as short as may be.

Greedy, then repair.  Everything is
resident at first.  While a step needs more than the device has, one bucket moves one home on (resident, optimizer,
both): the one that frees the most bytes per second that it costs; of those that cost nothing, the one that frees most.
Moving on never makes an operation need more (`stream.held`), so this ends with a step that fits, or with everything on
the host, which then is the proof that nothing fits the device.

Repair: while that brings the step nearer to both budgets, or makes one that fits shorter, one bucket moves to another
home, or two do.  It also starts from the greedy choice by bytes on the host instead of seconds, for hosts
that are small, from everything on the host, and from the best in which every n-th bucket has moved: what hides a copy
are the buckets that stay between two that come, which one move at a time does not find.

Parameters alone are no home here: of as many bytes the optimizer's state moves fewer in a step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.cost.streaming import Array, Bucket, Home, Homes, Streamed, stream

TOLERANCE = 1e-9
"""Relative; what is less is rounding."""

MOVED = (Home.OPTIMIZER, Home.BOTH)
"""Where a bucket may live that does not stay."""

Steps = Callable[[Homes], Streamed]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes."""

    device: float
    host: float


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A step that fits.  peak: bytes on the device at most; host: bytes there."""

    homes: tuple[Home, ...]
    seconds: float
    peak: float
    host: float


def choose(buckets: Sequence[Bucket], link: Link, budget: Budget) -> Chosen | None:
    """The shortest step found; None: none fits."""

    def steps(homes: Homes) -> Streamed:
        return stream(buckets, link, homes)

    greedy = [_moved_on(steps, len(buckets), budget, cost) for cost in (_seconds, _host)]
    starts = [*greedy, *_regular(steps, len(buckets), budget)]
    found = [_repaired(steps, budget, homes) for homes in starts]
    own = [(one, steps(one)) for one in found]
    fitting = [(one, step) for one, step in own if _over(step, budget)[0] == 0]
    if not fitting:
        return None
    homes, step = min(fitting, key=lambda pair: (pair[1].seconds[0], pair[1].peak[0]))
    return Chosen(
        homes=tuple(Home(home) for home in homes.tolist()),
        seconds=float(step.seconds[0]),
        peak=float(step.peak[0]),
        host=float(step.host[0]),
    )


def _seconds(steps: Streamed) -> Array:
    return steps.seconds


def _host(steps: Streamed) -> Array:
    return steps.host


def _over(steps: Streamed, budget: Budget) -> Array:
    """Bytes beyond either budget."""
    return np.maximum(steps.peak - budget.device, 0.0) + np.maximum(steps.host - budget.host, 0.0)


def _regular(steps: Steps, count: int, budget: Budget) -> list[Homes]:
    """Everything on the host, and of the homes in which every n-th bucket has moved those that come nearest."""
    every = np.array([_every(count, size, home) for size in range(1, count + 1) for home in MOVED])
    then = steps(every)
    return [np.full(count, Home.BOTH, np.int64), every[np.lexsort((then.seconds, _over(then, budget)))[0]]]


def _every(count: int, size: int, home: int) -> Homes:
    return np.where(np.arange(count) % size == 0, home, Home.RESIDENT)


def _moved_on(steps: Steps, count: int, budget: Budget, cost: Callable[[Streamed], Array]) -> Homes:
    """Greedy, from everything resident: homes with which the step fits the device, or everything on the host."""
    homes = np.zeros(count, np.int64)
    now = steps(homes)
    while now.peak[0] > budget.device and (homes < Home.BOTH).any():
        moves = np.array(list(_moves_on(homes)))
        then = steps(moves)
        more, need = cost(then) - cost(now), np.maximum(then.peak, budget.device)
        freed = now.peak[0] - need
        free = more <= TOLERANCE * cost(now)
        rate = np.where(free, np.inf, freed / np.where(free, 1.0, more))
        homes = moves[np.lexsort((then.host, freed, rate))[-1]]
        now = steps(homes)
    return homes


def _repaired(steps: Steps, budget: Budget, homes: Homes) -> Homes:
    """While it brings the step nearer to fitting, or makes it shorter: one moves, or two do."""
    now = steps(homes)
    over, seconds = float(_over(now, budget)[0]), float(now.seconds[0])
    while True:
        moves = np.array([*_changes(homes), *_pairs(homes)])
        then = steps(moves)
        excess = _over(then, budget)
        best = int(np.lexsort((then.peak, then.seconds, excess))[0])
        if not (excess[best], then.seconds[best]) < (over, seconds * (1 - TOLERANCE)):
            return homes
        homes, over, seconds = moves[best], float(excess[best]), float(then.seconds[best])


def _moves_on(homes: Homes) -> Iterable[Homes]:
    """Homes in which one bucket has moved one on."""
    for at in np.flatnonzero(homes < Home.BOTH).tolist():
        yield _with(homes, at, homes[at] + 1)


def _changes(homes: Homes, first: int = 0) -> Iterable[Homes]:
    """Homes in which one bucket, from the first on, has moved."""
    for at in range(first, len(homes)):
        yield from (_with(homes, at, home) for home in range(Home.BOTH + 1) if home != homes[at])


def _pairs(homes: Homes) -> Iterable[Homes]:
    """Homes in which two have."""
    for moved in _changes(homes):
        (at,) = np.flatnonzero(moved != homes).tolist()
        yield from _changes(moved, at + 1)


def _with(homes: Homes, at: int, home: int) -> Homes:
    moved = homes.copy()
    moved[at] = home
    return moved
