"""The references are what their docstrings say, against definitions in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.kernels.attention_importance import attention_importance, specs
from jhpt.kernels.gelu_backward import gelu_backward
from jhpt.kernels.gelu_backward import specs as gelu_specs
from jhpt.kernels.order import ordered
from jhpt.kernels.token_topk import token_topk
from jhpt.kernels.topk_sparsify import topk_sparsify
from jhpt.kernels.topk_sparsify.reference import spread

REFERENCE = {"implementation": "reference"}
sparsified = jax.jit(partial(topk_sparsify, **REFERENCE), static_argnames=("keep", "block"))


# Tokens.

taken = jax.jit(partial(token_topk, **REFERENCE), static_argnums=1)


@given(st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_largest_are_taken_and_lower_positions_first(data):
    """Of few lengths: a program each."""
    length, k = data.draw(st.sampled_from(((1, 0), (1, 1), (12, 1), (12, 5), (12, 12))))
    some = st.sampled_from((-np.inf, -1.0, -0.0, 0.0, 0.5, 2.0, np.inf, np.nan))
    scores = data.draw(st.lists(some, min_size=length, max_size=length))
    choice = taken(jnp.array([scores], jnp.float32), k)[0].tolist()
    key = lambda at: (-np.inf if np.isnan(scores[at]) else -scores[at], not np.isnan(scores[at]), at)  # noqa: E731
    assert choice == sorted(sorted(range(len(scores)), key=key)[:k])


def test_order_is_that_of_the_floats():
    x = np.array([-np.inf, -3e38, -1.0, -1e-38, 0.0, 1e-38, 1.0, 3e38, np.inf, np.nan], np.float32)
    assert np.all(np.diff(np.asarray(ordered(jnp.asarray(x)), np.int64)) > 0)
    assert ordered(jnp.float32(-0.0)) == ordered(jnp.float32(0.0))
    assert ordered(jnp.float32(-np.nan)) == ordered(jnp.float32(np.nan))


def test_scores_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        token_topk(jnp.zeros((1, 4), jnp.bfloat16), 1, **REFERENCE)
    with pytest.raises(ValueError, match="k=5 of 4"):
        token_topk(jnp.zeros((1, 4)), 5, **REFERENCE)


# Attention.


def received(q, k, *, causal, lengths, stride):
    """Written down with a matrix of all scores, in float64."""
    batch, length, heads, width = q.shape
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64).repeat(heads // k.shape[2], 2)
    total = np.zeros((batch, length))
    for b in range(batch):
        real = length if lengths is None else int(lengths[b])
        viewers = np.zeros(length)
        for i in range(stride - 1, length, stride):
            if i >= real:
                continue
            seen = [j for j in range(real) if not causal or j <= i]
            viewers[seen] += 1
            for h in range(heads):
                scores = np.exp(k[b, seen, h] @ q[b, i, h] / width**0.5)
                total[b, seen] += scores / scores.sum()
        if causal:
            total[b] /= np.maximum(viewers, 1)
    return total


@pytest.mark.parametrize("spec", specs.TESTED, ids=str)
def test_importance_is_the_sum_of_attention(spec):
    q, k, lengths = specs.arguments(spec, jax.random.key(0))
    options = {"causal": spec.causal, "lengths": lengths, "stride": spec.stride}
    expected = received(q, k, **options)
    actual = np.asarray(attention_importance(q, k, **options, **REFERENCE))
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_importance_holds_no_square_and_passes_no_gradient():
    q = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    run = lambda q, k: attention_importance(q, k, causal=True, **REFERENCE)  # noqa: E731
    memory = jax.jit(run).lower(q, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 4096 * 4 / 4
    x = jax.random.normal(jax.random.key(0), (1, 16, 1, 8))
    assert not jnp.any(jax.grad(lambda x: jnp.sum(run(x, x)))(x))


# Gradients.


@given(
    st.integers(1, 700),
    st.sampled_from((64, 128, 256)),
    st.integers(1, 64),
    st.sampled_from(("float32", "bfloat16")),
    st.integers(0, 9),
)
@settings(max_examples=24, deadline=None, derandomize=True)
@pytest.mark.exhaustive
def test_what_is_not_sent_is_kept(size, block, keep, dtype, seed):
    check_sparsified(size, block, keep, dtype, seed)


@pytest.mark.parametrize(
    ("size", "block", "keep", "dtype"),
    [(1, 128, 1, "float32"), (300, 128, 17, "bfloat16"), (512, 256, 64, "bfloat16"), (130, 64, 64, "float32")],
)
def test_what_is_not_sent_of_some_sizes_is_kept(size, block, keep, dtype):
    for seed in range(3):
        check_sparsified(size, block, keep, dtype, seed)


def check_sparsified(size, block, keep, dtype, seed):
    of_gradient, of_residual = jax.random.split(jax.random.key(seed))
    gradient = jax.random.normal(of_gradient, (size,)).astype(dtype)
    residual = jax.random.normal(of_residual, (size,))
    sent = sparsified(gradient, residual, keep=keep, block=block)
    whole = np.zeros(-(-size // block) * block, np.float32)
    whole[:size] = np.asarray(gradient, np.float32) + np.asarray(residual)
    blocks = whole.reshape(-1, block)
    assert sent.positions.dtype == jnp.uint16 and sent.values.dtype == jnp.bfloat16
    for row, positions, values in zip(blocks, np.asarray(sent.positions), np.asarray(sent.values), strict=True):
        assert positions.tolist() == sorted(sorted(range(block), key=lambda at: (-abs(row[at]), at))[:keep])
        assert np.array_equal(values, row[positions].astype(values.dtype))
    arrived = np.asarray(spread(sent.values, sent.positions, block)).ravel()[:size]
    assert np.allclose(arrived + np.asarray(sent.residual), whole[:size], rtol=0, atol=1e-7)


def test_what_is_left_over_is_sent_in_the_end():
    """Error feedback: whatever the gradient, in time all of it arrives."""
    gradient = jax.random.normal(jax.random.key(0), (512,))
    residual, arrived = jnp.zeros(512), np.zeros(512)
    for step in range(400):
        sent = sparsified(gradient if step == 0 else jnp.zeros(512), residual, keep=4, block=128)
        residual = sent.residual
        arrived += np.asarray(spread(sent.values, sent.positions, 128)).ravel()
    assert np.allclose(arrived, gradient, atol=1e-4)


def test_not_a_number_is_sent_first():
    sent = sparsified(jnp.ones(128).at[77].set(jnp.nan), jnp.zeros(128), keep=1, block=128)
    assert sent.positions[0, 0] == 77 and jnp.isnan(sent.values[0, 0])


def test_buckets_are_refused():
    with pytest.raises(ValueError, match="keep=9"):
        topk_sparsify(jnp.zeros(8), jnp.zeros(8), keep=9, block=8, **REFERENCE)
    with pytest.raises(ValueError, match="must have one shape"):
        topk_sparsify(jnp.zeros((2, 4)), jnp.zeros((2, 4)), keep=1, **REFERENCE)


# GELU.

backward = jax.jit(partial(gelu_backward, **REFERENCE))


def within_rounding(found, x, error):
    """Every number is the exact one, rounded once; sums are exact to the digits of float32."""
    x, error = np.asarray(x, np.float64), np.asarray(error, np.float64)
    near = np.clip(x, -40, 40)  # where tanh is 1, its slope is nothing
    u = (2 / np.pi) ** 0.5 * (near + 0.044715 * near**3)
    value = x * (1 + np.tanh(u)) / 2
    slope = (1 + np.tanh(u)) / 2 + near / 2 / np.cosh(u) ** 2 * (2 / np.pi) ** 0.5 * (1 + 3 * 0.044715 * near**2)
    below = error * slope
    half = 2.0**-8 if found.value.dtype == jnp.bfloat16 else 2.0**-24
    for actual, exact in ((found.value, value), (found.error, below)):
        np.testing.assert_array_less(
            np.abs(np.asarray(actual, np.float64) - exact), (half + 2e-6) * np.abs(exact) + 1e-6 * np.abs(x).clip(1)
        )
    np.testing.assert_array_less(np.abs(np.asarray(found.total) - below.sum(0)), 1e-5 * np.abs(below).sum(0) + 1e-6)


@pytest.mark.parametrize("spec", gelu_specs.TESTED, ids=str)
def test_gelu_backward_is_its_formula(spec):
    x, error = gelu_specs.arguments(spec, jax.random.key(2))
    within_rounding(backward(x, error), x, error)


def test_gelu_backward_is_the_derivative():
    x, error = gelu_specs.arguments(gelu_specs.Spec(8, 64, "float32"), jax.random.key(3))
    value, pull = jax.vjp(partial(jax.nn.gelu, approximate=True), x)
    actual = backward(x, error)
    np.testing.assert_allclose(actual.value, value, atol=1e-5)
    np.testing.assert_allclose(actual.error, pull(error)[0], atol=1e-5)


def test_gelu_backward_refuses_unlike_arguments():
    with pytest.raises(ValueError, match="must be alike"):
        gelu_backward(jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.bfloat16), **REFERENCE)
