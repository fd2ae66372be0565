"""Where a stage lies on the cluster, which links its groups of devices use, and how long collectives take there.

A stage owns consecutive devices.  The tensor axis is innermost: tensor groups are neighbouring devices, and data groups
stride over them.  The stages fill the cluster from its first device; the remaining devices stay idle.

Collectives run over a group of `size` members on `nodes` nodes, m = size / nodes on each if that is even (the
hierarchical algorithm needs it to be).  `bytes` is the size of the whole tensor: the one that is reduced, the gathered
one, or all that a member sends in an all-to-all, its own part included.  Inside a node every device has its own link
(rate B, latency a).  The network ports of a node (rate B') are shared by all groups that use them at the same time.

    ring          all_reduce 2 (n-1)/n bytes / B + 2 (n-1) a;   reduce_scatter and all_gather: half of it
    hierarchical  reduce_scatter inside nodes, all_reduce of bytes / m across nodes, all_gather inside nodes
    tree          2 ceil(log2 n) (bytes / B + a): fewer latencies, more bytes; faster for small messages
    all_to_all    (n-1) (bytes / n / B + a) inside a node; in a group on several nodes the ports carry what leaves the
                  node, m (n-m)/n bytes / B', while the rest moves inside it

The fastest algorithm counts, as NCCL chooses.  Ring and tree: Thakur, Rabenseifner and Gropp 2005, section 4;
hierarchical: Cho et al. 2019 (BlueConnect, MLSys), equation 3.  Left out: contention with other jobs, and the compute
cores that a collective takes from the computation beside it.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from jhpt.core.cluster import Cluster, Link, Node


@dataclass(frozen=True)
class Group:
    """Devices that communicate.

    size: members.  nodes: nodes that they are on.  groups: such groups that share the ports of a node.  fewest: members
    on the node that has fewest of them.
    """

    size: int
    nodes: int
    groups: int
    fewest: int
    inside: Link = field(hash=False)  # links are few objects: comparing them is cheap, hashing them is not
    network: Link = field(hash=False)

    def port_rate(self, size: float) -> float:
        """Bytes/s of this group through the ports of one node, for messages of `size` bytes."""
        return self.network.rate(size) * min(self.fewest, self.network.ports / self.groups)


def all_reduce(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over the group and leave the sum on every member."""
    if group.size == 1 or size == 0:
        return 0.0
    return min(_ring(group, size, 2.0), _tree(group, size), _hierarchical(group, size, 2.0))


