"""Tensor-parallel sums beside computation: samples in chunks, the sum of one beside the work of another (AccTFM).

An operation is work that ends in a sum over the tensor axis; a block is two of them, attention and MLP.  Its samples
are cut into c chunks, sizes n_q as equal as can be.  There are two streams, and each takes operations in order, chunk
by chunk: with f the seconds of the work, a those of the sum, g those of work that nobody waits for (weight gradients),

    Cs(o, q) = max(end of the work before it, Me(o-1, q))     Ce(o, q) = Cs(o, q) + f_o(n_q), then g_o(n_q)
    Ms(o, q) = max(end of the sum before it, Ce(o, q))        Me(o, q) = Ms(o, q) + a_o(n_q)

across the borders of layers.  Where operations differ in their number of chunks, a chunk waits for all that hold any of
its samples.  The backward pass is the same with operations in reverse and g > 0.  `makespan` plays it.

Operations that are alike follow each other every

    T(c) = max(sum of f(n_q) + g(n_q),  sum of a(n_q),  f(n_0) + a(n_0))

seconds, n_0 the largest, and the first of them takes `filling` seconds more.  More chunks hide more, until work in
small pieces and the latencies of many sums cost more than what is hidden.

`partition` finds the numbers of chunks of a row of layers in O(L |C|^2).  Its cost is additive: a run of layers cut
alike takes the sum of their T, and once the filling of its first layer forward and of its last layer backward, as if it
began when all that is before it is done:

    D[l][c] = min over c' of  D[l-1][c'] + T_l(c) + (0 where c' = c, else last_{l-1}(c') + first_l(c))

For layers that are alike and cut alike, which blocks are, this is `makespan` itself; cut in different ways they take no
longer than it says.  For any others it lies between half of `makespan` and twice that (tests/planner/cost/test_overlap.py).

Zeng et al. 2022 (TPDS, doi 10.1109/TPDS.2022.3187815); weight gradients: Wang et al. 2024 (Domino, arXiv 2409.15241).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jhpt.planner.cost.schedule import Array

Seconds = Callable[[int], Any]
"""By the number of samples; of several operations at once an array."""


def _none(samples: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Work that ends in a sum over the tensor axis.

    behind: work that follows the sum's start and is not waited for: gradients of weights.
    """

    work: Seconds
    travel: Seconds
    behind: Seconds = _none


def chunk_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Samples of every chunk, as `np.array_split` cuts them; no chunk is empty."""
    count = min(chunks, samples)
    size, larger = divmod(samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def makespan(operations: Sequence[Operation], chunks: Sequence[int], samples: int, *, overlap: bool = True) -> float:
    """Seconds until the last operation's work and sums are done.

    chunks: of every operation.  overlap: whether there are two streams; with one a sum is waited for.
    """
    worked = travelled = 0.0
    done = [(samples, 0.0)]  # of every chunk before: one past its last sample, and when its sum is there
    for operation, count in zip(operations, chunks, strict=True):
        arrived: list[tuple[int, float]] = []
        stop, at = 0, 0
        for size in chunk_sizes(samples, count):
            stop += size
            ready = done[at][1]
            while done[at][0] < stop:
                at += 1
                ready = done[at][1]
            worked = max(worked, ready) + operation.work(size)
            summed = worked
            if (travel := operation.travel(size)) > 0:
                summed = travelled = max(travelled, worked) + travel
            worked = (worked if overlap else summed) + operation.behind(size)
            arrived.append((stop, summed))
        done = arrived
    return max(worked, travelled)


def period(operation: Operation, samples: int, chunks: int) -> Any:
    """T(c): seconds from one such operation to the next among many that are alike."""
    sizes = chunk_sizes(samples, chunks)
    worked = sum(operation.work(n) + operation.behind(n) for n in sizes)
    longest = operation.work(sizes[0]) + operation.travel(sizes[0])  # no chunk is larger than the first
    return np.maximum(np.maximum(worked, sum(map(operation.travel, sizes))), longest)


def filling(operation: Operation, samples: int, chunks: int) -> Any:
    """Seconds that the first of them takes beside T(c): a chunk whose work, or whose sum, is beside nothing."""
    worked: Any = 0.0
    travelled: Any = 0.0
    for n in chunk_sizes(samples, chunks):
        worked = worked + operation.work(n)
        travelled = np.maximum(travelled, worked) + operation.travel(n)
        worked = worked + operation.behind(n)
    return np.maximum(worked, travelled) - period(operation, samples, chunks)


def layers_seconds(
    *,
    layers: int,
    forward: float,
    backward: float,
    travel: float,
    chunks: int = 1,
    overlap: bool = True,
    sums: int = 2,
    behind: float = 0.0,
    travel_back: float | None = None,
) -> float:
    """Seconds of a step of equal layers: forward, and when that is done, backward.

    Args:
      forward, backward: seconds in which one chunk is computed in one layer.
      travel: seconds of the sum of one chunk; travel_back: of its errors', None: the same.
      chunks: of a device's samples.
      overlap: whether there are two streams; without them sums are in line with the work.
      sums: of a layer in each direction; its work is divided evenly between them.
      behind: share of the backward work that makes gradients of weights, beside which a chunk's own sum travels.
    """
    counts = [chunks] * (layers * sums)
    ahead = Operation(work=lambda _: forward / sums, travel=lambda _: travel)
    back = Operation(
        work=lambda _: (1 - behind) * backward / sums,
        travel=lambda _: travel if travel_back is None else travel_back,
        behind=lambda _: behind * backward / sums,
    )
    return sum(makespan([one] * len(counts), counts, chunks, overlap=overlap) for one in (ahead, back))


def partition(periods: Array, first: Array, last: Array) -> tuple[float, tuple[int, ...]]:
    """The least cost of a row of layers, and the choice of every layer.

    Args:
      periods: [L, C] seconds of a layer under every choice, infinite where it does not have it.
      first: [L, C] what it takes beside that where the layer before is absent or made another choice.
      last: [L, C] the same of the layer behind.
    """
    if all((costs == costs[0]).all() for costs in (periods, first, last)):
        # Layers that are alike are best cut alike: another number anywhere pays its filling, or is slower everywhere.
        totals = len(periods) * periods[0] + first[0] + last[0]
        return float(totals.min()), (int(totals.argmin()),) * len(periods)
    best = periods[0] + first[0]
    came: list[npt.NDArray[np.int64]] = []
    choices = np.arange(periods.shape[1])
    for layer in range(1, len(periods)):
        joins = best[:, None] + last[layer - 1][:, None] + first[layer][None, :]
        joins[choices, choices] = best
        came.append(joins.argmin(axis=0))
        best = joins.min(axis=0) + periods[layer]
    best = best + last[-1]
    path = [int(best.argmin())]
    for origin in reversed(came):
        path.append(int(origin[path[-1]]))
    return float(best.min()), tuple(reversed(path))
