"""Memory that is allocated once: which slot a fetched bucket takes, so that as few as possible are needed.

A bucket is on the device from the operation in which its fetch begins to that in which its write ends: an interval.
Intervals that overlap need different slots; taken by their beginning, each the lowest slot that is free, they need
exactly as many as overlap at a time, and no colouring of an interval graph needs fewer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jhpt.planner.offload.stream import Home, stays

Part = Literal["weights", "state"]


@dataclass(frozen=True, kw_only=True)
class Residency:
    """A part of a layer's bucket is on the device during the operations first ... last."""

    layer: int
    part: Part
    first: int
    last: int


def residencies(homes: Sequence[Home], ahead: int) -> tuple[Residency, ...]:
    """Of what is streamed, in the order in which it comes; see `stream` for when that is."""
    layers = len(homes)
    remain, found = stays(layers, ahead), list[Residency]()

    def add(layer: int, part: Part, first: int, last: int) -> None:
        last = min(last, 2 * layers - 1)
        found.append(Residency(layer=layer, part=part, first=max(first, 0), last=last))

    for layer, home in enumerate(homes):
        back = 2 * layers - 1 - layer
        if home == Home.BOTH and remain[layer]:
            add(layer, "weights", layer - ahead, back + 1)
        elif home == Home.BOTH:
            add(layer, "weights", layer - ahead, layer)
            add(layer, "weights", back - ahead, back + 1)
        if home != Home.RESIDENT:
            add(layer, "state", back - ahead, back + 1)
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
