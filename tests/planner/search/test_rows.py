"""Mixed clusters: the order of their nodes, which kinds a pipeline passes first, and who stays idle."""

import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.report.answer import summary, timeline, to_json
from jhpt.planner.report.timeline import svg_timeline, text_timeline
from jhpt.planner.report.words import devices_text
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.choice import fitted
from jhpt.planner.search.request import Request, request
from jhpt.planner.search.rows import MOST_ROWS, left_out, rows
from jhpt.planner.search.solve import refusal, search, solve
from tests.planner.cost.test_estimate import layer, model
from tests.planner.instances import random_profile

FREE = Link(bandwidth=1e9, latency=0.0)


def node(name: str, peak: float, devices: int = 1, count: int = 1, memory: float = 1e9, inside: Link = FREE) -> Node:
    device = Device(name=name, peak_flops={"bfloat16": peak}, memory=memory, memory_bandwidth=peak)
    return Node(device=device, devices=devices, inside=inside, host=FREE, host_memory=1.0, count=count)


def cluster_of(*nodes: Node, network: Link = FREE, overlap: bool = True) -> Cluster:
    return Cluster(name="mixed", nodes=nodes, network=network, overlap=overlap)


def apart(cluster: Cluster) -> list[Node]:
    """Its nodes, one by one."""
    return [each.model_copy(update={"count": 1}) for each in cluster.nodes for _ in range(each.count)]


@st.composite
def problems(draw) -> tuple[ModelProfile, dict[str, ModelProfile], Cluster, Cluster, Request]:
    """A model, a cluster of up to three kinds of nodes, and the same cluster with its nodes in another order."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    kinds = [
        node(
            name,
            peak=draw(st.sampled_from([1.0, 2.0, 5.0])),
            devices=draw(st.integers(1, 2)),
            memory=draw(st.sampled_from([300.0, 1e4])),
            inside=Link(bandwidth=draw(st.sampled_from([1.0, 50.0])), latency=draw(st.sampled_from([0.0, 0.01]))),
        )
        for name in draw(st.permutations(["a", "b", "c"]))
    ]
    listed = [kinds[at] for at in draw(st.lists(st.integers(0, 2), min_size=2, max_size=3))]
    network = Link(bandwidth=draw(st.sampled_from([0.5, 20.0])), latency=0.01, ports=draw(st.integers(1, 2)))
    cluster = cluster_of(*listed, network=network, overlap=draw(st.booleans()))
    other = []
    for _, equal in itertools.groupby(draw(st.permutations(listed)), key=lambda each: each.kind):
        *_, last = alike = list(equal)
        other += [last.model_copy(update={"count": len(alike)})] if draw(st.booleans()) else alike
    profile = random_profile(rng, 3).model_copy(update={"device": draw(st.sampled_from(["a", "elsewhere"]))})
    others = {each.device.rates: timed_anew(rng, profile, each.device.name) for each in kinds if draw(st.booleans())}
    asked = request(
        draw(st.sampled_from([1, 4])),
        zero=draw(st.sampled_from([(0,), (0, 1), (3,)])),
        recompute=(draw(st.booleans()),),
    )
    return profile, others, cluster, cluster.model_copy(update={"nodes": tuple(other)}), asked


def timed_anew(rng: np.random.Generator, profile: ModelProfile, device: str) -> ModelProfile:
    """The model's profile on another device: every layer faster or slower by another factor."""
    kinds = {
        name: kind.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(update={way: tuple(x * factor for x in getattr(timing, way)) for way in PASSES})
                    for timing in kind.timings
                )
            }
        )
        for (name, kind), factor in zip(profile.kinds.items(), rng.uniform(0.5, 3.0, len(profile.kinds)), strict=True)
    }
    return profile.model_copy(update={"kinds": kinds, "device": device})


PASSES = ("forward", "backward")


def by_kind(plan: Plan, cluster: Cluster) -> list[object]:
    """The plan with devices named by kind of node, number among the nodes of that kind, and number in the node."""
    names, seen = [], defaultdict(int)
    for each in apart(cluster):
        names += [(each.kind, seen[each.kind], device) for device in range(each.devices)]
        seen[each.kind] += 1
    return [plan.micro_batches, plan.zero, plan.recompute, plan.schedule] + [
        ([names[device] for device in stage.members], stage.chunks) for stage in plan.stages
    ]


def check_another_order(problem) -> None:
    profile, others, cluster, reordered, asked = problem
    models = [CostModel(profile, each, others=others) for each in (cluster, reordered)]
    one, two = (search(asked, each, "general") for each in models)
    assert (one.seconds, one.lower_bound) == (two.seconds, two.lower_bound)
    assert [seconds for seconds, _ in one.shapes.values()] == [seconds for seconds, _ in two.shapes.values()]
    for (_, plan), (_, other) in zip(one.shapes.values(), two.shapes.values(), strict=True):
        assert by_kind(plan, cluster) == by_kind(other, reordered)
    assert [pace.note for pace in models[0].paces] == [pace.note for pace in models[1].paces]
    compared = [[each.seconds for each in baselines(asked, each)] for each in models]
    assert compared[0] == compared[1]


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_another_order_of_the_nodes_changes_nothing(examples):
    """Neither seconds nor bound nor, but for the devices' numbers, the plan, its alternatives and the baselines."""
    check = settings(deadline=None, derandomize=True, max_examples=examples)(given(problems())(check_another_order))
    check()


