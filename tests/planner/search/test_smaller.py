"""Changes that need less memory: in order, each really less or equal, none contradictory."""

import pytest

from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.planner.search.smaller import needed, smaller

SETTINGS = {
    "one device": ("gpt2-124m", {}, 1),
    "replicas": ("gpt2-350m", {}, 8),
    "a pipeline": ("gpt2-124m", {"parallel.pipe": 2, "parallel.micro_batches": 2}, 4),
    "tensor": ("bert-base", {"parallel.tensor": 4}, 4),
    "auto": ("gpt-13b", {"parallel": "auto"}, 8),
    "nothing left": (
        "gpt2-124m",
        {"parallel.micro_batches": 32, "memory.recompute": "full", "memory.offload": "both"},
        1,
    ),
}


@pytest.mark.parametrize(("preset", "settings", "devices"), SETTINGS.values(), ids=SETTINGS)
def test_changes_come_in_order_and_need_less(preset, settings, devices):
    config = load_config(preset, {"model.vocab_size": 50257} | settings)
    plan = plan_by_hand(load_config(config, {"parallel.auto": False}), devices)
    now = needed(config, plan, "any", "float32")
    found = list(smaller(config, devices, one_memory=True))
    assert [change.same_results for change in found] == sorted((c.same_results for c in found), reverse=True)
    assert [change.preset is None for change in found] == sorted((c.preset is None for c in found), reverse=True)
    for change in found:
        less = needed(change.config, change.plan, "any", "float32")
        assert less is not None and now is not None
        total = lambda need, plan: plan.devices * sum(need.device.values()) + sum(need.host.values())  # noqa: E731
        sharded = change.plan.zero > plan.zero or change.plan.offload
        assert sharded or total(less, change.plan) <= 1.02 * total(now, plan), change.text
        assert all(f"{name}=" in change.text for name in change.settings)
        if change.same_results:
            assert change.config.model == config.model and change.config.data == config.data
    sizes = [c.config.model.parameter_count().total for c in found if c.preset]
    assert sizes == sorted(sizes, reverse=True) and all(size < config.model.parameter_count().total for size in sizes)


def test_what_is_certain_is_less_than_what_is_expected():
    config = load_config("gpt2-124m", {"model.vocab_size": 50257})
    need = needed(config, plan_by_hand(config, 1), "any", "float32")
    state = 12 * config.model.parameter_count().allocated
    assert need is not None and state < need.least < sum(need.device.values())
