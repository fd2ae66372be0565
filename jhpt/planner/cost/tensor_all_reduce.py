"""All-reduces over the tensor ranks: seconds that they add to a layer's plain compute."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import Compression
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.communication import Group, Place, all_reduce
from jhpt.planner.cost.compression import all_reduce_seconds, choice_seconds, kernel_seconds, stream_of
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.overlap import Operation, chunk_sizes, filling, period
from jhpt.planner.cost.schedule import Array

Direction = Literal[0, 1]

FORWARD: Literal[0] = 0
BACKWARD: Literal[1] = 1
DIRECTIONS: tuple[Direction, ...] = (FORWARD, BACKWARD)

Pair = tuple[Array, Array]
"""[kinds] arrays of the forward and of the backward pass."""


class TensorAllReduce:
    """All-reduces of each kind of layer, each computed once.

    Args:
      work: (samples, tensor degree) -> [kinds] forward and backward seconds on a device of the profile.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        kinds: Sequence[LayerKind],
        work: Callable[[float, int], Pair],
    ) -> None:
        self.profile, self.cluster, self.kinds, self.work = profile, cluster, kinds, work
        self.stream = stream_of(profile)
        self._plain: dict[tuple[Group, int], Pair] = {}
        self._compressed: dict[tuple[Group, int, Compression], Pair] = {}
        self._coding: dict[tuple[Group, int, Compression], Pair] = {}

    def exposed(self, place: Place, tensor: int, strategy: LayerStrategy, local: int, direction: Direction) -> Pair:
        """[kinds] seconds that a pass takes beyond its plain compute, and the filling of the first layer of a run.

        local: samples of a micro-batch on a device.
        """
        chunks = min(strategy.sample_chunks[0], local) if tensor > 1 else 1
        operation, nothing = self.operation(place, tensor, strategy, direction), np.zeros(len(self.kinds))
        if chunks == 1 and strategy.compression is None:
            return operation.travel(local), nothing
        plain = self.work(local, tensor)[direction] * place.slowdown
        if chunks == 1:
            return operation.travel(local) + (operation.work(local) - plain), nothing
        if self.cluster.overlap:
            seconds, first = period(operation, local, chunks), filling(operation, local, chunks)
        else:
            sizes = chunk_sizes(local, chunks)
            seconds, first = sum(operation.work(n) + operation.travel(n) for n in sizes), nothing
        # `first` belongs to a single operation with all of the layer's all-reduces; the filling is that of one of them.
        return np.maximum(seconds, plain) - plain, first / self._counts(direction)

    def operation(self, place: Place, tensor: int, strategy: LayerStrategy, direction: Direction) -> Operation:
        """[kinds] a pass of a layer as a single operation, whose all-reduces count as one."""
        group, how = place.tensor_group(tensor), strategy.compression if tensor > 1 else None
        again = 1.5 if strategy.sequence and direction == BACKWARD else 1.0
        on = how is not None and (how.forward, how.backward)[direction]

        def work(samples: int) -> Array:
            seconds = self.work(samples, tensor)[direction]
            if how is not None:
                seconds = seconds + self._coding_seconds(group, samples, how)[direction]
            return seconds * place.slowdown

        def travel(samples: int) -> Array:
            if on and how is not None:
                return self._compressed_seconds(group, samples, how)[direction]
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

    def _compressed_seconds(self, group: Group, samples: int, how: Compression) -> Pair:
        """[kinds] seconds on the links with compression."""
        key = (group, samples, how)
        if key not in self._compressed:
            assert self.stream is not None, "checked by estimate.check"
            stream = self.stream
            forward, backward = (
                np.array([all_reduce_seconds(group, how, stream, samples, size / stream.bytes) for size in sizes])
                for sizes in map(self._bytes, DIRECTIONS)
            )
            self._compressed[key] = forward, backward
        return self._compressed[key]

    def _coding_seconds(self, group: Group, samples: int, how: Compression) -> Pair:
        """[kinds] seconds of the kernels, and in the forward pass of the choice of tokens."""
        key = (group, samples, how)
        if key not in self._coding:
            assert self.stream is not None, "checked by estimate.check"
            device = self.cluster.nodes[0].device
            one = kernel_seconds(group.size, how, self.stream, samples, device)
            profile = self.profile
            chosen = choice_seconds(group, how, profile.causal, self.stream, samples, device, profile.dtype)
            forward, backward = (
                np.array([size / self.stream.bytes * one * on for size in self._bytes(direction)])
                for direction, on in zip(DIRECTIONS, (how.forward, how.backward), strict=True)
            )
            self._coding[key] = np.where(forward + backward > 0, forward + chosen, forward), backward
        return self._coding[key]
