"""Steps played from raw profile numbers: by hand, and against the planner's prices, with which they share nothing."""

import ast
import inspect

import numpy as np
import pytest

from benchmarks.planner import events
from benchmarks.planner.events import Played
from benchmarks.planner.played import AGREE, SCHEDULES, play
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel


def test_events_share_no_code_with_prices():
    imported = {
        node.module for node in ast.walk(ast.parse(inspect.getsource(events))) if isinstance(node, ast.ImportFrom)
    }
    assert imported & {"jhpt.core.plan", "jhpt.core.profile"}
    assert not [name for name in imported if name and name.startswith(("jhpt.planner", "benchmarks"))]
    assert "jhpt.core.schedule" not in imported


def model(*layers: dict, update: float = 0.0) -> ModelProfile:
    """Layers of 2 s forward and 3 s backward a sample unless said, whose parameters take 1 byte on the wire."""
    kinds = {}
    for at, given in enumerate(layers):
        forward, backward = given.pop("seconds", (2.0, 3.0))
        timing = Timing(batches=(1.0,), forward=(forward,), backward=(backward,))
        kinds[f"layer{at}"] = LayerKind(timings=(timing,), **{"boundary_bytes": 0.0, "activation_bytes": 0.0, **given})
    return ModelProfile(
        name="toy", device="toy", source="given", kinds=kinds, layers=tuple(kinds), bytes_per_weight=1.0,
        update_seconds=update,
    )  # fmt: skip


def cluster(devices: int, *, overlap: bool = True, latency: float = 0.0) -> Cluster:
    """One node, 1 byte a second."""
    link = Link(bandwidth=1.0, latency=latency)
    device = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=1e9, memory_bandwidth=1.0)
    node = Node(device=device, devices=devices, inside=link, host=link, host_memory=1.0)
    return Cluster(name="toy", nodes=(node,), network=link, overlap=overlap)


def plan(*stages: tuple[int, int], batch: int, micro_batches: int = 1, zero=0, schedule="1f1b", tensor: int = 1):
    """stages: (layers, devices)."""
    placed, layer, device = [], 0, 0
    for layers, devices in stages:
        chunk = Chunk(first=layer, runs=(Run(layers=layers, tensor=tensor),))
        placed.append(Stage(device=device, devices=devices, chunks=(chunk,)))
        layer, device = layer + layers, device + devices
    return Plan(
        model="toy", cluster="toy", space="general", batch=batch, micro_batches=micro_batches, zero=zero,
        schedule=schedule, stages=tuple(placed),
    )  # fmt: skip


BIG = dict(parameters=8)


@pytest.mark.parametrize(
    ("overlap", "zero", "seconds"),
    [
        # Two layers, two devices, one sample each: 4 s forward, 6 s backward.  An all-reduce of 8 bytes takes 8 s.
        (True, 0, 4 + 3 + 8 + 8),  # the second layer's after 3 s of the backward pass, then the first one's
        (False, 0, 4 + 6 + 8 + 8),
        # Gathering and scattering take 4 s each.
        (True, 1, 4 + 4 + 2 + 3 + 4 + 4),  # both layers wait for their weights; the first one's last 2 s are hidden
        (False, 1, 4 + 4 + 4 + 6 + 4 + 4),
        (False, 3, (4 + 2) + (4 + 2) + (4 + 3) + (4 + 3) + 4 + 4),
        # Gathered one after the other, 4, 8; forward until 10.  The second gather of layer 1 runs 8 to 12, backward
        # until 15; that of layer 0 12 to 16, backward until 19; their gradients 16 to 20 and 20 to 24.
        (True, 3, 24),
    ],
)
def test_data_parallel_by_hand(overlap, zero, seconds):
    profile, given = model(dict(BIG), dict(BIG)), plan((2, 2), batch=2, zero=zero)
    assert Played(given, profile, cluster(2, overlap=overlap)).seconds() == pytest.approx(seconds)


