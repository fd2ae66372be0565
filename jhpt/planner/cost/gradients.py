"""What summing gradients and gathering weights over the data ranks costs: seconds."""

from collections.abc import Sequence

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import GradientCompression
from jhpt.core.profile import LayerKind
from jhpt.planner.cost.communication import Group, Place, Places, all_reduce, reduce_scatter, transfer_seconds
from jhpt.planner.cost.compression import gradient_kernel_seconds, gradient_seconds
from jhpt.planner.cost.schedule import Array


class DataCollectives:
    """Gradients and weights of layers of these kinds, each computed once.

    wire: bytes of a number on the wire.  how: gradients in few bits, with kernels that take time.
    """

    def __init__(
        self, cluster: Cluster, places: Places, kinds: Sequence[LayerKind], wire: float, how: GradientCompression
    ) -> None:
        self.device, self.places, self.wire, self.how = cluster.nodes[0].device, places, wire, how
        self.parameters = np.array([float(kind.parameters) for kind in kinds])
        self.tied = np.array([float(kind.tied_parameters) for kind in kinds])
        self._gathered: dict[tuple[Group, int], Array] = {}
        self._summed: dict[tuple[Group, int, bool], tuple[Array, Array]] = {}

    def gathered(self, place: Place, tensor: int) -> Array:
        """[kinds] to gather parameters over the data group, or to scatter sums of as many numbers as they are."""
        group = place.data_group(tensor)
        key = (group, tensor)
        if key not in self._gathered:
            sizes = self.parameters / tensor * self.wire
            self._gathered[key] = np.array([reduce_scatter(group, size) for size in sizes])
        return self._gathered[key]

    def reduced(self, place: Place, tensor: int, *, shares: bool) -> tuple[Array, Array]:
        """[kinds] to sum gradients over the data group: of a layer's own parameters, and of tied ones."""
        group = place.data_group(tensor)
        key = (group, tensor, shares)
        if key not in self._summed:
            own, tied = (
                np.array([self.reduction(group, numbers / tensor, shares=shares) for numbers in each])
                for each in (self.parameters, self.tied)
            )
            self._summed[key] = own, tied
        return self._summed[key]

    def reduction(self, group: Group, numbers: float, *, shares: bool) -> float:
        """To sum a gradient of so many numbers.  shares: every rank keeps its share."""
        if self.how.on:
            return gradient_seconds(group, self.how, numbers, shares=shares)
        return (reduce_scatter if shares else all_reduce)(group, numbers * self.wire)

    def kernels(self, place: Place, tensor: int, sizes: Array, *, shares: bool) -> Array:
        """To compress gradients of so many numbers each, and to add up what comes; zeros: they are not compressed."""
        if not self.how.on:
            return np.zeros_like(sizes)
        ranks = place.devices // tensor
        return np.array(
            [gradient_kernel_seconds(ranks, self.how, size, self.device, shares=shares) for size in sizes.tolist()]
        )

    def between_first_and_last(self, place: Place, sizes: Array) -> Array:
        """To sum tensors of so many bytes between the first and the last stage, all pairs of devices at once."""
        several = len(self.places.nodes) > 1
        link, senders = (place.network, max(place.crossing)) if several else (place.inside, 1)
        return np.array([transfer_seconds((link, senders), float(size)) + link.latency for size in sizes])
