"""Which plan a run executes, and which it refuses."""

import jax
import pytest

import jhpt
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan, plan_by_hand
from jhpt.planner.analytic import analytic_profile
from jhpt.planner.request import request
from jhpt.planner.solve import solve
from jhpt.training import planning
from jhpt.training.planning import differences

QUICK = {"train.steps": 2, "checkpoint.every": 100, "evaluation.every": 100}


def here(devices: int = 8) -> Cluster:
    device = Device(name="cpu", peak_flops={"float32": 1e11}, memory=4e9, memory_bandwidth=1e10)
    link = Link(bandwidth=1e9, latency=1e-5)
    node = Node(device=device, devices=devices, inside=link, host=link, host_memory=1e10)
    return Cluster(name="here", nodes=(node,), network=link, overlap=False)


@pytest.fixture
def measured(monkeypatch):
    """Planning without measuring; counts how often it is asked."""
    asked = []

    def profile(config, grid):
        asked.append(config.name)
        return analytic_profile(config, here().nodes[0].device, "float32"), None, False

    monkeypatch.setattr(planning, "cached_profile", profile)
    monkeypatch.setattr(planning, "cached_cluster", lambda rounds: (here(), None, False))
    return asked


def test_auto_plans_once_and_keeps_the_plan(tiny, tmp_path, measured):
    config = tiny(**QUICK, parallel="auto")
    result = jhpt.train(config, out=tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert (plan.devices, plan.device, plan.batch) == (8, "cpu", 16) and plan.seconds
    assert result.predicted_seconds == plan.seconds and len(measured) == 1
    again = jhpt.train(config, out=tmp_path / "run", overrides={"train.steps": 3})
    assert again.step == 3 and len(measured) == 1
    assert Plan.load(tmp_path / "run" / "plan.json") == plan


def test_a_given_plan_is_executed_and_reported(tiny, tmp_path):
    config = tiny(**QUICK | {"train.steps": 4})
    asked = request(config.data.batch_size, 4, schedules=("1f1b",))
    profile = analytic_profile(config, here().nodes[0].device, "float32")
    plan = solve(profile, here(), asked).plan
    plan.save(tmp_path / "plan.json")
    result = jhpt.train(config, out=tmp_path / "run", plan=tmp_path / "plan.json")
    assert Plan.load(tmp_path / "run" / "plan.json") == plan
    assert result.step_seconds and result.predicted_seconds == plan.seconds
    log = (tmp_path / "run" / "train.log").read_text()
    assert "step time: predicted" in log and "predicted / measured" in log
    same = jhpt.train(tiny(**QUICK | {"train.steps": 4, "parallel.data": 1}), out=tmp_path / "alone")
    assert result.losses == pytest.approx(same.losses, rel=1e-4)


def test_a_plan_for_something_else_is_refused_with_the_difference(tiny, tmp_path):
    config = tiny(**QUICK)
    plan = plan_by_hand(config, 8)
    assert differences(plan, config) == []
    strange = {
        "the plan is for 8 x NVIDIA H100": plan.model_copy(update={"device": "NVIDIA H100"}),
        "a batch of 32, data.batch_size is 16": plan.model_copy(update={"batch": 32}),
        "6 layers with embedding and head, gpt-tiny has 4": plan_by_hand(tiny(**{"model.num_layers": 4}), 8),
        "the plan uses 16 devices, here are 8": plan_by_hand(tiny(**{"parallel.data": 16}), 16),
    }
    for words, other in strange.items():
        assert any(words in line for line in differences(other, config)), words
        with pytest.raises(InputError, match="the plan does not fit"):
            jhpt.train(config, plan=other, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    few = tiny(**{"model.num_heads": 2})
    wide = plan_by_hand(tiny(**{"parallel.tensor": 8}), 8)
    assert any("tensor degree 8, which does not divide 2 heads" in line for line in differences(wide, few))


def test_a_general_plan_is_refused(tiny, tmp_path):
    plan = plan_by_hand(tiny(), 8).model_copy(update={"space": "general"})
    with pytest.raises(InputError, match=r"of the space general.*one SPMD program cannot run it"):
        jhpt.train(tiny(**QUICK), plan=plan, out=tmp_path / "run")


def test_a_cluster_of_another_size_is_refused(tiny, tmp_path, measured):
    config = tiny(**QUICK, **{"parallel.auto": True, "parallel.cluster": "h100x8x2"})
    with pytest.raises(InputError, match="has 16 devices, here are 8"):
        jhpt.train(config, out=tmp_path / "run")
    assert jax.device_count() == 8 and not (tmp_path / "run").exists()
