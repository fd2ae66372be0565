"""The planner's benchmark on tiny settings: what it writes, and that its oracle is right."""

import dataclasses
import json
import math

import numpy as np
import pytest

from benchmarks.planner import run as planner
from benchmarks.planner.instances import random_instance
from benchmarks.planner.optimality import compare
from benchmarks.planner.oracle import best, general_plans, optimum, plan_of, spmd_plans
from benchmarks.planner.settings import GROWTH, HEADLINES, QUICK, Settings, SpeedCase
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import request
from tests.covers import quick_and_exhaustive

PLANS = {"spmd": spmd_plans, "general": general_plans}

BASELINES = ("data_parallel", "gpipe", "best_baseline")

CLAIMS = {
    "brute_force_instances",
    "brute_force_mismatches",
    "events_exact_mismatches",
    "events_error_median",
    "simulator_error_max",
    "general_128x64_seconds",
    "spmd_128x4096_seconds",
    "spmd_96x10000_seconds",
    "growth_layers",
    "growth_devices",
    *(form.format(f"vs_{name}") for form in ("{}_max", "{}_geomean", "worst_{}") for name in BASELINES),
}


def small(case: SpeedCase) -> SpeedCase:
    return dataclasses.replace(case, layers=4 if case.claim else case.layers // 16, cluster="h100x2x1", batch=4)


TINY = dataclasses.replace(
    QUICK,
    instances=8,
    layers=(2, 3),
    devices=(2, 3),
    plans=400,
    played=40,
    pipelines=6,
    headlines=tuple(map(small, HEADLINES)),
    growth={name: tuple(map(small, cases)) for name, cases in GROWTH.items()},
    models=("gnmt",),
    clusters=("a100x8x4-200gib",),
    spaces=("spmd",),
    workers=1,
)


def test_what_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner, "QUICK", TINY)
    path = tmp_path / "planner.json"
    assert planner.run(quick=True, json_path=str(path)) == 0
    report = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert set(report) == {"bench", "date", "commit", "machine", "versions", "settings", "rows", "claims"}
    assert report["bench"] == "planner"
    assert set(report["machine"]) == {"cpu", "cores", "device", "platform"}
    assert set(report["claims"]) == CLAIMS
    parts = [row["part"] for row in report["rows"]]
    assert (parts.count("brute force"), parts.count("simulator"), parts.count("worth")) == (8, 6, 1)
    assert all(row["samples_s"] and row["gap"] >= 0 for row in report["rows"] if row["part"] == "speed")
    value = {name: claim["value"] for name, claim in report["claims"].items()}
    assert value["brute_force_instances"] == 8
    assert value["events_exact_mismatches"] == 0
    assert value["simulator_error_max"] < 1e-9
    assert value["worst_vs_best_baseline"] >= 1 - 1e-9
    assert "vs_gpipe_max" in capsys.readouterr().out


def test_quick_claims_what_the_whole_claims():
    assert QUICK.headlines == Settings().headlines
    assert QUICK.growth == Settings().growth


ALONE = (132, 175, 177, 182, 183, 206)
"""Seeds of small problems that an oracle without ZeRO-3 over one data rank got wrong."""


def check_oracle(requested, model, space):
    """The optimum over summed-up stages is that over whole plans, priced one by one; the fastest plan, and how many."""
    fastest = optimum(requested, model, space)
    seconds, plan, plans = best(PLANS[space](requested, model), model)
    assert fastest.plans == plans
    if plan is None:
        assert fastest.draft is None and fastest.seconds == math.inf
    else:
        assert fastest.seconds == pytest.approx(seconds, rel=1e-12)
        result = price(plan_of(fastest.draft, requested, model, space), model)
        assert result.fits and result.seconds == pytest.approx(seconds, rel=1e-12)
    return plan, plans


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(10), range(4)))
@pytest.mark.parametrize(("space", "mixed"), [("spmd", False), ("general", False), ("general", True)])
def test_oracle_prices_as_the_estimate_does(space, mixed, seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    instance = random_instance(rng, space, layers=layers, devices=devices, plans=300, mixed=mixed)
    assert check_oracle(instance.asked, instance.model, space)[1] == instance.plans


def test_a_shared_table_is_summed_as_prices_say():
    """The best plan is a pipeline in one program whose first and last stage share a table, on links that carry one
    message at a time: an exchange of it would take twice as long as its sum."""
    found = compare((QUICK, 52))
    assert found.agrees and found.optimum == pytest.approx(18.7978, rel=1e-4)


@pytest.mark.parametrize("seed", ALONE)
def test_oracle_prices_zero_3_over_one_data_rank(seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    instance = random_instance(rng, "spmd", layers=layers, devices=devices, plans=300)
    check_oracle(instance.asked, instance.model, "spmd")


def lone_device(memory):
    """A row of uneven layers on one device; a layer's weights are rounded in a noticeable part of its seconds."""
    kinds = {
        f"layer{i}": LayerKind(
            parameters=parameters,
            boundary_bytes=2.0,
            activation_bytes=4.0,
            max_tensor=1,
            timings=(Timing(batches=(1.0, 2.0), forward=(1.0, 1.5), backward=(2.0, 3.0)),),
        )
        for i, parameters in enumerate((6, 20, 30, 5))
    }
    profile = ModelProfile(name="toy", device="toy", source="given", kinds=kinds, layers=tuple(kinds))
    link = Link(bandwidth=1.0, latency=0.0)
    device = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=memory, memory_bandwidth=100.0)
    node = Node(device=device, devices=1, inside=link, host=link, host_memory=1.0)
    return CostModel(profile, Cluster(name="toy", nodes=(node,), network=link))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_oracle_prices_zero_3_on_one_device(micro_batches):
    model = lone_device(1e6)
    plain, alone = (
        optimum(request(4, micro_batches, zero=(zero,), recompute=(False,)), model, "spmd") for zero in (0, 3)
    )
    # Two layers lie between the ends: of a parameter 4 bytes are read and 2 written, in both passes.
    assert alone.seconds - plain.seconds == pytest.approx(micro_batches * 2 * (20 + 30) * 6 / 100)
    # It is the only plan where the copies of all layers have no room.
    least = {}
    for zero in (0, 3):
        requested = request(4, micro_batches, zero=(zero,), recompute=(False,))
        plan, _ = check_oracle(requested, model, "spmd")
        least[zero] = price(plan, model).stages[0].total_bytes
    assert least[3] < least[0]
    tight = lone_device((least[0] + least[3]) / 2)
    plan, _ = check_oracle(request(4, micro_batches, recompute=(False,)), tight, "spmd")
    assert plan.zero == 3
    assert check_oracle(request(4, micro_batches, zero=(0, 1), recompute=(False,)), tight, "spmd")[0] is None


def test_largest_problems_can_be_drawn():
    for space in PLANS:
        instance = random_instance(np.random.default_rng(0), space, layers=8, devices=6, plans=6000)
        assert instance.model.num_layers == 8 and instance.model.cluster.num_devices == 6
        assert instance.plans <= 6000


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="more than 5 plans"):
        random_instance(np.random.default_rng(0), "general", layers=5, devices=4, plans=5)