def test_tensor_parallel_by_hand():
    """Two ranks halve 2 and 3 s and sum 6 bytes in 6 s and 2 x 1 s of latency in either pass, and update 4 numbers."""
    layer = dict(parameters=8, max_tensor=2, tensor_forward_bytes=6.0, tensor_backward_bytes=6.0)
    given = plan((1, 2), batch=1, tensor=2)
    played = Played(given, model(layer, update=0.25), cluster(2, latency=1.0)).seconds()
    assert played == pytest.approx((1 + 6 + 2) + (1.5 + 6 + 2) + 4 * 0.25)


@pytest.mark.parametrize(
    ("schedule", "overlap", "seconds"),
    [
        # Two stages, two micro-batches, F = 2, B = 3, transfers of 1 s.  F0 0-2, sent 2-3; F0 and F1 3-5, sent 5-6; an
        # empty exchange of errors 6-7 beside F1 6-8 of the second stage, B0 8-11, errors 11-12; B0 and B1 12-15, errors
        # 15-16; B1 16-19.
        ("gpipe", True, 19),
        # In line both wait for the empty exchange, and for the one of activations after F1.
        ("gpipe", False, 21),
        # F0 0-2, x 2-3, F0 3-5 of the second stage; B0 5-8 beside F1 3-5 of the first, x 8-9; B0 9-12 beside F1 9-11,
        # B1 11-14, x 14-15; B1 15-18.
        ("1f1b", True, 18),
    ],
)
def test_pipelines_by_hand(schedule, overlap, seconds):
    profile = model({"boundary_bytes": 1.0}, {})
    given = plan((1, 1), (1, 1), batch=2, micro_batches=2, schedule=schedule)
    assert Played(given, profile, cluster(2, overlap=overlap)).seconds() == pytest.approx(seconds)


def test_stages_of_a_shared_parameter_wait_for_each_other():
    """5 numbers travel in 5 s when both stages are that far, after the slower one; a price lets each take them alone.
    Its copy is updated, too."""
    slow_end = model(
        {"seconds": (2.0, 3.0), "parameters": 5}, {"seconds": (4.0, 9.0), "tied_parameters": 5}, update=1.0
    )
    given = plan((1, 1), (1, 1), batch=1)
    assert Played(given, slow_end, cluster(2)).seconds() == pytest.approx(2 + 4 + 9 + 3 + 5 + 5)
    early_end = model(
        {"seconds": (2.0, 3.0), "parameters": 0}, {"seconds": (4.0, 9.0), "tied_parameters": 5}, update=1.0
    )
    assert Played(given, early_end, cluster(2)).seconds() == pytest.approx(2 + 4 + 9 + 3 + 5 + 5)
    assert Played(given, early_end, cluster(2), waits=False).seconds() == pytest.approx(2 + 4 + 9 + 5 + 5)
    for profile in (slow_end, early_end):
        apart = Played(given, profile, cluster(2), waits=False).seconds()
        assert price(given, CostModel(profile, cluster(2))).seconds == pytest.approx(apart)


@pytest.fixture(scope="module")
def rows():
    found = [play((1, seed)) for seed in range(400)]
    return [row for row in found if row is not None]


def test_prices_are_those_of_the_events(rows):
    """Where no gather hides behind computation, whatever the schedule, the ZeRO level, the links and what is shared."""
    exact = [row for row in rows if not row.hides_gathers]
    assert {(row.zero, row.overlap) for row in exact} == {(0, True), (0, False), (1, False), (2, False), (3, False)}
    assert {row.schedule for row in exact if row.stages > 1} == set(SCHEDULES)
    assert sum(row.tied and row.stages > 1 for row in exact) > 20
    assert not [row for row in exact if abs(row.apart) > AGREE]


def test_waiting_for_a_shared_parameter_only_adds(rows):
    late = [row for row in rows if row.zero == 0 and row.error < -AGREE]
    assert late and all(row.tied and row.stages > 1 for row in late)
    assert not [row for row in rows if row.zero == 0 and row.error > AGREE]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("parameters", [2, 8, 30])