def reduce_scatter(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over the group and leave every member its share of the sum."""
    if group.size == 1 or size == 0:
        return 0.0
    return min(_ring(group, size, 1.0), _hierarchical(group, size, 1.0))


all_gather = reduce_scatter
"""Seconds until every member has the whole tensor of `size` bytes: a reduce_scatter in reverse."""


def all_to_all(group: Group, size: float) -> float:
    """Seconds until every member has sent each member its share of `size` bytes."""
    if group.size == 1 or size == 0:
        return 0.0
    n, m, message = group.size, group.fewest, size / group.size
    inside = (m - 1) * (message / group.inside.rate(message) + group.inside.latency)
    if group.nodes == 1:
        return inside
    across = m * (n - m) * message / group.port_rate(message) + (n - m) * group.network.latency
    return max(inside, across)


def _ring(group: Group, size: float, rounds: float) -> float:
    n, message = group.size, size / group.size
    if group.nodes == 1:
        return rounds * (n - 1) * (message / group.inside.rate(message) + group.inside.latency)
    # The ring crosses each border between nodes on one link and runs at the rate of its slowest link.
    rate = min(group.inside.rate(message), group.network.rate(message) * min(1.0, group.network.ports / group.groups))
    return rounds * (n - 1) * (message / rate + group.network.latency)


def _hierarchical(group: Group, size: float, rounds: float) -> float:
    m, q = group.fewest, group.nodes
    if q == 1 or m * q != group.size:
        return math.inf
    inner = size / m
    inside = (m - 1) * (inner / group.inside.rate(inner) + group.inside.latency)
    outer = size / (m * q)
    across = (q - 1) * (size / q / group.port_rate(outer) + group.network.latency)
    return rounds * (inside + across)


def _tree(group: Group, size: float) -> float:
    if group.nodes == 1:
        transfer = size / group.inside.rate(size) + group.inside.latency
    else:
        rate = group.network.rate(size) * min(1.0, group.network.ports / group.groups)
        transfer = size / min(rate, group.inside.rate(size)) + group.network.latency
    return 2 * math.ceil(math.log2(group.size)) * transfer


@dataclass(frozen=True)
class Place:
    """The devices of one stage, as far as costs depend on them: equal places have equal costs.

    slowdown: of the slowest device relative to the profile's.  memory: usable bytes of the smallest device.
    """

    devices: int
    slowdown: float
    memory: float
    crossing: tuple[int, ...]
    """Devices of the stage on each node it touches."""
    inside: Link = field(hash=False)
    network: Link = field(hash=False)

    def tensor_group(self, tensor: int) -> Group:
        """Among the groups of `tensor` neighbouring devices, the one on most nodes."""
        return self._group(tensor, 1)

    def data_group(self, tensor: int) -> Group:
        """Among the groups of every `tensor`-th device, the one on most nodes."""
        return self._group(self.devices // tensor, tensor)

    def _group(self, size: int, stride: int) -> Group:
        nodes, groups, fewest = _spread(self.crossing, size, stride)
        return Group(size, nodes, groups, fewest, self.inside, self.network)


@lru_cache(maxsize=65536)
def _spread(crossing: tuple[int, ...], size: int, stride: int) -> tuple[int, int, int]:
    """(most nodes of a group, most groups that leave a node, fewest members of a group on one of its nodes).

    The groups consist of `size` devices each, every `stride`-th, and fill a stage with `crossing[i]` devices on its
    i-th node.
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
    """The places of stages on a cluster.  The profile's seconds hold for the first node's device."""

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
        self.slowdowns = [
            peak / (node.device.peak_flops.get(dtype) or max(node.device.peak_flops.values())) for node in self.nodes
        ]
        self._cache: dict[Hashable, Place] = {}
        self.uniform = not cluster.mixed
        self.per_node = self.nodes[0].devices

    def offset_class(self, offset: int) -> int:
        """The class of an offset: stages of equal size that start at offsets of one class have equal costs."""
        return offset % self.per_node if self.uniform else offset

    def at(self, offset: int, devices: int) -> Place:
        """The place of a stage with so many devices, the first of which is `offset`."""
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
            slowdown=max(self.slowdowns[index] for index in touched),
            memory=min(node.device.usable for node in kinds),
            crossing=tuple(counts.values()),
            inside=min((node.inside for node in kinds), key=lambda link: link.bandwidth),
            network=self.cluster.network,
        )

    def same_node(self, first: int, stop: int) -> bool:
        """Whether the devices `[first, stop)` are on one node."""
        return self.node_of[first] == self.node_of[stop - 1]

    def transfer(self, first: int, devices: int, to: int, others: int) -> tuple[Link, int]:
        """The link from `devices` devices at `first` to `others` at `to`, and how many senders share a node's ports."""
        node = self.nodes[self.node_of[first]]
        if self.same_node(min(first, to), max(first + devices, to + others)):
            return node.inside, 1
        return self.cluster.network, min(devices, others, node.devices)


def transfer_seconds(transfer: tuple[Link, int], size: float) -> float:
    """Seconds to move `size` bytes per device from one stage to the next over such a `Places.transfer`."""
    link, senders = transfer
    if size == 0:
        return 0.0
    return size / (link.rate(size) * min(1.0, link.ports / senders)) + link.latency
