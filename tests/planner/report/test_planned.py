"""What `jhpt.plan` returns is a plan that explains itself."""

import json

import pytest

import jhpt
from jhpt.core.plan import Plan

ASKED = {"cluster": "a100x2x1", "batch": 8}


@pytest.fixture(scope="module")
def planned():
    return jhpt.plan("gpt-tiny", **ASKED)


def test_it_is_a_plan(planned, tmp_path):
    assert isinstance(planned, jhpt.Plan) and type(planned.plan) is Plan
    planned.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert type(saved) is Plan
    assert saved == planned == planned.plan == saved
    assert hash(saved) == hash(planned)
    assert saved.model_copy(update={"batch": 16}) != planned
    assert planned != jhpt.plan("gpt-tiny", cluster="a100x2x1", batch=16)


def test_it_prints_what_the_command_prints(planned):
    text = str(planned)
    first = text.splitlines()[0]
    assert first in repr(planned)
    assert f"{planned.tokens_per_second / 2:,.0f} tokens/s per GPU" in first
    for word in (
        "data parallel",
        "GiB per device",
        "milliseconds per step",
        *(each.name for each in planned.baselines),
    ):
        assert word in text


def test_figures(planned):
    assert planned.estimate.seconds == planned.seconds == planned.speed.seconds
    assert 0 < planned.mfu < 1
    assert len(planned.alternatives) > 1
    tree = planned.to_json()
    assert json.loads(json.dumps(tree)) == tree
    assert (tree["mfu"], tree["tokens_per_second"]) == (planned.mfu, planned.tokens_per_second)


def test_what_training_takes(planned):
    found = planned.rent("1B", 2.5)
    assert found == planned.rent(1e9, "2.5") == planned.rent(tokens=1e9, price="a100=2.5")
    assert found.cost == pytest.approx(2.5 * found.device_hours)
    assert planned.rent() is None
    with pytest.raises(jhpt.InputError, match="tokens='lots'"):
        planned.rent("lots")


def test_a_changed_copy_has_no_explanation(planned):
    changed = planned.model_copy(update={"origin": "given"})
    assert type(changed) is Plan and changed.origin == "given"
