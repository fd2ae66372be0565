"""Collectives and places, reckoned by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.cluster import Cluster, Curve, Device, Link, Node
from jhpt.planner.cost.communication import Group, all_gather, all_reduce, reduce_scatter, transfer_seconds
from jhpt.planner.cost.places import Places

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
FAST = Link(bandwidth=100.0, latency=0.0)
SLOW = Link(bandwidth=10.0, latency=0.0)


def places(*per_node: int, ports: int = 1) -> Places:
    """Nodes of so many devices each, of one kind where they are equally many."""
    device = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=1.0, memory_bandwidth=1.0)
    nodes = tuple(Node(device=device, devices=count, inside=FAST, host=FAST, host_memory=1.0) for count in per_node)
    network = SLOW.model_copy(update={"ports": ports})
    return Places(Cluster(name="toy", nodes=nodes, network=network), "bfloat16")


def test_ring_in_a_node():
    # 4 members, 400 bytes: 3 rounds of 100 bytes at 100 bytes/s and 1 s, and 3 back.
    group = Group(4, 1, 1, 4, Link(bandwidth=100.0, latency=1.0), SLOW)
    assert reduce_scatter(group, 400) == all_gather(group, 400) == 3 * (1 + 1)


def test_double_tree():
    # 8 members, 4 bytes: ring 14 (0.005 + 1) = 14.07 s; tree 14 * 0.005 s for the bytes, three levels up and down.
    group = Group(8, 1, 1, 8, Link(bandwidth=100.0, latency=1.0), SLOW)
    assert all_reduce(group, 4) == pytest.approx(6.07)
    # There is no tree that leaves every member its share: 7 rounds of half a byte.
    assert reduce_scatter(group, 4) == pytest.approx(7 * (0.005 + 1))
    # 5 members take as many levels as 8; a ring of 2 has no more rounds than a tree has levels.
    assert all_reduce(Group(5, 1, 1, 5, Link(bandwidth=100.0, latency=1.0), SLOW), 5) == pytest.approx(6.08)
    assert all_reduce(Group(2, 1, 1, 2, Link(bandwidth=100.0, latency=1.0), SLOW), 4) == 2 * (0.02 + 1)


def test_rings_over_nodes():
    # 2 nodes of 2, 400 bytes: 3 rounds of 100 bytes at 10 bytes/s, and 3 back.
    assert all_reduce(Group(4, 2, 1, 2, FAST, SLOW), 400) == 60
    assert reduce_scatter(Group(4, 2, 1, 2, FAST, SLOW), 400) == 30
    # A latency of 1 s in the network counts once in each direction, one of 0.1 s in the nodes twice.
    near, far = FAST.model_copy(update={"latency": 0.1}), SLOW.model_copy(update={"latency": 1.0})
    assert reduce_scatter(Group(4, 2, 1, 2, near, far), 400) == pytest.approx(30 + 1 + 2 * 0.1)
    # 16 nodes of one: the ring has 15 hops, the tree four levels.
    assert all_reduce(Group(16, 16, 1, 1, near, far), 160) == pytest.approx(2 * (15 + 0.1 + 4))
    assert reduce_scatter(Group(16, 16, 1, 1, near, far), 160) == pytest.approx(15 + 15)


def test_ports_are_shared():
    # As above.  Two ports: one for each member, half the time.  A third is of no use.
    for ports, seconds in {1: 60, 2: 30, 3: 30}.items():
        assert all_reduce(Group(4, 2, 1, 2, FAST, SLOW.model_copy(update={"ports": ports})), 400) == seconds
    # Two such groups on one port have half of it each; on two ports one each.
    assert all_reduce(Group(4, 2, 2, 2, FAST, SLOW), 400) == 120
    assert all_reduce(Group(4, 2, 2, 2, FAST, SLOW.model_copy(update={"ports": 2})), 400) == 60
    # Rings do not go faster than the links inside a node: 2 * 3 * 100 / 100.
    assert all_reduce(Group(4, 2, 1, 2, FAST, FAST.model_copy(update={"ports": 8})), 400) == 6
    # One member per node: a ring over both, 2 * 200 / 10; four of these on one port take four times as long.
    assert all_reduce(Group(2, 2, 1, 1, FAST, SLOW), 400) == 40
    assert all_reduce(Group(2, 2, 4, 1, FAST, SLOW), 400) == 160


def test_congestion():
    # Four nodes lose half a rate for each doubling; two groups on a port have half of what one has, together.
    slow = SLOW.model_copy(update={"decline": 0.5, "sharing": 1.0, "reached": 0.8})
    alone = reduce_scatter(Group(4, 4, 1, 1, FAST, SLOW), 400)
    assert reduce_scatter(Group(4, 4, 1, 1, FAST, slow), 400) == pytest.approx(alone * (1 + 0.5 * 2) / 0.8)
    assert reduce_scatter(Group(4, 4, 2, 1, FAST, slow), 400) == pytest.approx(2 * alone * 2 * (1 + 0.5 * 2) / 0.8)


def test_measured_rates():
    # 3 members, 300 bytes: messages of 100 bytes, at 25 bytes/s: 4 * 4 s.
    curve = Curve(sizes=(100.0, 300.0), values=(25.0, 60.0))
    group = Group(3, 1, 1, 3, FAST.model_copy(update={"measured": curve}), SLOW)
    assert all_reduce(group, 300) == 4 * 4
    assert reduce_scatter(group, 300) == 2 * 4
    # Between sizes: linear in log(size), 25 + 35 / 3 bytes/s a third of the way up.
    assert Link(bandwidth=1.0, latency=0.0, measured=curve).rate(100 * 3 ** (1 / 3)) == pytest.approx(25 + 35 / 3)
    assert transfer_seconds((FAST.model_copy(update={"measured": curve}), 1), 300) == 5


@pytest.mark.parametrize("collective", [all_reduce, reduce_scatter, all_gather])
def test_nothing_to_do_is_free(collective):
    late = Link(bandwidth=1.0, latency=9.0)
    assert collective(Group(1, 1, 1, 1, late, late), 100) == 0
    assert collective(Group(8, 2, 4, 4, late, late), 0) == 0
    assert transfer_seconds((late, 1), 0) == 0


@st.composite
def groups(draw, inside=None, network=None):
    nodes = draw(st.integers(1, 6))
    size = nodes * draw(st.integers(1, 8))
    rates = st.floats(1e-2, 1e4)
    links = [
        Link(bandwidth=draw(rates), latency=draw(st.sampled_from([0.0, 1e-3, 1.0])), ports=draw(st.integers(1, 4)))
        for _ in range(2)
    ]
    return Group(size, nodes, draw(st.integers(1, 4)), size // nodes, *links)


@PROPERTY
@given(groups(), st.floats(0, 1e6), st.floats(1, 100))
def test_more_bytes_take_longer_and_more_bandwidth_less(group, size, factor):
    def widened(link: Link) -> Link:
        return link.model_copy(update={"bandwidth": link.bandwidth * factor})

    near = Group(group.size, group.nodes, group.groups, group.fewest, widened(group.inside), group.network)
    far = Group(group.size, group.nodes, group.groups, group.fewest, group.inside, widened(group.network))
    ports = group.network.model_copy(update={"ports": group.network.ports + 1})
    more_ports = Group(group.size, group.nodes, group.groups, group.fewest, group.inside, ports)
    for collective in (all_reduce, reduce_scatter):
        seconds = collective(group, size)
        assert math.isfinite(seconds) and seconds >= 0
        assert seconds <= collective(group, size * factor) * (1 + 1e-12)
        for better in (near, far, more_ports):
            assert collective(better, size) <= seconds * (1 + 1e-12)


@PROPERTY
@given(groups(), st.floats(0, 1e6))
def test_an_all_reduce_is_no_slower_than_its_halves(group, size):
    assert all_reduce(group, size) <= (reduce_scatter(group, size) + all_gather(group, size)) * (1 + 1e-12)


def test_a_stage_of_whole_nodes():
    # Devices 0-3 and 4-7.
    place = places(4, 4).at(0, 8)
    assert place.crossing == (4, 4)
    # Tensor groups are neighbours: pairs and fours in a node, all eight over both.
    assert [place.tensor_group(t).nodes for t in (1, 2, 4, 8)] == [1, 1, 1, 2]
    # Data groups stride over them: 4 groups of (0, 4), 2 groups of (0, 2, 4, 6), 1 of all.
    assert [(g.size, g.nodes, g.fewest, g.groups) for g in map(place.data_group, (4, 2, 1))] == [
        (2, 2, 1, 4),
        (4, 2, 2, 2),
        (8, 2, 4, 1),
    ]
    # Four groups of two share the port: 400 bytes take 2 * 200 / (10 / 4).
    assert all_reduce(place.data_group(4), 400) == 160


def test_a_stage_across_a_border():
    # Nodes of 4.  Devices 1-4 lie 3 | 1, devices 2-5 lie 2 | 2, devices 3-6 lie 1 | 3.
    whole = places(4, 4)
    assert [whole.at(offset, 4).crossing for offset in (0, 1, 2, 3, 4)] == [(4,), (3, 1), (2, 2), (1, 3), (4,)]
    # Pairs: (1 2) (3 | 4) crosses, (2 3) (4 5) does not, (3 | 4) (5 6) crosses; fours cross unless they are a node.
    assert [whole.at(offset, 4).tensor_group(2).nodes for offset in (0, 1, 2, 3, 4)] == [1, 2, 1, 2, 1]
    assert [whole.at(offset, 4).tensor_group(4).nodes for offset in (0, 1, 2, 3, 4)] == [1, 2, 2, 2, 1]
    # A group that crosses goes at the network's pace: two members, 100 bytes, ring 2 * 50 / 10.
    assert all_reduce(whole.at(2, 2).tensor_group(2), 100) == 2 * 50 / 100
    assert all_reduce(whole.at(3, 2).tensor_group(2), 100) == 2 * 50 / 10


def test_equal_offsets_are_one_place():
    whole = places(4, 4, 4)
    assert whole.at(1, 2) is whole.at(5, 2) is whole.at(9, 2)
    assert whole.at(3, 2) is not whole.at(1, 2)
    # Nodes of different size: every offset is its own.
    assert places(2, 4).at(1, 2).crossing == (1, 1)
    assert places(2, 4).at(3, 2).crossing == (2,)


@pytest.mark.parametrize(("offset", "devices"), [(1, 4), (3, 4), (0, 5), (3, 6)])
def test_one_data_group_has_the_ports_to_itself(offset, devices):
    # With tensor degree 1 all devices of a stage are one data group, wherever its borders lie.
    assert places(4, 4, 4).at(offset, devices).data_group(1).groups == 1


def test_groups_that_stay_inside_leave_the_ports_alone():
    # (1 2) (3 | 4): one group crosses, 2 * 50 / 10 s for 100 bytes.
    assert all_reduce(places(4, 4).at(1, 4).tensor_group(2), 100) == 10


def test_a_lone_member_has_one_link():
    # Devices 1-4, two ports to a node.  The member that is alone in its node has to send and receive at least 3/4 of
    # 400 bytes twice, at the 10 bytes/s of one link: 60 s, a ring's time.
    assert all_reduce(places(4, 4, ports=2).at(1, 4).data_group(1), 400) == pytest.approx(60)


def test_hops():
    whole = places(4, 4)
    # (first device, devices, the same of the next stage) -> link, senders on its port
    assert whole.transfer(0, 2, 2, 2) == (FAST, 1)
    assert whole.transfer(2, 2, 4, 2) == (SLOW, 2)
    assert whole.transfer(0, 4, 4, 4) == (SLOW, 4)
    assert whole.transfer(0, 4, 4, 1) == (SLOW, 1)
    # Four senders of 100 bytes on one port of 10 bytes/s; on two ports.
    assert transfer_seconds(whole.transfer(0, 4, 4, 4), 100) == 40
    assert transfer_seconds(places(4, 4, ports=2).transfer(0, 4, 4, 4), 100) == 20
    assert transfer_seconds(places(4, 4, ports=8).transfer(0, 4, 4, 4), 100) == 10
