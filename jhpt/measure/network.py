"""The links between the devices of several processes, measured by all of them."""

import itertools
from collections.abc import Sequence

import jax

from jhpt.core.cluster import Cluster, Link, Node
from jhpt.core.host import host_memory
from jhpt.measure.device import device_info
from jhpt.measure.hosts import Hosts, hosts
from jhpt.measure.probe import ring_link

ROUNDS = 5
"""Samples of each size."""

Row = list[jax.Device]
"""The devices of a node."""


def spanning(machine: Cluster) -> Cluster:
    """The cluster of all processes.  machine: what one process alone has measured.

    A node has the devices of all processes on its host (`jhpt.measure.hosts`).  The network is measured between the
    nodes, and the links inside a node between devices of its processes, in all nodes at the same time.  All processes
    must call this; the measured links are the same for all.
    """
    if jax.process_count() == 1:
        return machine
    places = hosts()
    rows = [[one for one in jax.devices() if one.process_index in node] for node in places.nodes]
    inside, inside_source = _inside(rows, places, machine)
    network, network_source = _network(rows, inside)
    local = _with_shared_memory(machine.nodes[0], places).model_copy(update={"inside": inside})
    sizes = [(size, len(list(same))) for size, same in itertools.groupby(map(len, rows))]
    nodes = tuple(local.model_copy(update={"devices": size, "count": count}) for size, count in sizes)
    name = f"{machine.name.partition(':')[0]}: {sum(map(len, rows))} x {local.device.name} in {len(rows)} node"
    sources = machine.sources | {"inside": inside_source, "network": network_source}
    return machine.model_copy(
        update={"name": name + "s" * (len(rows) > 1), "nodes": nodes, "network": network, "sources": sources}
    )


def _inside(rows: Sequence[Row], places: Hosts, machine: Cluster) -> tuple[Link, str]:
    """(the link between devices of a node, its source): as one process has measured it if every node has only one."""
    wide = [row for row in rows if len(row) > 1]
    if not wide or max(map(len, places.nodes)) == 1:
        return machine.nodes[0].inside, machine.sources.get("inside", "")
    count = min(map(len, wide))
    link = ring_link([row[:count] for row in wide], ROUNDS)
    return link, f"measured: all-reduce over {count} devices of the processes of a node, read as a ring"


def _network(rows: Sequence[Row], inside: Link) -> tuple[Link, str]:
    """(the link between nodes, its source)."""
    if len(rows) == 1:
        return inside, "not measured with one node: as inside"
    link = ring_link([[row[0] for row in rows]], ROUNDS)
    return link, f"measured: all-reduce over a device of each of {len(rows)} nodes, read as a ring"


def _with_shared_memory(node: Node, places: Hosts) -> Node:
    """The node, whose devices share the memory of the host with those of other processes, if they have none."""
    if device_info().memory is not None:
        return node
    count = sum(one.process_index in places.here for one in jax.devices())
    return node.model_copy(update={"device": node.device.model_copy(update={"memory": host_memory() / count})})
