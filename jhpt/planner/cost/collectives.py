"""What collectives add to a model's layers: all-reduces over the tensor ranks, which sample chunks hide behind
computation, and reductions of gradients and all-gathers of weights over the data ranks.

Sample chunks.  The samples of a device are cut into chunks, and the all-reduce of one chunk runs beside the computation
of another.  An operation is computation that ends in an all-reduce over the tensor axis; a block is two operations,
attention and MLP.  The samples are cut into c chunks of sizes n_q, as equal as possible.  There are two streams, and
each runs the operations in order, chunk by chunk.  With f the seconds of the computation and a those of the all-reduce:

    Cs(o, q) = max(end of the computation before it, Me(o-1, q))     Ce(o, q) = Cs(o, q) + f_o(n_q)
    Ms(o, q) = max(end of the all-reduce before it, Ce(o, q))        Me(o, q) = Ms(o, q) + a_o(n_q)

This goes on across the borders of layers.  If operations differ in their number of chunks, a chunk waits for all chunks
that hold any of its samples.  The backward pass is the same with the operations in reverse.  Left out: all-reduces
could also run beside weight gradients, for which nothing waits (Wang et al. 2024: Domino, arXiv 2409.15241).

Equal operations follow each other every

    T(c) = max(sum of f(n_q),  sum of a(n_q),  f(n_0) + a(n_0))

seconds, where n_0 is the largest size, and the first of them takes `filling` seconds more.  More chunks hide more,
until computation in small pieces and the latencies of many all-reduces cost more than is hidden.

`partition` finds the numbers of chunks of a row of layers in O(L |C|^2).  Its cost is additive: a run of layers with
equal numbers takes the sum of their T, plus the filling of its first layer in the forward pass and of its last layer in
the backward pass, as if it began after everything before it is done:

    D[l][c] = min over c' of  D[l-1][c'] + T_l(c) + (0 if c' = c, else last_{l-1}(c') + first_l(c))

For equal layers with equal numbers of chunks, as blocks are, this equals the length of the schedule above; with
different numbers the schedule takes no longer.  For any other layers the cost lies between half and twice the length of
the schedule (the tests play it).

Zeng et al. 2022 (TPDS, doi 10.1109/TPDS.2022.3187815).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jhpt.core.config import Compression, GradientCompression
from jhpt.core.framework import IDEAL, Framework
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.communication import (
    Group,
    all_reduce,
    compressed_all_reduce_seconds,
    compression_kernel_seconds,
    gradient_kernel_seconds,
    gradient_seconds,
    reduce_scatter,
    stream_of,
    token_choice_seconds,
    transfer_seconds,
)
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.places import Place, Places
from jhpt.planner.cost.schedule import Array

Seconds = Callable[[int], Any]
"""Seconds by number of samples; arrays for several operations at once."""

Direction = Literal[0, 1]

FORWARD: Literal[0] = 0
BACKWARD: Literal[1] = 1
DIRECTIONS: tuple[Direction, ...] = (FORWARD, BACKWARD)

Pair = tuple[Array, Array]
"""[kinds] arrays of the forward and of the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Computation that ends in an all-reduce over the tensor axis.

    work: the computation.  travel: the all-reduce.
    """

    work: Seconds
    travel: Seconds


def chunk_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Samples of every chunk, as `np.array_split` cuts them, without empty chunks."""
    count = min(chunks, samples)
    size, larger = divmod(samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def period(operation: Operation, samples: int, chunks: int) -> Any:
    """T(c): seconds from one operation to the next among many equal ones."""
    sizes = chunk_sizes(samples, chunks)
    computed = sum(map(operation.work, sizes))
    longest = operation.work(sizes[0]) + operation.travel(sizes[0])  # no chunk is larger than the first
    return np.maximum(np.maximum(computed, sum(map(operation.travel, sizes))), longest)


def filling(operation: Operation, samples: int, chunks: int) -> Any:
    """Seconds that the first of many equal operations takes beyond T(c), while one of the streams has nothing to do."""
    computed: Any = 0.0
    reduced: Any = 0.0
    for n in chunk_sizes(samples, chunks):
        computed = computed + operation.work(n)
        reduced = np.maximum(reduced, computed) + operation.travel(n)
    return np.maximum(computed, reduced) - period(operation, samples, chunks)


def partition(periods: Array, first: Array, last: Array) -> tuple[float, tuple[int, ...]]:
    """The least cost of a row of layers, and each layer's choice.

    Args:
      periods: [L, C] seconds of a layer with every choice; infinite if the choice is not allowed.
      first: [L, C] additional seconds if there is no layer before it, or one with another choice.
      last: [L, C] additional seconds if there is no layer after it, or one with another choice.
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


class TensorAllReduce:
    """All-reduces of each kind of layer, each computed once.

    Args:
      work: (kinds of devices, samples, tensor degree, parts of a cut sequence) -> [kinds] forward and backward seconds.
    """

    def __init__(
        self,
        profile: ModelProfile,
        places: Places,
        kinds: Sequence[LayerKind],
        work: Callable[[tuple[int, ...], float, int, int], Pair],
    ) -> None:
        self.profile, self.places, self.kinds, self.work = profile, places, kinds, work
        self.stream = stream_of(profile)
        self._exposed: dict[tuple[Place, int, bool, int, Compression | None, int, Direction], Pair] = {}
        self._plain: dict[tuple[Group, int], Pair] = {}
        self._compressed: dict[tuple[Group, int, Compression], Pair] = {}
        self._coding: dict[tuple[Place, Group, int, Compression], Pair] = {}

    def exposed(self, place: Place, tensor: int, strategy: LayerStrategy, local: int, direction: Direction) -> Pair:
        """[kinds] seconds that a pass takes beyond its plain compute, and the filling of the first layer of a run.

        local: samples of a micro-batch on a device.
        """
        chunks = min(strategy.sample_chunks[0], local) if tensor > 1 else 1
        key = place, tensor, strategy.sequence, chunks, strategy.compression, local, direction
        if key not in self._exposed:
            self._exposed[key] = self._exposed_seconds(place, tensor, strategy, chunks, local, direction)
        return self._exposed[key]

    def _exposed_seconds(
        self, place: Place, tensor: int, strategy: LayerStrategy, chunks: int, local: int, direction: Direction
    ) -> Pair:
        operation, nothing = self.operation(place, tensor, strategy, direction), np.zeros(len(self.kinds))
        if chunks == 1 and strategy.compression is None:
            return operation.travel(local), nothing
        plain = self.work(place.kinds, local, tensor, tensor if strategy.sequence else 1)[direction]
        if chunks == 1:
            return operation.travel(local) + (operation.work(local) - plain), nothing
        if self.places.cluster.overlap:
            seconds, first = period(operation, local, chunks), filling(operation, local, chunks)
        else:
            sizes = chunk_sizes(local, chunks)
            seconds, first = sum(operation.work(n) + operation.travel(n) for n in sizes), nothing
        # `first` belongs to a single operation with all of the layer's all-reduces; the filling is that of one of them.
        return np.maximum(seconds, plain) - plain, first / self._counts(direction)

    def operation(self, place: Place, tensor: int, strategy: LayerStrategy, direction: Direction) -> Operation:
        """[kinds] a pass of a layer as a single operation, whose all-reduces count as one."""
        group, compression = place.tensor_group(tensor), strategy.compression if tensor > 1 else None
        # Sequence parallelism gathers the inputs of the products again: half as many bytes as the all-reduces.
        gathers_again = strategy.sequence and direction == BACKWARD
        again = 1 + 0.5 * self.profile.framework.exposed_regathers * gathers_again
        on = compression is not None and (compression.forward, compression.backward)[direction]

        def work(samples: int) -> Array:
            seconds = self.work(place.kinds, samples, tensor, tensor if strategy.sequence else 1)[direction]
            if compression is not None:
                seconds = seconds + self._coding_seconds(place, group, samples, compression)[direction]
            return seconds

        def travel(samples: int) -> Array:
            if on and compression is not None:
                return self._compressed_seconds(group, samples, compression)[direction]
            return self._plain_seconds(group, samples)[direction] * again

        return Operation(work=work, travel=travel)

    def _bytes(self, direction: Direction) -> Iterable[float]:
        """[kinds] bytes per sample that are all-reduced."""
        return ((kind.tensor_forward_bytes, kind.tensor_backward_bytes)[direction] for kind in self.kinds)

    def _counts(self, direction: Direction) -> Array:
        """[kinds] all-reduces of a pass, at least 1: the reduced bytes divided by the bytes of the layer's output."""
        sizes = zip(self._bytes(direction), self.kinds, strict=True)
        return np.array([max(1, round(size / (kind.boundary_bytes or size or 1.0))) for size, kind in sizes])

    def _plain_seconds(self, group: Group, samples: int) -> Pair:
        """[kinds] seconds on the links without compression."""
        key = (group, samples)
        if key not in self._plain:
            forward, backward = (
                np.array([all_reduce(group, size * samples) for size in sizes])
                for sizes in map(self._bytes, DIRECTIONS)
            )
            self._plain[key] = forward, backward
        return self._plain[key]

    def _compressed_seconds(self, group: Group, samples: int, compression: Compression) -> Pair:
        """[kinds] seconds on the links with compression."""
        key = (group, samples, compression)
        if key not in self._compressed:
            assert self.stream is not None, "checked by estimate.check"
            stream = self.stream
            forward, backward = (
                np.array(
                    [
                        compressed_all_reduce_seconds(group, compression, stream, samples, size / stream.bytes)
                        for size in sizes
                    ]
                )
                for sizes in map(self._bytes, DIRECTIONS)
            )
            self._compressed[key] = forward, backward
        return self._compressed[key]

    def _coding_seconds(self, place: Place, group: Group, samples: int, compression: Compression) -> Pair:
        """[kinds] seconds of the kernels, and in the forward pass of the choice of tokens."""
        key = (place, group, samples, compression)
        if key not in self._coding:
            assert self.stream is not None, "checked by estimate.check"
            stream, profile, devices = self.stream, self.profile, self.places.devices_of(place)
            one = max(compression_kernel_seconds(group.size, compression, stream, samples, each) for each in devices)
            chosen = max(
                token_choice_seconds(group, compression, profile.causal, stream, samples, each, profile.dtype)
                for each in devices
            )
            forward, backward = (
                np.array([size / self.stream.bytes * one * on for size in self._bytes(direction)])
                for direction, on in zip(DIRECTIONS, (compression.forward, compression.backward), strict=True)
            )
            self._coding[key] = np.where(forward + backward > 0, forward + chosen, forward), backward
        return self._coding[key]


class DataCollectives:
    """Collectives of the parameters of each kind of layer, each computed once.

    Args:
      wire: bytes of a number as it is sent.
      compression: of gradients.
      framework: whose program sends them.

    Attributes:
      parameters, tied: [kinds] parameters of a layer, and those that it shares with the first layer.
    """

    def __init__(
        self,
        places: Places,
        kinds: Sequence[LayerKind],
        wire: float,
        compression: GradientCompression,
        framework: Framework = IDEAL,
    ) -> None:
        self.places, self.wire, self.compression, self.framework = places, wire, compression, framework
        self.parameters = np.array([float(kind.parameters) for kind in kinds])
        self.tied = np.array([float(kind.tied_parameters) for kind in kinds])
        self._gathered: dict[tuple[Group, int], Array] = {}
        self._reduced: dict[tuple[Group, int, bool, bool], tuple[Array, Array]] = {}

    def gathered(self, place: Place, tensor: int, shards: int) -> Array:
        """[kinds] seconds to all-gather parameters over so many data ranks, or to reduce-scatter as many numbers."""
        group = place.group(shards, tensor)
        key = (group, tensor)
        if key not in self._gathered:
            sizes = self.parameters / tensor * self.wire
            self._gathered[key] = np.array([reduce_scatter(group, size) for size in sizes])
        return self._gathered[key]

    def reduced(
        self, place: Place, tensor: int, shards: int, *, shares: bool, summed: bool = False
    ) -> tuple[Array, Array]:
        """[kinds] seconds to reduce gradients over all data ranks: of a layer's parameters, and of the tied ones.

        shards: the number of data ranks over which ZeRO shards.  shares, summed: as for `reduction`.
        """
        group = place.group(shards, tensor) if shares else place.data_group(tensor)
        key = (group, tensor, shares, summed)
        if key not in self._reduced:
            parameters, tied = (
                np.array([self.reduction(group, numbers / tensor, shares=shares, summed=summed) for numbers in each])
                for each in (self.parameters, self.tied)
            )
            self._reduced[key] = parameters, tied
        parameters, tied = self._reduced[key]
        if shares and shards * tensor < place.devices:
            parameters = parameters + self.between_replicas(place, tensor, shards, self.parameters)
            tied = tied + self.between_replicas(place, tensor, shards, self.tied)
        return parameters, tied

    def between_replicas(self, place: Place, tensor: int, shards: int, numbers: Array) -> Array:
        """[kinds] seconds to all-reduce shares of so many numbers over the data ranks that hold the same shares."""
        apart, share = tensor * shards, self.wire / (tensor * shards)
        group = place.group(place.devices // apart, apart)
        return np.array([all_reduce(group, number * share) for number in numbers.tolist()])

    def reduction(self, group: Group, numbers: float, *, shares: bool, summed: bool = False) -> float:
        """Seconds to reduce a gradient of so many numbers.

        Args:
          shares: every rank keeps only its share (ZeRO).
          summed: it has been added up over several micro-batches.
        """
        if self.compression.on:
            return gradient_seconds(group, self.compression, numbers, shares=shares)
        width = (summed and self.framework.gradient_bytes) or self.wire
        scatters = shares and not self.framework.all_reduces_shares
        return (reduce_scatter if scatters else all_reduce)(group, numbers * width)

    def kernels(self, place: Place, tensor: int, sizes: Array, *, shares: bool) -> Array:
        """Seconds of the kernels that compress gradients of these sizes and sum what is received; 0 if there is
        none."""
        if not self.compression.on:
            return np.zeros_like(sizes)
        ranks = place.devices // tensor
        device = min(self.places.devices_of(place), key=lambda device: device.memory_bandwidth)
        return np.array(
            [gradient_kernel_seconds(ranks, self.compression, size, device, shares=shares) for size in sizes.tolist()]
        )

    def between_first_and_last(self, place: Place, sizes: Array, *, one_program: bool) -> Array:
        """Seconds to sum tensors of these bytes over the first and the last stage, all pairs of devices at once.

        In one program it is an all-reduce over both.  Programs of their own send to each other.
        """
        several = len(self.places.nodes) > 1
        link, senders = (place.network, max(place.crossing)) if several else (place.inside, 1)
        ways = 1 if one_program else self.places.cluster.both_ways
        return np.array([ways * transfer_seconds((link, senders), float(size)) + link.latency for size in sizes])
