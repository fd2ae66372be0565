"""Not called by plans yet; it will place streamed rows in memory that is allocated once.

A row is on the device from the operation that fetches or computes it until the operation that writes it back: an
interval of operations.  Overlapping intervals need different slots.  If intervals are taken by their beginning and each
gets the lowest free slot, as many slots are needed as intervals overlap at a time.  No colouring of an interval graph
needs fewer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jhpt.planner.cost.streaming import AGAIN, Home

Part = Literal["rows", "weights", "gradient"]
"""What a forward pass fetches ("rows"), and the weights and the gradient of a backward pass."""


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
