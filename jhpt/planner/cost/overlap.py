"""Tensor-parallel all-reduces beside computation: the samples are cut into chunks, and the all-reduce of one chunk runs
beside the computation of another.

An operation is computation that ends in an all-reduce over the tensor axis; a block is two operations, attention and
MLP.  The samples are cut into c chunks of sizes n_q, as equal as possible.  There are two streams, and each runs the
operations in order, chunk by chunk.  With f the seconds of the computation, a those of the all-reduce, and g those of
computation that nothing waits for (weight gradients):

    Cs(o, q) = max(end of the computation before it, Me(o-1, q))     Ce(o, q) = Cs(o, q) + f_o(n_q), then g_o(n_q)
    Ms(o, q) = max(end of the all-reduce before it, Ce(o, q))        Me(o, q) = Ms(o, q) + a_o(n_q)

This goes on across the borders of layers.  Where operations differ in their number of chunks, a chunk waits for all
chunks that hold any of its samples.  The backward pass is the same with the operations in reverse and g > 0.

Equal operations follow each other every

    T(c) = max(sum of f(n_q) + g(n_q),  sum of a(n_q),  f(n_0) + a(n_0))

seconds, where n_0 is the largest size, and the first of them takes `filling` seconds more.  More chunks hide more,
until computation in small pieces and the latencies of many all-reduces cost more than is hidden.

`partition` finds the numbers of chunks of a row of layers in O(L |C|^2).  Its cost is additive: a run of layers with
equal numbers takes the sum of their T, plus the filling of its first layer in the forward pass and of its last layer in
the backward pass, as if it began after everything before it is done:

    D[l][c] = min over c' of  D[l-1][c'] + T_l(c) + (0 where c' = c, else last_{l-1}(c') + first_l(c))

For equal layers with equal numbers of chunks, as blocks are, this equals the length of the schedule above; with
different numbers the schedule takes no longer.  For any other layers the cost lies between half and twice the length of
the schedule (the tests play it).

Zeng et al. 2022 (TPDS, doi 10.1109/TPDS.2022.3187815); weight gradients: Wang et al. 2024 (Domino, arXiv 2409.15241).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jhpt.planner.cost.schedule import Array

Seconds = Callable[[int], Any]
"""Of a number of samples; an array for several operations at once."""


def _none(samples: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Computation that ends in an all-reduce over the tensor axis.

    work: the computation.  travel: the all-reduce.  behind: computation after the start of the all-reduce that nothing
    waits for (weight gradients).
    """

    work: Seconds
    travel: Seconds
    behind: Seconds = _none


def chunk_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Samples of every chunk, as `np.array_split` cuts them, without empty chunks."""
    count = min(chunks, samples)
    size, larger = divmod(samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def period(operation: Operation, samples: int, chunks: int) -> Any:
    """T(c): seconds from one operation to the next among many equal ones."""
    sizes = chunk_sizes(samples, chunks)
    computed = sum(operation.work(n) + operation.behind(n) for n in sizes)
    longest = operation.work(sizes[0]) + operation.travel(sizes[0])  # no chunk is larger than the first
    return np.maximum(np.maximum(computed, sum(map(operation.travel, sizes))), longest)


def filling(operation: Operation, samples: int, chunks: int) -> Any:
    """Seconds that the first of many equal operations takes beyond T(c), while one of the streams has nothing to do."""
    computed: Any = 0.0
    reduced: Any = 0.0
    for n in chunk_sizes(samples, chunks):
        computed = computed + operation.work(n)
        reduced = np.maximum(reduced, computed) + operation.travel(n)
        computed = computed + operation.behind(n)
    return np.maximum(computed, reduced) - period(operation, samples, chunks)


def partition(periods: Array, first: Array, last: Array) -> tuple[float, tuple[int, ...]]:
    """The least cost of a row of layers, and each layer's choice.

    Args:
      periods: [L, C] seconds of a layer under every choice; infinite where the choice is not allowed.
      first: [L, C] additional seconds where there is no layer before or it has another choice.
      last: [L, C] the same for the layer behind.
    """
    if all((costs == costs[0]).all() for costs in (periods, first, last)):
        # Equal layers are best cut equally: another number anywhere adds a filling, or is slower everywhere.
        totals = len(periods) * periods[0] + first[0] + last[0]
        return float(totals.min()), (int(totals.argmin()),) * len(periods)
    best = periods[0] + first[0]
    origins: list[npt.NDArray[np.int64]] = []
    choices = np.arange(periods.shape[1])
    for layer in range(1, len(periods)):
        joins = best[:, None] + last[layer - 1][:, None] + first[layer][None, :]
        joins[choices, choices] = best
        origins.append(joins.argmin(axis=0))
        best = joins.min(axis=0) + periods[layer]
    best = best + last[-1]
    path = [int(best.argmin())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return float(best.min()), tuple(reversed(path))
