"""Candidates in the order of their bounds, without computing the bounds of all of them.

Candidates come in families.  A family has a bound that is quick to compute and holds for all its members.  It is
opened, which computes the bounds of its members, when no other candidate has a smaller bound.  A search that stops
early never opens most families.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Members = Iterator[tuple[float, T]]
"""(bound, candidate) of one family, in ascending order of the bounds."""


def ascending(families: Iterable[tuple[float, Callable[[], Members[T]]]]) -> Members[T]:
    """The members of all families in ascending order of their bounds; of equal ones those of earlier families first.

    Args:
      families: for each a bound that is not above those of its members, and what opens it.
    """
    openers = list(families)
    # (bound, whether the family is open, number, its next member)
    heap: list[tuple[float, bool, int, list[T]]] = [(bound, False, at, []) for at, (bound, _) in enumerate(openers)]
    heapq.heapify(heap)
    members: dict[int, Members[T]] = {}
    while heap:
        bound, is_open, number, member = heapq.heappop(heap)
        if is_open:
            yield bound, member[0]
        else:
            members[number] = openers[number][1]()
        if (following := next(members[number], None)) is not None:
            heapq.heappush(heap, (following[0], True, number, [following[1]]))
