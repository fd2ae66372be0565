"""The least that ranges of layers can cost on one place, with every layer at a degree that suits its neighbours.

A range [i, j) at degrees t costs, in any quantity that is a sum over its layers and the borders between them,

    q(i, j) = min over t of  sum over l of node[l, t_l]  +  sum over l of edge[l, t_l, t_{l+1}]  +  end[j-1, t_{j-1}]

a shortest path through (layer, degree), by Viterbi's recurrence in O(T^2) a layer.  Ranges that are equal layer by
layer (the same kinds in the same order) are one.  A model of N equal blocks between embedding and head has O(N) of them
instead of O(N^2).  All places of the same degrees, all quantities and all ranges of one length take a step together.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.planner.cost.schedule import Array

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """Ranges of one length: the range without its last layer, the kind of that layer and of the one before it."""

    parent: Index
    last: Index
    before: Index


@dataclass(frozen=True)
class Spans:
    """Ranges of layers that differ in kinds or order, shortest first."""

    levels: tuple[Level, ...]
    number: Index
    """[N, N + 1] which of them [i, stop) is; -1 where stop <= i."""


def spans(kinds: Index) -> Spans:
    """Distinct ranges of a row of layers of such kinds."""
    n = len(kinds)
    number = np.full((n, n + 1), -1)
    levels: list[Level] = []
    base = 0
    shorter = np.zeros(n, np.int64)  # which range of the length before starts at i
    for length in range(1, n + 1):
        starts = np.arange(n - length + 1)
        pairs = shorter[starts] * (kinds.max() + 1) + kinds[starts + length - 1]
        _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
        last = first + length - 1
        levels.append(Level(parent=shorter[first], last=kinds[last], before=kinds[np.maximum(last - 1, 0)]))
        number[starts, starts + length] = base + which
        base += len(first)
        shorter = which
    return Spans(tuple(levels), number)


def shortest(ranges: Spans, nodes: Array, edges: Array, ends: Array) -> Array:
    """[..., spans] the least cost of every range.

    Args:
      nodes: [..., kinds, T] costs of a layer; infinite where it does not allow the degree.
      edges: [..., kinds, T, T] costs of the border after a layer of that kind.
      ends: [..., kinds, T] costs of being the last layer.
    """
    degrees = range(nodes.shape[-1])
    least = []
    path = nodes[..., ranges.levels[0].last, :]
    for length, level in enumerate(ranges.levels):
        if length:
            ahead, border = path[..., level.parent, :], edges[..., level.before, :, :]
            path = ahead[..., 0, None] + border[..., 0, :]
            for t in degrees[1:]:
                path = np.minimum(path, ahead[..., t, None] + border[..., t, :])
            path = path + nodes[..., level.last, :]
        least.append((path + ends[..., level.last, :]).min(axis=-1))
    return np.concatenate(least, axis=-1)
