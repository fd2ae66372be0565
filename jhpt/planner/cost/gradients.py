"""Seconds of collectives over the data ranks: reduction of gradients and all-gather of weights."""

from collections.abc import Sequence

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import GradientCompression
from jhpt.core.profile import LayerKind
from jhpt.planner.cost.communication import Group, Place, Places, all_reduce, reduce_scatter, transfer_seconds
from jhpt.planner.cost.compression import gradient_kernel_seconds, gradient_seconds
from jhpt.planner.cost.schedule import Array


class DataCollectives:
    """Collectives of the parameters of each kind of layer, each computed once.

    Args:
      wire: bytes of a number that is sent.
      compression: of gradients; its kernels take time.

    Attributes:
      parameters, tied: [kinds] parameters of a layer, and those that it shares with the first layer.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Places,
        kinds: Sequence[LayerKind],
        wire: float,
        compression: GradientCompression,
    ) -> None:
        self.device, self.places, self.wire, self.compression = cluster.nodes[0].device, places, wire, compression
        self.parameters = np.array([float(kind.parameters) for kind in kinds])
        self.tied = np.array([float(kind.tied_parameters) for kind in kinds])
        self._gathered: dict[tuple[Group, int], Array] = {}
        self._reduced: dict[tuple[Group, int, bool], tuple[Array, Array]] = {}

    def gathered(self, place: Place, tensor: int) -> Array:
        """[kinds] seconds to all-gather the parameters over the data group, or to reduce-scatter as many numbers."""
        group = place.data_group(tensor)
        key = (group, tensor)
        if key not in self._gathered:
            sizes = self.parameters / tensor * self.wire
            self._gathered[key] = np.array([reduce_scatter(group, size) for size in sizes])
        return self._gathered[key]

    def reduced(self, place: Place, tensor: int, *, shares: bool) -> tuple[Array, Array]:
        """[kinds] seconds to reduce gradients over the data group: of a layer's parameters, and of the tied ones."""
        group = place.data_group(tensor)
        key = (group, tensor, shares)
        if key not in self._reduced:
            parameters, tied = (
                np.array([self.reduction(group, numbers / tensor, shares=shares) for numbers in each])
                for each in (self.parameters, self.tied)
            )
            self._reduced[key] = parameters, tied
        return self._reduced[key]

    def reduction(self, group: Group, numbers: float, *, shares: bool) -> float:
        """Seconds to reduce a gradient of so many numbers.  shares: every rank keeps only its share (ZeRO)."""
        if self.compression.on:
            return gradient_seconds(group, self.compression, numbers, shares=shares)
        return (reduce_scatter if shares else all_reduce)(group, numbers * self.wire)

    def kernels(self, place: Place, tensor: int, sizes: Array, *, shares: bool) -> Array:
        """Seconds of the kernels that compress gradients of these sizes and sum what is received; 0 if there is
        none."""
        if not self.compression.on:
            return np.zeros_like(sizes)
        ranks = place.devices // tensor
        return np.array(
            [
                gradient_kernel_seconds(ranks, self.compression, size, self.device, shares=shares)
                for size in sizes.tolist()
            ]
        )

    def between_first_and_last(self, place: Place, sizes: Array) -> Array:
        """Seconds to sum tensors of these bytes over the first and the last stage, all pairs of devices at once."""
        several = len(self.places.nodes) > 1
        link, senders = (place.network, max(place.crossing)) if several else (place.inside, 1)
        return np.array([transfer_seconds((link, senders), float(size)) + link.latency for size in sizes])
