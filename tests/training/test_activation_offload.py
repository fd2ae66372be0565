"""Activations are offloaded only where that leaves gradients as they are."""

import jax
import numpy as np
import pytest

from jhpt.core.plan import SavedTensors
from jhpt.measure.offload import NAMES, layer_gradients, offload_is_right
from jhpt.training.planning import with_tried_offload
from tests.sharding.plans import piped

PLAN = piped([6], 1, recompute=True, saved=SavedTensors(device=("qkv",), host=("residual_in", "mlp_hidden")))


def test_this_machine_gets_them_right():
    assert offload_is_right()


@pytest.mark.parametrize("wrong", ["rows mixed up", "one entry", "no such memory", "not a number"])
def test_wrong_gradients_are_noticed(wrong):
    def gradients(host):
        params, x = jax.tree.map(np.array, layer_gradients(()))
        if not host:
            return params, x
        assert tuple(host) == NAMES
        match wrong:
            case "rows mixed up":
                params = params[::-1]
            case "one entry":
                x[3, 4] += 1e-2 * np.abs(x).max()
            case "not a number":
                x[0, 0] = np.nan
            case _:
                raise jax.errors.JaxRuntimeError("no memory space pinned_host")
        return params, x

    assert not offload_is_right(gradients)


def test_where_they_are_right_the_plan_stays():
    messages = []
    assert with_tried_offload(PLAN, messages.append, right=lambda: True) == PLAN
    assert not messages


def test_where_they_are_wrong_it_is_computed_again_and_said():
    messages = []
    plan = with_tried_offload(PLAN, messages.append, right=lambda: False)
    assert plan == PLAN.model_copy(update={"saved": SavedTensors(device=("qkv",))})
    assert len(messages) == 1 and messages[0].startswith("warning") and "residual_in, mlp_hidden" in messages[0]


@pytest.mark.parametrize("saved", [None, SavedTensors(device=("qkv",))])
def test_nothing_is_tried_where_nothing_is_offloaded(saved):
    plan = PLAN.model_copy(update={"saved": saved})
    assert with_tried_offload(plan, pytest.fail, right=lambda: pytest.fail("tried")) == plan