def test_hidden_gathers_differ_by_a_layer(zero, parameters):
    """Of equal layers a gather counts beside the layer before, or beside the layer itself: one of them is left, with
    ZeRO-3 also a reduction at the end.  In a price ZeRO-2's reductions end with their pass; events let those that take
    longer run on beside the next forward pass."""
    layers = [dict(parameters=parameters) for _ in range(5)]
    profile, there = model(*layers), cluster(2)
    given = plan((5, 2), batch=8, micro_batches=4, zero=zero)
    given = given.model_copy(update={"space": "spmd"}) if zero == 2 else given
    gather = parameters / 2
    priced, played = price(given, CostModel(profile, there)).seconds, Played(given, profile, there).seconds()
    assert played - priced <= (2 if zero == 3 else 1) * gather + 1e-9
    if zero != 2 or gather <= 3:
        assert priced - played <= gather + 1e-9


def test_layers_between_measured_batches():
    timing = Timing(batches=(1.0, 2.0, 4.0), forward=(1.0, 3.0, 4.0), backward=(2.0, 2.0, 8.0))
    kind = LayerKind(timings=(timing,), boundary_bytes=0.0, activation_bytes=0.0, max_tensor=2)
    assert events.layer_seconds(kind, 1, 1) == (1.0, 2.0)
    assert events.layer_seconds(kind, 3, 1) == (3.5, 5.0)
    assert events.layer_seconds(kind, 8, 2) == (4.0, 8.0)
    for samples in range(1, 9):
        assert events.layer_seconds(kind, samples, 2) == pytest.approx(kind.seconds(samples, 2))


def test_rings_share_the_ports_of_a_node():
    """Two nodes of two devices with one port of 1 byte/s: two groups that cross have half of it each."""
    there = cluster(2).model_copy(update={"nodes": (cluster(2).nodes[0].model_copy(update={"count": 2}),)})
    assert events.ring([0, 1], [[0, 1], [0, 1]], there, 8.0) == pytest.approx(8.0)
    assert events.ring([0, 1], [[0, 1]], there, 8.0) == pytest.approx(4.0)
    assert events.all_reduce([0, 0, 1, 1], [[0, 0, 1, 1]], there, 8.0) == pytest.approx(12.0)
    assert np.isclose(events.all_reduce([0], [[0]], there, 8.0), 0.0)


def test_groups_that_leave_a_node_share_its_ports_in_prices_too():
    """Two nodes of two devices, tensor degree 2: both data groups cross, through one port or through one each."""
    (node,) = cluster(2).nodes
    profile, given = model(dict(parameters=8, max_tensor=2)), plan((1, 4), batch=2, tensor=2)
    for ports, reduction in ((1, 8.0), (2, 4.0)):
        network = Link(bandwidth=1.0, latency=0.0, ports=ports)
        there = Cluster(name="toy", nodes=(node.model_copy(update={"count": 2}),), network=network)
        played = Played(given, profile, there).seconds()
        assert played == pytest.approx(1.0 + 1.5 + reduction)
        assert price(given, CostModel(profile, there)).seconds == pytest.approx(played)


def test_a_wider_stage_gathers_what_it_receives_by_hand():
    """One device, then two tensor ranks that halve 2 and 3 s.  6 bytes and 1 s of latency between them take 7 s.  On
    the way there each rank gets a half and gathers the other in 3 + 1 s; on the way back none gathers, so half of that
    counts."""
    layers = dict(boundary_bytes=6.0), dict(max_tensor=2)
    given = plan((1, 1), (1, 2), batch=1)
    wider = given.stages[1].chunks[0].model_copy(update={"runs": (Run(layers=1, tensor=2),)})
    stages = given.stages[0], given.stages[1].model_copy(update={"chunks": (wider,)})
    given = given.model_copy(update={"stages": stages})
    profile, toy = model(*layers), cluster(3, latency=1.0)
    by_hand = (2 + 3) + (1 + 1.5) + 2 * (6 + 1 + (3 + 1) / 2)
    assert Played(given, profile, toy).seconds() == pytest.approx(by_hand)
    assert price(given, CostModel(profile, toy)).seconds == pytest.approx(by_hand)
