"""Where stages lie on a cluster: their devices, links and groups, as far as costs depend on them.

A stage owns devices in the order of their ranks.  The tensor axis is innermost: tensor groups are neighbouring devices,
and data groups stride over them.  Devices without a stage stay idle.

Devices of one stage may be of different kinds.  Then the slowest of them sets the pace of every layer, in either pass,
the smallest one limits the memory, and all links inside nodes count as the slowest one.  If its data ranks have samples
by their speed, each kind of device computes its own number of them, and the kind that is done last sets the pace of
whole passes: data ranks wait for each other only once a step.  All have room for the most samples of any rank.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.plan import Stage
from jhpt.planner.cost.communication import Group


@dataclass(frozen=True)
class Place:
    """The devices of one stage, as far as costs depend on them: equal places have equal costs.

    kinds: of its devices, as `Places.kinds` numbers them.  memory: usable bytes of the smallest device.  samples: of a
    micro-batch on each data rank; None: equally many on all, rounded up.
    """

    devices: int
    kinds: tuple[int, ...]
    memory: float
    crossing: tuple[int, ...]
    """Number of the stage's devices on each node that it touches."""
    inside: Link = field(hash=False)
    network: Link = field(hash=False)
    host: Link = field(hash=False)
    samples: int | None = None

    def __hash__(self) -> int:
        """Of what differs most; it is computed once, because `crossing` may be long."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.kinds, self.memory, self.crossing, self.samples))

    def local(self, micro_batch: int, tensor: int) -> int:
        """Samples of a micro-batch on a device."""
        return self.samples or -(-micro_batch * tensor // self.devices)

    def tensor_group(self, tensor: int) -> Group:
        """Among the groups of `tensor` neighbouring devices, the one on most nodes."""
        return self.group(tensor, 1)

    def data_group(self, tensor: int) -> Group:
        """Among the groups of every `tensor`-th device, the one on most nodes."""
        return self.group(self.devices // tensor, tensor)

    def group(self, size: int, stride: int) -> Group:
        """Among the groups of so many devices, each `stride` after the one before it, the one on most nodes."""
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
    """The places of stages on a cluster.

    Attributes:
      kinds: the kinds of devices (`Device.rates`), those with the highest rate for `dtype` first.  Their order does not
        depend on that of the nodes.
    """

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        self.cluster = cluster
        self.nodes: list[Node] = [node for node in cluster.nodes for _ in range(node.count)]
        self.first_device: list[int] = []
        self.node_of: list[int] = []
        for index, node in enumerate(self.nodes):
            self.first_device.append(len(self.node_of))
            self.node_of += [index] * node.devices
        devices = {node.device.rates: node.device for node in cluster.nodes}

        def slowest_last(rates: str) -> tuple[float, float, str]:
            return -devices[rates].peak_flops.get(dtype, 0.0), -devices[rates].memory_bandwidth, rates

        order = sorted(devices, key=slowest_last)
        self.kinds: list[Device] = [devices[rates] for rates in order]
        self._kind_of = [kind for node in cluster.nodes for kind in [order.index(node.device.rates)] * node.count]
        texts = [text for node in cluster.nodes for text in [node.kind] * node.count]
        self._row_of = [row for row, (_, equal) in enumerate(itertools.groupby(texts)) for _ in equal]
        self._at: dict[tuple[int, int], Place] = {}
        self._of: dict[tuple[int, ...], Place] = {}
        self._starts: dict[int, tuple[int, ...]] = {}
        self.uniform = not cluster.mixed
        self.per_node = self.nodes[0].devices

    def devices_of(self, place: Place) -> list[Device]:
        """One device of every kind at a place."""
        return [self.kinds[kind] for kind in place.kinds]

    def offset_class(self, offset: int) -> int:
        """The class of an offset: stages of equal size that start at offsets of one class have equal costs."""
        return offset % self.per_node if self.uniform else offset

    def starts(self, offset: int, before: int | None = None) -> tuple[int, ...]:
        """First devices of a stage if the one before it ends at `offset`.

        On a mixed cluster the rest of a node and whole nodes may stay idle.  Equal nodes are interchangeable: if the
        stage before lies on neighbours of the same kind, whole ones of them are idle before it, not behind it.

        Args:
          before: first device of the stage before; None: any.
        """
        if self.uniform or offset >= len(self.node_of):
            return (offset,)
        if offset not in self._starts:
            self._starts[offset] = (offset, *(first for first in self.first_device if first > offset))
        if before is None or self._row_of[self.node_of[before]] != self._row_of[self.node_of[offset]]:
            return self._starts[offset]
        node = self.node_of[offset]
        next_node = node + (offset > self.first_device[node])
        return tuple(
            start
            for start in self._starts[offset]
            if self.node_of[start] <= next_node or self._row_of[self.node_of[start]] != self._row_of[node]
        )

    def at(self, offset: int, devices: int) -> Place:
        """The place of a stage with so many neighbouring devices, the first of which is `offset`."""
        key = (self.offset_class(offset), devices)
        if key not in self._at:
            self._at[key] = self._place(self._counts(*key), devices)
        return self._at[key]

    def of(self, members: Sequence[int]) -> Place:
        """The place of a stage with these devices, in the order of their ranks."""
        if isinstance(members, range):
            return self.at(members.start, len(members))
        key = tuple(members)
        if key not in self._of:
            counts = [(node, len(list(same))) for node, same in itertools.groupby(key, self.node_of.__getitem__)]
            self._of[key] = self._place(counts, len(key))
        return self._of[key]

    def by_kind(self, stage: Stage) -> list[Place]:
        """The place of a stage; where its data ranks have samples by speed, one for each kind of its devices, with the
        most samples that a rank of this kind has."""
        place = self.of(stage.members)
        if stage.samples is None:
            return [place]
        most: dict[int, int] = {}
        for at, device in enumerate(stage.members):
            kind = self.kind_of(device)
            most[kind] = max(most.get(kind, 0), stage.samples[at // stage.degrees[0]])
        return [replace(place, kinds=(kind,), samples=samples) for kind, samples in most.items()]

    def kind_of(self, device: int) -> int:
        """The kind of a device, as `kinds` numbers it."""
        return self._kind_of[self.node_of[device]]

    def _counts(self, offset: int, devices: int) -> list[tuple[int, int]]:
        """(node, number of the stage's devices on it) of neighbouring devices."""
        counts: list[tuple[int, int]] = []
        at, stop = offset, offset + devices
        while at < stop:
            node = self.node_of[at]
            end = min(stop, self.first_device[node] + self.nodes[node].devices)
            counts.append((node, end - at))
            at = end
        return counts

    def _place(self, counts: list[tuple[int, int]], devices: int) -> Place:
        nodes = [self.nodes[index] for index, _ in counts]
        return Place(
            devices=devices,
            kinds=tuple(sorted({self._kind_of[index] for index, _ in counts})),
            memory=min(node.device.usable for node in nodes),
            crossing=tuple(count for _, count in counts),
            inside=slowest([node.inside for node in nodes]),
            network=self.cluster.network,
            host=slowest([node.host for node in nodes]),
        )

    def transfer(self, first: int, devices: int, to: int, others: int) -> tuple[Link, int]:
        """`between` for neighbouring devices: `devices` from `first` on, and `others` from `to` on."""
        return self.between(range(first, first + devices), range(to, to + others))

    def between(self, sender: Sequence[int], receiver: Sequence[int]) -> tuple[Link, int]:
        """(the link from one stage's devices to another's, how many transfers share the ports of a node)."""
        # A stage visits no node twice, so if its ends are on one node, all of it is.
        ends = {self.node_of[device] for stage in (sender, receiver) for device in (stage[0], stage[-1])}
        if len(ends) == 1:
            return self.nodes[ends.pop()].inside, 1
        # Transfers go either way, so they crowd on the larger node, whether it sends or receives.
        return self.cluster.network, min(len(sender), len(receiver), max(self.nodes[node].devices for node in ends))


def slowest(links: Sequence[Link]) -> Link:
    """The link at which collectives reach the lowest rate, and of several such links the one with the most latency."""
    return min(links, key=lambda link: (link.reached * link.bandwidth, -link.latency))
