"""Processes are grouped to nodes by host, and the links between and inside nodes are those of their devices."""

from types import SimpleNamespace

import jax
import pytest

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.measure import network
from jhpt.measure.hosts import grouped

A, B, C = (7, 1), (7, 2), (8, 3)
"""(machine, host): A and B are emulated on one machine."""


@pytest.mark.parametrize(
    ("identities", "nodes", "here", "nodes_here"),
    [
        ([A], ((0,),), (0,), 1),
        ([A, A, A, A], ((0, 1, 2, 3),), (0, 1, 2, 3), 1),
        ([A, A, C, C], ((0, 1), (2, 3)), (0, 1), 1),
        ([A, B, B], ((0,), (1, 2)), (0, 1, 2), 2),
        ([A, C, A, C], ((0,), (1,), (2,), (3,)), (0, 2), 2),  # not in a row: every process is a node
    ],
)
def test_processes_of_one_host_are_one_node(identities, nodes, here, nodes_here):
    found = grouped(identities, 0)
    assert (found.nodes, found.here, found.nodes_here) == (nodes, here, nodes_here)
    every = {one for node in found.nodes for one in node}
    assert every == set(range(len(identities)))


LINK = Link(bandwidth=1e9, latency=1e-6)
NODE = Node(
    device=Device(name="any", peak_flops={"float32": 1e12}, memory=1e9, memory_bandwidth=1e10),
    devices=1,
    inside=LINK,
    host=LINK,
    host_memory=1e10,
)
MACHINE = Cluster(name="here: 1 x any", nodes=(NODE,), network=LINK, sources={"inside": "alone", "host": "copies"})


@pytest.mark.parametrize(
    ("identities", "devices", "nodes", "rings"),
    [
        # (devices of each process); [(devices, count)] of the nodes; the rings that are measured, inside and between.
        ([A, A, A, A], [1, 1, 1, 1], [(4, 1)], [[[0, 1, 2, 3]]]),
        ([A, C, C], [1, 1, 1], [(1, 1), (2, 1)], [[[1, 2]], [[0, 1]]]),
        ([A, A, C, C], [2, 2, 2, 2], [(4, 2)], [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4]]]),
        ([A, C], [4, 4], [(4, 2)], [[[0, 4]]]),
        ([A, A, C], [1, 1, 1], [(2, 1), (1, 1)], [[[0, 1]], [[0, 2]]]),
        ([A, A, A, C, C], [1, 1, 1, 1, 1], [(3, 1), (2, 1)], [[[0, 1], [3, 4]], [[0, 3]]]),
    ],
)
def test_links_are_measured_between_and_inside_nodes(monkeypatch, identities, devices, nodes, rings):
    made = [SimpleNamespace(process_index=process) for process, count in enumerate(devices) for _ in range(count)]
    for number, device in enumerate(made):
        device.id = number
    measured = []

    def ring_link(rows, rounds):
        measured.append([[device.id for device in row] for row in rows])
        return Link(bandwidth=10.0 * len(measured), latency=0.0)

    monkeypatch.setattr(jax, "devices", lambda: made)
    monkeypatch.setattr(jax, "process_count", lambda: len(devices))
    monkeypatch.setattr(network, "hosts", lambda: grouped(identities, 0))
    monkeypatch.setattr(network, "ring_link", ring_link)
    monkeypatch.setattr(network, "device_info", lambda: SimpleNamespace(memory=1e9))
    cluster = network.spanning(MACHINE)
    assert [(node.devices, node.count) for node in cluster.nodes] == nodes and measured == rings
    assert cluster.num_devices == sum(devices) and cluster.num_nodes == sum(count for _, count in nodes)
    alone = len(set(identities)) == len(devices)
    assert cluster.nodes[0].inside == (LINK if alone else Link(bandwidth=10.0, latency=0.0))
    assert (cluster.sources["inside"] == "alone") == alone and cluster.sources["host"] == "copies"
    assert cluster.network.bandwidth == 10.0 * len(measured)
    assert all(node.host_memory == NODE.host_memory for node in cluster.nodes), "the processes of a host share it"


def test_devices_without_memory_share_that_of_the_machine(monkeypatch):
    """Four processes with two devices each on it, of which only two are on this host."""
    made = [SimpleNamespace(process_index=process) for process in (0, 0, 1, 1, 2, 2, 3, 3)]
    monkeypatch.setattr(jax, "devices", lambda: made)
    monkeypatch.setattr(network, "host_memory", lambda: 80)
    monkeypatch.setattr(network, "device_info", lambda: SimpleNamespace(memory=None))
    assert network._with_shared_memory(NODE, grouped([A, A, B, B], 0)).device.memory == 10
    assert network._with_shared_memory(NODE, grouped([A, A, C, C], 0)).device.memory == 20
