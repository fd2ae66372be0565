"""Training with compressed tensor-parallel sums: near the uncompressed, the same recomputed and in pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.convergence.leak import leak
from jhpt.core.compression import gathers, tokens_of
from jhpt.core.config import Compression
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.token_topk import token_topk
from jhpt.sharding.compression.token_choice import causal_choice
from jhpt.training.parts import compressed_hooks
from tests.covers import quick_and_exhaustive
from tests.sharding.compression.test_all_reduce import on_ranks
from tests.sharding.plans import laid_out, mixed, piped, random_params, stored
from tests.sharding.test_parity import BATCH, NONE, definition, gradients, setup_of

__all__ = ["setup_of"]

SOME = Compression(bits=8, tokens=0.4, rest_bits=4)
ALL = Compression(bits=8)
DROPS = Compression(bits=8, tokens=0.4, rest_bits=0)

PLANS = {
    "tensor 4": piped([5], 1, tensor=4, batch=BATCH, micro_batches=2),
    "tensor 4, recomputed": piped([5], 1, tensor=4, batch=BATCH, micro_batches=2, recompute=True),
    "data x tensor, ZeRO-3": piped([5], 1, data=2, tensor=4, batch=BATCH, zero=3),
    "data x tensor, ZeRO-3, recomputed": piped([5], 1, data=2, tensor=4, batch=BATCH, zero=3, recompute=True),
    "pipeline x tensor": piped([3, 2], 2, tensor=4, batch=BATCH, micro_batches=2),
    "several degrees": mixed((1, 4, 2, 4, 1), batch=BATCH),
}


_known: dict = {}


def compressed_gradients(setup_of, name, kind, compression):
    """(gradients by path, loss)"""
    case = (name, kind, compression.model_dump_json())
    if case not in _known:
        plan = PLANS[kind].model_copy(update={"compression": compression})
        _known[case] = gradients(laid_out(setup_of(name, 3, NONE), plan))[:2]
    return _known[case]


def distance(one, other):
    """Of all gradients together, relative."""
    gap = sum(np.sum((one[path] - other[path]) ** 2) for path in other)
    return (gap / sum(np.sum(leaf**2) for leaf in other.values())) ** 0.5


NEAR = [
    ("gpt-tied, no dropout", "data x tensor, ZeRO-3, recomputed", SOME, 0.3),
    ("gpt-tied, no dropout", "data x tensor, ZeRO-3", SOME, 0.3),
    ("bert", "pipeline x tensor", ALL, 0.03),
    ("gpt-untied", "several degrees", ALL, 0.03),
]


@pytest.mark.parametrize(
    ("name", "kind", "compression", "most"),
    quick_and_exhaustive(NEAR, NEAR[:1]),
)
def test_gradients_are_near_the_uncompressed_ones(setup_of, name, kind, compression, most):
    grads, loss = compressed_gradients(setup_of, name, kind, compression)
    expected, expected_loss, *_ = definition(setup_of, name, 3)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert 1e-4 < distance(grads, expected) < most


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["tensor 4, recomputed", "pipeline x tensor"])
def test_recomputation_and_pipelines_choose_the_same_tokens(setup_of, kind):
    """Another choice of tokens would be another loss."""
    grads, loss = compressed_gradients(setup_of, "bert, no dropout", "tensor 4", DROPS)
    again, same_loss = compressed_gradients(setup_of, "bert, no dropout", kind, DROPS)
    assert same_loss == pytest.approx(loss, rel=1e-4)
    assert distance(again, grads) < 0.02


@pytest.mark.exhaustive
def test_directions_can_be_switched_off(setup_of):
    expected, expected_loss, *_ = definition(setup_of, "gpt-untied", 3)
    forward = compressed_gradients(setup_of, "gpt-untied", "tensor 4", Compression(bits=4, backward=False))
    backward = compressed_gradients(setup_of, "gpt-untied", "tensor 4", Compression(bits=4, forward=False))
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "rest_bits"), [(4, 0), (4, 4), (8, 4)])  # the last in two steps
def test_a_causal_choice_knows_no_later_token(setup_of, ranks, rest_bits):
    """Logits stay what they are, bit for bit, when only later tokens change; by attention received they do not."""
    plan = piped([5], 1, tensor=ranks, batch=BATCH)
    compression = Compression(bits=8, tokens=0.5, rest_bits=rest_bits)
    assert gathers(ranks, compression) == (ranks == 4)
    setup = setup_of("gpt-tied", 3, NONE)
    moved = {}
    for importance in ("own", "attention"):
        changes = {"compression": compression.model_copy(update={"importance": importance})}
        other = laid_out(setup, plan.model_copy(update=changes))
        moved[importance] = leak(other, stored(other, random_params(setup)))
    assert moved["own"]["logits"] == 0 < moved["attention"]["logits"]
    assert moved["own"]["spread"] > 0


@pytest.mark.parametrize("causal", [True, False])
def test_all_ranks_choose_by_the_rule(causal):
    """By attention, summed over all heads, or by the residual row; `auto` looks ahead only where nothing is ahead."""
    ranks, keys = 2, jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.normal(key, (ranks, 2, 24, 3, 8)) for key in keys[:2])
    residual = jax.random.normal(keys[2], (2, 24, 16))

    def chosen(importance):
        compression = DROPS.model_copy(update={"importance": importance})
        hooks = compressed_hooks(("t",), ranks, compression, causal=causal)
        return np.asarray(on_ranks(ranks, lambda q, k: hooks.important(q, k, None, residual), q, k))

    own_sums, attention, auto = (chosen(importance) for importance in ("own", "attention", "auto"))
    count = tokens_of(DROPS, 24)
    heads = jnp.concatenate([*q], 2), jnp.concatenate([*k], 2)
    received = attention_importance(*heads, causal=causal, implementation="reference")
    assert np.array_equal(own_sums, [causal_choice(jnp.sum(residual**2, 2), count)] * ranks)
    assert np.array_equal(attention, [token_topk(received, count, implementation="reference")] * ranks)
    assert np.array_equal(auto, own_sums if causal else attention) and not np.array_equal(own_sums, attention)
