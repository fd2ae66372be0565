"""Memory that is allocated once: which slot a row on its way takes, so that as few as possible are needed.

A row is on the device from the operation in which its fetch begins, or which computes it, to that in which its write
ends: an interval.  Intervals that overlap need different slots; taken by their beginning, each the lowest slot that is
free, they need exactly as many as overlap at a time, and no colouring of an interval graph needs fewer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jhpt.planner.cost.streaming import AGAIN, Home

Part = Literal["rows", "weights", "gradient"]
"""All that a forward pass fetches; of the backward pass the weights, and the gradient."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """A part of what a layer has on the host is on the device during the operations first ... last."""

    layer: int
    part: Part
    first: int
    last: int


def residencies(homes: Sequence[Home]) -> tuple[Residency, ...]:
    """Of what comes and goes, in the order in which it comes; see `stream` for when that is."""
    last, found = 2 * len(homes) - 1, list[Residency]()

    def add(layer: int, part: Part, first: int, stop: int) -> None:
        if first < stop:
            found.append(Residency(layer=layer, part=part, first=first, last=stop - 1))

    forward = [layer for layer, home in enumerate(homes) if home != Home.RESIDENT]
    for before, layer, behind in zip([0, *forward], forward, [*forward[1:], len(homes)], strict=False):
        add(layer, "rows", before, behind)
    # Backwards a group ends with the operation of its first layer, the operations count from the last one on.
    backward = [last - layer for layer in reversed(range(len(homes))) if AGAIN[homes[layer], 0]]
    starts = [len(homes), len(homes), *(operation + 1 for operation in backward)]
    embedding_and_head = [*(operation + 1 for operation in backward), last + 1]
    for at, operation in enumerate(backward):
        add(last - operation, "weights", starts[at], embedding_and_head[at])
        add(last - operation, "gradient", starts[at + 1], embedding_and_head[at + 1])
    return tuple(sorted(found, key=lambda one: (one.first, one.last, one.layer, one.part)))


def slots(intervals: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """A slot for every interval, first and last included; of as few slots as there can be."""
    order = sorted(range(len(intervals)), key=lambda at: intervals[at])
    free, busy, used, found = list[int](), list[tuple[int, int]](), 0, [0] * len(intervals)
    for at in order:
        first, last = intervals[at]
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, used = used, used + 1
        found[at] = slot
        heapq.heappush(busy, (last, slot))
    return tuple(found)