def test_slow_devices_stay_idle():
    # One layer of 1 + 2 s on a fast device.  A share of the two samples on the slow one would take 5 (1 + 2) s.
    fast, slow = node("fast", 5.0), node("slow", 1.0)
    profile = model(layer()).model_copy(update={"device": "fast"})
    for nodes, devices in (((slow, fast, fast), [1, 2]), ((fast, slow, fast), [0, 2]), ((fast, fast, slow), [0, 1])):
        answer = solve(profile, cluster_of(*nodes), request(2), "general")
        (stage,) = answer.plan.stages
        assert (list(stage.members), answer.plan.seconds, answer.gap) == (devices, 3, 0)
        tree = to_json(answer)
        assert tree["stages"][0]["devices"] == devices
        assert tree["devices"]["idle"] == [index for index, each in enumerate(nodes) if each is slow]


def test_a_stage_on_devices_apart_is_a_plan_like_any_other(tmp_path):
    fast, slow = node("fast", 5.0), node("slow", 1.0)
    profile = model(layer()).model_copy(update={"device": "fast"})
    answer = solve(profile, cluster_of(fast, slow, fast), request(2), "general")
    assert answer.plan.stages[0].apart == (0, 2)
    answer.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == answer.plan
    assert json.loads(json.dumps(to_json(answer, baselines(request(2), answer.model))))["seconds"] == 3
    assert text_timeline(timeline(answer)) and svg_timeline(timeline(answer), "mixed")
    assert summary(answer)[-1] == "devices: 2 of 3 work: 2 of 2 fast, 0 of 1 slow; idle: 1"
    assert devices_text(answer.plan.stages[0]) == "0, 2"
    assert fitted(answer.plan, answer.model, load_config("gpt-tiny")) is answer.plan
    with pytest.raises(InputError, match="space=spmd"):
        traffic(answer.plan, profile)


def test_the_slow_kind_may_come_first():
    # Layers of 1 + 2 and 3 + 6 s; each fits a device of its own only.  The slow device takes three times as long.
    light, heavy = layer(parameters=50), layer(3.0, 6.0, parameters=50)
    profile = model(light, heavy).model_copy(update={"device": "fast"})
    fast, slow = (node(name, peak, memory=1000.0) for name, peak in (("fast", 3.0), ("slow", 1.0)))
    for nodes, order in (((fast, slow), [1, 0]), ((slow, fast), [0, 1])):
        answer = solve(profile, cluster_of(*nodes), request(1), "general")
        assert [stage.device for stage in answer.plan.stages] == order
        assert answer.plan.seconds == pytest.approx(3 + 6 + 3 + 6)


def test_rows_are_orders_of_kinds():
    a, b, c = node("a", 1.0, devices=2), node("b", 2.0), node("c", 4.0)
    found = rows(CostModel(model(layer()), cluster_of(a, b, c, b)))
    # Devices 0-1 | 2 | 3 | 4; the fastest kind first, then the slowest first.
    assert [row.numbers for row in found[:2]] == [(3, 2, 4, 0, 1), (0, 1, 2, 4, 3)]
    assert len({row.numbers for row in found}) == len(found) == 6
    assert [[each.count for each in row.model.cluster.nodes] for row in found[:2]] == [[1, 2, 1], [1, 2, 1]]
    (whole,) = rows(CostModel(model(layer()), cluster_of(a, a)))
    assert whole.numbers == (0, 1, 2, 3) and whole.model is whole.listed


def test_stages_begin_on_the_next_device_or_on_a_later_node():
    a, b = node("a", 1.0, devices=3), node("b", 2.0, devices=2)
    places = CostModel(model(layer()), cluster_of(a.model_copy(update={"count": 2}), b)).places
    assert [places.starts(offset) for offset in (0, 2, 3, 7, 8)] == [(0, 3, 6), (2, 3, 6), (3, 6), (7,), (8,)]
    # Whole nodes of the first kind are idle before the stage on device 0, not behind it.
    assert places.starts(1, before=0) == (1, 3, 6)
    assert CostModel(model(layer()), cluster_of(a, a)).places.starts(1) == (1,)


def test_of_many_kinds_only_some_orders_are_searched():
    kinds = [node(str(index), 1.0 + index) for index in range(5)]
    costs = CostModel(model(layer(), layer()), cluster_of(*kinds))
    assert (len(rows(costs)), left_out(costs)) == (MOST_ROWS, 120 - MOST_ROWS)
    answer = solve(costs.profile, costs.cluster, request(2, zero=(0,), recompute=(False,)), "general")
    assert 0 < answer.plan.lower_bound <= answer.plan.seconds


def test_what_would_fit_does_not_depend_on_the_order():
    # Four layers of 16 x 50 bytes: one fits a device of kind a, two one of kind b.
    nodes, profile = (node("a", 1.0, memory=1000.0), node("b", 2.0, memory=1700.0)), model(*[layer(parameters=50)] * 4)
    texts = {
        refusal(request(2, zero=(0,)), CostModel(profile, cluster_of(*order)), "general")
        for order in (nodes, nodes[::-1])
    }
    (text,) = texts
    assert "2 devices of" in text and "per device" in text and "it would fit on 4 such devices" in text
