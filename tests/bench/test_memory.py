"""`jhpt bench memory`: its competitors, and a step in a process of its own."""

from dataclasses import replace

import pytest

from jhpt.bench.memory.footprints import Footprint
from jhpt.bench.memory.steps import competitors, in_process
from jhpt.core.plan import Offload
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from tests.conftest import tiny_overrides


def test_competitors_are_what_people_do():
    """Everything on the host and nothing ahead; the optimizer alone; on 16 GiB nobody keeps 1.5 billion parameters."""
    task = prepare("gpt2-1.5b", cluster="h100x1x1", budget="16GiB", batch=8)
    plans, model = competitors(task), CostModel(task.profile, task.cluster)
    assert plans["synchronous"].offload == Offload(ahead=0)
    assert plans["optimizer"].offload == Offload(kind="optimizer")
    assert "resident" not in plans
    assert plans["planned"].seconds < plans["synchronous"].seconds
    ahead = price(plans["synchronous"].model_copy(update={"offload": Offload()}), model).seconds
    assert ahead < plans["synchronous"].seconds, "nothing runs beside copies that are not ahead"


@pytest.mark.exhaustive
def test_a_step_in_a_process_of_its_own(tiny, corpus):
    overrides = tiny_overrides(corpus) | {"memory.offload": "both", "parallel.data": 1}
    result = in_process("gpt-tiny", overrides, plan_by_hand(tiny(**overrides), 1), steps=3, share=None)
    assert "failed" not in result, result
    assert len(result["seconds"]) == len(result["peaks"]) == 3 and result["host"] > 0


def test_why_a_process_failed(tiny, corpus):
    overrides = tiny_overrides(corpus) | {"parallel.data": 1}
    plan = plan_by_hand(tiny(**overrides), 1)
    result = in_process("gpt-tiny", overrides | {"data.path": "/nowhere"}, plan, steps=1, share=None)
    assert "/nowhere" in result["failed"]


def test_errors_are_relative():
    footprint = Footprint(
        model="any",
        held_out=False,
        parameters=1,
        budget=10,
        batch=1,
        plan={},
        predicted={"a": 5.0, "b": 6.0},
        device=10.0,
        predicted_host=0.0,
        host=0.0,
    )
    assert footprint.error == pytest.approx(0.1) and replace(footprint, predicted={"a": 9.0}).error == pytest.approx(
        0.1
    )
