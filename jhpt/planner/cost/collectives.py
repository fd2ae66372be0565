"""Seconds of collectives over a group of devices that may span nodes.

`bytes` is the size of the whole result: of the tensor that is reduced, of the gathered one, or of what a member sends
to all, itself included.  A group has `size`
members on `nodes` nodes, m = size / nodes each
where that is even (only then hierarchical).  Inside a node every device has its own link (rate B, latency a); the
network ports of a node (rate B') are shared by all groups that work there at the same time.

    ring          all_reduce 2 (n-1)/n bytes / B + 2 (n-1) a;   reduce_scatter, all_gather: half of it
    hierarchical  reduce_scatter inside, all_reduce of bytes / m across, all_gather inside
    tree          2 ceil(log2 n) (bytes / B + a): fewer latencies, more bytes; wins for small messages
    all_to_all    (n-1) (bytes / n / B + a) inside a node; of a group on several the ports take what leaves the node,
                  m (n-m)/n bytes / B', beside what stays in it

The cheapest of them counts, as NCCL chooses.  Ring and tree: Thakur, Rabenseifner and Gropp 2005, section 4;
hierarchical: Cho et al. 2019 (BlueConnect, MLSys), equation 3.  Left out: contention with other jobs, and the cores
that a collective takes from the computation beside it.
"""

import math
from dataclasses import dataclass, field

from jhpt.core.cluster import Link


@dataclass(frozen=True)
class Group:
    """Devices that communicate.  `groups` of them share the ports of a node; `fewest`: its members on one node."""

    size: int
    nodes: int
    groups: int
    fewest: int
    inside: Link = field(hash=False)  # links are few objects: comparing them is cheap, hashing is not
    network: Link = field(hash=False)

    def port_rate(self, size: float) -> float:
        """bytes/s of this group through the ports of one node."""
        return self.network.rate(size) * min(self.fewest, self.network.ports / self.groups)


def all_reduce(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over the group."""
    if group.size == 1 or size == 0:
        return 0.0
    return min(_ring(group, size, 2.0), _tree(group, size), _hierarchical(group, size, 2.0))


def reduce_scatter(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes and leave every member its share."""
    if group.size == 1 or size == 0:
        return 0.0
    return min(_ring(group, size, 1.0), _hierarchical(group, size, 1.0))


all_gather = reduce_scatter
"""Seconds until every member has the whole tensor of `size` bytes: the reduce_scatter backwards."""


def all_to_all(group: Group, size: float) -> float:
    """Seconds until every member has sent each its share of `size` bytes."""
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
    # One link of the ring crosses each node border: the ring runs at the slower of the two kinds of link.
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
