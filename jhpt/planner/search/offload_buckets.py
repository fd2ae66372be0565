"""Not called by plans yet: which buckets to offload if buckets differ, and where streamed rows lie on the device.

`choose` is greedy and then repairs its choice.  At first everything is resident.  While a step needs more memory than
the device has, one bucket moves one home on (resident, optimizer, both): the bucket that frees the most bytes per
second that the move costs.  Among moves that cost nothing, the one that frees most wins.  A move never makes an
operation need more (`streaming.held`), so this ends with a step that fits or with everything offloaded, which proves
that nothing fits.

Repair moves one bucket or two buckets to other homes, as long as that brings the step nearer to both budgets or makes a
fitting step shorter.  It starts from several choices: the greedy one; the greedy one by host bytes instead of seconds,
for small hosts; everything offloaded; and the best of those with every n-th bucket offloaded.  The last one matters
because resident buckets between two offloaded ones hide the copies, which single moves do not find.

Parameters alone are no home here: for the same bytes, optimizer state moves fewer of them in a step.

`slots` places rows in memory that is allocated once.  A row is on the device from the operation that fetches or
computes it until the operation that writes it back: an interval of operations.  Overlapping intervals need different
slots.  If intervals are taken in the order of their beginning and each gets the lowest free slot, as many slots are
needed as intervals overlap at a time.  No colouring of an interval graph needs fewer.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.cost.streaming import AGAIN, Array, Bucket, Home, Homes, Streamed, stream

TOLERANCE = 1e-9
"""Relative.  A smaller difference is rounding."""

MOVED = (Home.OPTIMIZER, Home.BOTH)
"""Homes of a bucket that is offloaded."""

Steps = Callable[[Homes], Streamed]

Part = Literal["rows", "weights", "gradient"]
"""What a forward pass fetches ("rows"), and the weights and the gradient of a backward pass."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Usable bytes of the device and of the host."""

    device: float
    host: float


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Homes of all buckets with which the step fits.  peak: most bytes on the device.  host: bytes on the host."""

    homes: tuple[Home, ...]
    seconds: float
    peak: float
    host: float


def choose(buckets: Sequence[Bucket], link: Link, budget: Budget) -> Chosen | None:
    """The homes with the shortest step found; None if none fits."""

    def steps(homes: Homes) -> Streamed:
        return stream(buckets, link, homes)

    greedy = [_moved_on(steps, len(buckets), budget, cost) for cost in (_seconds, _host)]
    starts = [*greedy, *_regular(steps, len(buckets), budget)]
    candidates = [_repaired(steps, budget, homes) for homes in starts]
    streamed = [(homes, steps(homes)) for homes in candidates]
    fitting = [(homes, step) for homes, step in streamed if _over(step, budget)[0] == 0]
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
    """Everything offloaded, and the best choice that offloads every n-th bucket."""
    every = np.array([_every(count, size, home) for size in range(1, count + 1) for home in MOVED])
    then = steps(every)
    return [np.full(count, Home.BOTH, np.int64), every[np.lexsort((then.seconds, _over(then, budget)))[0]]]


def _every(count: int, size: int, home: int) -> Homes:
    return np.where(np.arange(count) % size == 0, home, Home.RESIDENT)


def _moved_on(steps: Steps, count: int, budget: Budget, cost: Callable[[Streamed], Array]) -> Homes:
    """The greedy choice: homes with which the step fits the device, or everything offloaded."""
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
    """Moves one bucket or two as long as that brings the step nearer to fitting or makes it shorter."""
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
    """All choices in which one bucket has moved one home on."""
    for at in np.flatnonzero(homes < Home.BOTH).tolist():
        yield _with(homes, at, homes[at] + 1)


def _changes(homes: Homes, first: int = 0) -> Iterable[Homes]:
    """All choices in which one bucket, not before `first`, has moved."""
    for at in range(first, len(homes)):
        yield from (_with(homes, at, home) for home in range(Home.BOTH + 1) if home != homes[at])


def _pairs(homes: Homes) -> Iterable[Homes]:
    """All choices in which two buckets have moved."""
    for moved in _changes(homes):
        (at,) = np.flatnonzero(moved != homes).tolist()
        yield from _changes(moved, at + 1)


def _with(homes: Homes, at: int, home: int) -> Homes:
    moved = homes.copy()
    moved[at] = home
    return moved


@dataclass(frozen=True, kw_only=True)
class Residency:
    """A part of a layer's offloaded state is on the device during the operations first ... last."""

    layer: int
    part: Part
    first: int
    last: int


def residencies(homes: Sequence[Home]) -> tuple[Residency, ...]:
    """The residencies of everything that is streamed, in order of arrival; `stream` says when that is."""
    last, residencies = 2 * len(homes) - 1, list[Residency]()

    def add(layer: int, part: Part, first: int, stop: int) -> None:
        if first < stop:
            residencies.append(Residency(layer=layer, part=part, first=first, last=stop - 1))

    forward = [layer for layer, home in enumerate(homes) if home != Home.RESIDENT]
    for before, layer, behind in zip([0, *forward], forward, [*forward[1:], len(homes)], strict=False):
        add(layer, "rows", before, behind)
    # In the backward pass a group ends with its first layer; operations are counted from the last layer on.
    backward = [last - layer for layer in reversed(range(len(homes))) if AGAIN[homes[layer], 0]]
    starts = [len(homes), len(homes), *(operation + 1 for operation in backward)]
    stops = [*(operation + 1 for operation in backward), last + 1]
    for at, operation in enumerate(backward):
        add(last - operation, "weights", starts[at], stops[at])
        add(last - operation, "gradient", starts[at + 1], stops[at + 1])
    return tuple(sorted(residencies, key=lambda entry: (entry.first, entry.last, entry.layer, entry.part)))


def slots(intervals: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """A slot for every interval (both ends included), with as few slots as possible."""
    order = sorted(range(len(intervals)), key=lambda at: intervals[at])
    free, busy, used, chosen = list[int](), list[tuple[int, int]](), 0, [0] * len(intervals)
    for at in order:
        first, last = intervals[at]
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, used = used, used + 1
        chosen[at] = slot
        heapq.heappush(busy, (last, slot))
    return tuple(chosen)
