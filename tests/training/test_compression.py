"""Training with compressed tensor-parallel sums: near the uncompressed, the same recomputed and in pipelines."""

import numpy as np
import pytest

from jhpt.core.config import Compression
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import plan_by_hand
from tests.sharding.plans import laid_out, mixed, piped
from tests.sharding.test_parity import BATCH, NONE, definition, gradients, setup_of

__all__ = ["setup_of"]

SOME = Compression(bits=8, tokens=0.4, rest_bits=4)
ALL = Compression(bits=8)

PLANS = {
    "tensor 4": piped([5], 1, tensor=4, batch=BATCH, micro_batches=2),
    "tensor 4, recomputed": piped([5], 1, tensor=4, batch=BATCH, micro_batches=2, recompute=True),
    "data x tensor, ZeRO-3": piped([5], 1, data=2, tensor=4, batch=BATCH, zero=3),
    "pipeline x tensor": piped([3, 2], 2, tensor=4, batch=BATCH, micro_batches=2),
    "several degrees": mixed((1, 4, 2, 4, 1), batch=BATCH),
}


def found(setup_of, name, plan, how, **changes):
    """(gradients by path, loss)"""
    plan = plan.model_copy(update={"compression": how})
    return gradients(laid_out(setup_of(name, 3, NONE), plan, **changes))[:2]


def distance(one, other):
    """Of all gradients together, relative."""
    gap = sum(np.sum((one[path] - other[path]) ** 2) for path in other)
    return (gap / sum(np.sum(leaf**2) for leaf in other.values())) ** 0.5


@pytest.mark.parametrize(
    ("name", "kind", "how", "most"),
    [
        ("gpt-tied", "data x tensor, ZeRO-3", SOME, 0.3),
        ("bert", "pipeline x tensor", ALL, 0.03),
        ("gpt-untied", "several degrees", ALL, 0.03),
    ],
)
def test_gradients_are_near_the_uncompressed_ones(setup_of, name, kind, how, most):
    grads, loss = found(setup_of, name, PLANS[kind], how)
    expected, expected_loss, *_ = definition(setup_of, name, 3)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert 1e-4 < distance(grads, expected) < most


def test_recomputation_and_pipelines_choose_the_same_tokens(setup_of):
    """Another choice of tokens would be another loss."""
    how = Compression(bits=8, tokens=0.4, rest_bits=0)
    grads, loss = found(setup_of, "bert", PLANS["tensor 4"], how)
    for kind in ("tensor 4, recomputed", "pipeline x tensor"):
        again, same_loss = found(setup_of, "bert", PLANS[kind], how)
        assert same_loss == pytest.approx(loss, rel=1e-4)
        assert distance(again, grads) < 0.02


def test_directions_can_be_switched_off(setup_of):
    expected, expected_loss, *_ = definition(setup_of, "gpt-untied", 3)
    forward = found(setup_of, "gpt-untied", PLANS["tensor 4"], Compression(bits=4, backward=False))
    backward = found(setup_of, "gpt-untied", PLANS["tensor 4"], Compression(bits=4, forward=False))
    assert abs(forward[1] / expected_loss - 1) > 1e-6
    assert backward[1] == pytest.approx(expected_loss, rel=1e-6) and distance(backward[0], expected) > 1e-3


def test_by_hand(tiny):
    config = tiny(**{"parallel.tensor": 4, "parallel.compression.bits": 8, "parallel.compression.tokens": 0.5})
    assert plan_by_hand(config, 4).compression == Compression(bits=8, tokens=0.5)
    assert not plan_by_hand(load_config("gpt-tiny"), 1).compression.on


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"parallel.compression.tokens": 0}, "greater than 0"),
        ({"parallel.compression.bits": 3}, "4, 8 or 16"),
        (
            {"parallel.compression.bits": 8, "parallel.sequence": True, "parallel.tensor": 2},
            "leave out parallel.sequence",
        ),
    ],
)
def test_refusals(tiny, overrides, words):
    with pytest.raises(InputError, match=words):
        tiny(**overrides)
