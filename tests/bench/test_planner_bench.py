"""The planner's benchmark on tiny settings: what it writes, and that its oracle is right."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jhpt.bench import planner
from jhpt.bench.planner import Settings, SpeedCase
from jhpt.bench.planner_instances import random_instance
from jhpt.bench.planner_oracle import best, general_plans, optimum, plan_of, spmd_plans
from jhpt.planner.estimate import price

PLANS = {"spmd": spmd_plans, "general": general_plans}

CLAIMS = {
    "brute_force_instances",
    "brute_force_mismatches",
    "simulator_error_max",
    "general_128x64_seconds",
    "spmd_128x4096_seconds",
    "spmd_96x10000_seconds",
    "growth_layers",
    "growth_devices",
    "vs_data_parallel_max",
    "vs_gpipe_max",
    "worst_vs_best_baseline",
}


def small(case: SpeedCase) -> SpeedCase:
    return dataclasses.replace(case, layers=4 if case.claim else case.layers // 16, cluster="h100x2x1", batch=4)


TINY = dataclasses.replace(
    planner.QUICK,
    instances=8,
    layers=(2, 3),
    devices=(2, 3),
    plans=400,
    pipelines=6,
    headlines=tuple(map(small, planner.HEADLINES)),
    growth={name: tuple(map(small, cases)) for name, cases in planner.GROWTH.items()},
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
    assert set(report) == {"bench", "date", "machine", "versions", "settings", "rows", "claims"}
    assert report["bench"] == "planner"
    assert set(report["machine"]) == {"cpu", "cores", "device", "platform"}
    assert set(report["claims"]) == CLAIMS
    parts = [row["part"] for row in report["rows"]]
    assert (parts.count("brute force"), parts.count("simulator"), parts.count("worth")) == (8, 6, 1)
    assert all(row["samples_s"] and row["gap"] >= 0 for row in report["rows"] if row["part"] == "speed")
    value = {name: claim["value"] for name, claim in report["claims"].items()}
    assert value["brute_force_instances"] == 8
    assert value["simulator_error_max"] < 1e-9
    assert value["worst_vs_best_baseline"] >= 1 - 1e-9
    assert "vs_gpipe_max" in capsys.readouterr().out


def test_quick_claims_what_the_whole_claims():
    assert planner.QUICK.headlines == Settings().headlines
    assert planner.QUICK.growth == Settings().growth


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("space", "mixed"), [("spmd", False), ("general", False), ("general", True)])
def test_oracle_prices_as_the_estimate_does(space, mixed, seed):
    """The optimum over summed-up stages is that over whole plans, priced one by one."""
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    instance = random_instance(rng, space, layers=layers, devices=devices, plans=300, mixed=mixed)
    found = optimum(instance.asked, instance.model, space)
    seconds, plan, plans = best(PLANS[space](instance.asked, instance.model), instance.model)
    assert found.plans == plans == instance.plans
    if plan is None:
        assert found.draft is None and found.seconds == math.inf
    else:
        assert found.seconds == pytest.approx(seconds, rel=1e-12)
        own = price(plan_of(found.draft, instance.asked, instance.model, space), instance.model)
        assert own.fits and own.seconds == pytest.approx(seconds, rel=1e-12)


def test_largest_problems_can_be_drawn():
    for space in PLANS:
        instance = random_instance(np.random.default_rng(0), space, layers=8, devices=6, plans=6000)
        assert instance.model.num_layers == 8 and instance.model.cluster.num_devices == 6
        assert instance.plans <= 6000


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="more than 5 plans"):
        random_instance(np.random.default_rng(0), "general", layers=5, devices=4, plans=5)
