"""What one would run without a planner: shapes by hand, and never faster than the plan."""

import itertools

import numpy as np
import pytest

from jhpt.core.catalogue import cluster_named
from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.networks import network_profile
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import search
from tests.covers import quick_and_exhaustive
from tests.planner.instances import random_cluster, random_profile

NAMES = ("data parallel", "tensor parallel", "gpipe, equal layers", "1f1b, equal layers", "best 3-D grid")


def shape(plan: Plan) -> tuple[int, int, int]:
    """Stages, data, tensor."""
    stage = plan.stages[0]
    tensor = stage.chunks[0].tensor[0]
    return len(plan.stages), stage.devices // tensor, tensor


def lengths(plan: Plan) -> list[int]:
    return [chunk.stop - chunk.first for stage in plan.stages for chunk in stage.chunks]


def instance(seed: int, *, mixed: bool = False) -> CostModel:
    rng = np.random.default_rng(seed)
    return CostModel(random_profile(rng, 6), random_cluster(rng, 6, mixed=mixed))


def test_shapes_of_vgg16_on_six_devices():
    """16 layers: 6 stages of 3, 3, 3, 3, 2, 2; a batch of 12 has 6 equal shares; tensor degrees divide 8."""
    cluster = cluster_named("a100x3x2")
    model = CostModel(network_profile("vgg16", cluster.nodes[0].device), cluster)
    found = {baseline.name: baseline.plan for baseline in baselines(request(12, 1), model)}
    assert tuple(found) == NAMES
    assert shape(found["data parallel"]) == (1, 6, 1)
    assert shape(found["tensor parallel"]) == (1, 1, 4)
    for name, schedule in (("gpipe, equal layers", "gpipe"), ("1f1b, equal layers", "1f1b")):
        assert shape(found[name]) == (6, 1, 1)
        assert lengths(found[name]) == [3, 3, 3, 3, 2, 2]
        assert found[name].schedule == schedule


def test_pipelines_are_replicated_over_what_is_left():
    """40 devices for 16 layers: 16 stages of 2; the last 8 devices stay idle."""
    cluster = cluster_named("a100x8x5")
    model = CostModel(network_profile("vgg16", cluster.nodes[0].device), cluster)
    found = {baseline.name: baseline.plan for baseline in baselines(request(64, 32), model)}
    assert shape(found["1f1b, equal layers"]) == (16, 2, 1)


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(12), range(4, 8)))
def test_best_grid_is_the_best_of_all(seed):
    """Every grid with equal layers, written down and priced."""
    model, asked = instance(seed), request(4)
    n, k = model.num_layers, model.cluster.num_devices
    least = None
    best = next(b for b in baselines(asked, model) if b.name == "best 3-D grid")
    for m, zero, recompute in itertools.product(asked.micro_batches, asked.zero, asked.recompute):
        for s, d, t in itertools.product(range(1, min(n, k) + 1), range(1, k + 1), model.common_degrees(k)):
            if s * d * t > k or (asked.batch // m) % d:
                continue
            sizes = [n // s + (i < n % s) for i in range(s)]
            stages, first = [], 0
            for i, size in enumerate(sizes):
                chunk = {"first": first, "runs": [{"layers": size, "tensor": t}]}
                stages.append({"device": i * d * t, "devices": d * t, "chunks": [chunk]})
                first += size
            fields = dict(micro_batches=m, zero=zero, recompute=recompute, stages=stages)
            for schedule in ("1f1b", "eager-1f1b"):
                plan = Plan.model_validate(dict(model="toy", cluster="toy", batch=4, schedule=schedule, **fields))
                estimate = price(plan, model)
                if estimate.fits and (least is None or estimate.seconds < least):
                    least = estimate.seconds
    assert best.seconds == (least if least is None else pytest.approx(least, rel=1e-12))


@pytest.mark.parametrize(("space", "mixed"), [("spmd", False), ("general", False), ("general", True)])
@pytest.mark.parametrize("seed", quick_and_exhaustive(range(12), (2, 5, 7, 9)))
def test_no_plan_is_slower(seed, space, mixed):
    """A proven plan beats all of its space; where nothing fits, none of them does."""
    model, asked = instance(100 + seed, mixed=mixed), request(4)
    found = search(asked, model, space)
    for baseline in baselines(asked, model, space):
        if baseline.plan is None:
            assert baseline.reason
            continue
        estimate = price(baseline.plan, model)
        assert estimate.fits
        assert baseline.seconds == estimate.seconds
        assert baseline.plan.space == space
        assert found.seconds <= baseline.seconds * (1 + 1e-9)


def test_the_space_is_that_of_the_cluster_unless_said():
    for mixed, space in ((False, "spmd"), (True, "general")):
        model = next(m for m in (instance(seed, mixed=mixed) for seed in range(20)) if m.cluster.mixed == mixed)
        assert baselines(request(4), model) == baselines(request(4), model, space)


def test_what_cannot_be_built_says_why():
    cluster = cluster_named("v100x1x1")
    model = CostModel(network_profile("gnmt", cluster.nodes[0].device), cluster)
    reasons = {baseline.name: baseline.reason for baseline in baselines(request(8), model)}
    assert "tensor degree" in reasons["tensor parallel"]
    assert "two devices" in reasons["1f1b, equal layers"]
    assert reasons["data parallel"] == ""


def test_what_does_not_fit_says_how_much_is_missing():
    cluster = cluster_named("v100x8x1")
    node = cluster.nodes[0]
    small = node.model_copy(update={"device": node.device.model_copy(update={"memory": 1e6})})
    model = CostModel(network_profile("gnmt", node.device), cluster.model_copy(update={"nodes": (small,)}))
    for baseline in baselines(request(8), model):
        assert baseline.plan is None and baseline.seconds is None
        assert "GiB per device are missing" in baseline.reason or "tensor degree" in baseline.reason
