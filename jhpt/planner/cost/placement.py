"""Where a stage lies on the cluster, and which links its groups use.

A stage owns consecutive devices.  Inside it the tensor axis is innermost: tensor groups are neighbours, data groups
stride over them.  All stages together fill the cluster from its first device; what is left over stays idle.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from jhpt.core.cluster import Cluster, Link, Node
from jhpt.planner.cost.collectives import Group


@dataclass(frozen=True)
class Place:
    """Devices of one stage, as far as costs depend on them: two places that are equal cost the same."""

    devices: int
    slowdown: float
    memory: float
    crossing: tuple[int, ...]
    """Devices of the stage on each node it touches."""
    inside: Link = field(hash=False)
    network: Link = field(hash=False)

    def tensor_group(self, tensor: int) -> Group:
        """The group, among those of `tensor` neighbours, that touches most nodes."""
        return self._group(tensor, 1)

    def data_group(self, tensor: int) -> Group:
        """The group, among those of every `tensor`-th device, that touches most nodes."""
        return self._group(self.devices // tensor, tensor)

    def _group(self, size: int, stride: int) -> Group:
        nodes, groups, fewest = _spread(self.crossing, size, stride)
        return Group(size, nodes, groups, fewest, self.inside, self.network)


@lru_cache(maxsize=65536)
def _spread(crossing: tuple[int, ...], size: int, stride: int) -> tuple[int, int, int]:
    """(nodes that a group touches, groups that leave a node, members of a group in one node): most, most, fewest.

    Groups of `size` devices, every `stride`-th, fill a stage that has `crossing[i]` devices on its i-th node.
    """
    full = crossing[0]
    if size == 1 or len(crossing) == 1:
        return 1, 1, size
    if stride == 1 and full % size == 0 and all(count == full for count in crossing[:-1]):
        return 1, 1, size
    device = np.arange(sum(crossing) // (size * stride) * size * stride).reshape(-1, size, stride)
    node = np.searchsorted(np.cumsum(crossing), device.swapaxes(1, 2).reshape(-1, size), side="right")
    here = np.zeros((len(node), len(crossing)), np.int64)
    np.add.at(here, (np.arange(len(node))[:, None], node), 1)
    leaves = (here > 0).sum(axis=1) > 1
    if not leaves.any():
        return 1, 1, size
    here = here[leaves]
    return int((here > 0).sum(axis=1).max()), int((here > 0).sum(axis=0).max()), int(here[here > 0].min())


class Places:
    """All places of a cluster.  `reference`: seconds of a profile hold for the first node's device."""

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        self.cluster = cluster
        self.nodes: list[Node] = [node for node in cluster.nodes for _ in range(node.count)]
        self.first_device: list[int] = []
        self.node_of: list[int] = []
        for index, node in enumerate(self.nodes):
            self.first_device.append(len(self.node_of))
            self.node_of += [index] * node.devices
        reference = cluster.nodes[0].device
        peak = reference.peak_flops.get(dtype) or max(reference.peak_flops.values())
        self.slow = [
            peak / (node.device.peak_flops.get(dtype) or max(node.device.peak_flops.values())) for node in self.nodes
        ]
        self._cache: dict[Hashable, Place] = {}
        self.uniform = not cluster.mixed
        self.per_node = self.nodes[0].devices

    def offset_class(self, offset: int) -> int:
        """Stages that start at offsets of one class cost the same."""
        return offset % self.per_node if self.uniform else offset

    def at(self, offset: int, devices: int) -> Place:
        """The place of `devices` from `offset`."""
        key = (self.offset_class(offset), devices)
        if key not in self._cache:
            self._cache[key] = self._make(self.offset_class(offset), devices)
        return self._cache[key]

    def _make(self, offset: int, devices: int) -> Place:
        counts: dict[int, int] = {}
        at, stop = offset, offset + devices
        while at < stop:
            node = self.node_of[at]
            end = min(stop, self.first_device[node] + self.nodes[node].devices)
            counts[node] = end - at
            at = end
        touched = list(counts)
        kinds = [self.nodes[index] for index in touched]
        return Place(
            devices=devices,
            slowdown=max(self.slow[index] for index in touched),
            memory=min(node.device.usable for node in kinds),
            crossing=tuple(counts.values()),
            inside=min((node.inside for node in kinds), key=lambda link: link.bandwidth),
            network=self.cluster.network,
        )

    def same_node(self, first: int, stop: int) -> bool:
        """Whether devices `[first, stop)` share a node."""
        return self.node_of[first] == self.node_of[stop - 1]

    def transfer(self, first: int, devices: int, to: int, others: int) -> tuple[Link, int]:
        """The link from `devices` at `first` to `others` at `to`, and the senders that share a node's ports."""
        node = self.nodes[self.node_of[first]]
        if self.same_node(min(first, to), max(first + devices, to + others)):
            return node.inside, 1
        return self.cluster.network, min(devices, others, node.devices)


def transfer_seconds(transfer: tuple[Link, int], size: float) -> float:
    """Seconds to move `size` bytes per device from one stage to the next."""
    link, senders = transfer
    if size == 0:
        return 0.0
    return size / (link.rate(size) * min(1.0, link.ports / senders)) + link.latency
