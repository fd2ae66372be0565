"""Activations, norms, and the products that make queries, keys and values, against their definitions and autodiff."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jhpt.models.activations import gelu, gelu_exact, swiglu
from jhpt.models.heads import AttentionInputs
from jhpt.models.hooks import Hooks
from jhpt.models.layers import norm
from jhpt.models.products import PRODUCTS

ACTIVATIONS = {
    "gelu": (gelu, lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2),
    "gelu_exact": (gelu_exact, lambda x: x * (1 + scipy.special.erf(x / 2**0.5)) / 2),
    "swiglu": (swiglu, lambda x: x[..., 0, :] * scipy.special.expit(x[..., 0, :]) * x[..., 1, :]),
}
"""(the function, its definition in float64)."""

NORMS = {
    "layernorm": nn.LayerNorm(epsilon=1e-5, use_fast_variance=False),
    "rmsnorm": nn.RMSNorm(epsilon=1e-5, use_fast_variance=False),
}


def numbers(*shape, dtype=jnp.float32, seed=0, size=1.0):
    return jnp.asarray(size * np.random.default_rng(seed).normal(size=shape), dtype)


def value_and_gradients(function, error, *inputs):
    def both(*inputs):
        y, pull = jax.vjp(function, *inputs)
        return y, *jax.tree.leaves(pull(error.astype(y.dtype)))

    return jax.jit(both)(*inputs)


def assert_close(actual, expected, tolerance):
    """Entry by entry, relative to the largest one."""
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(each, np.float64) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())


def slopes(definition, x, error, step=1e-6):
    """The gradient of sum(error * f(x)) by central differences; an entry of f depends on its own column of x only."""
    x, gradient = np.asarray(x, np.float64), np.zeros(x.shape)
    for half in range(x.shape[-2]):
        away = np.zeros(x.shape)
        away[..., half, :] = step
        slope = error * (definition(x + away) - definition(x - away)) / (2 * step)
        gradient[..., half, :] = slope if slope.ndim < x.ndim else slope[..., half, :]
    return gradient


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes(name):
    """Also far from zero, where a careless form would overflow."""
    function, definition = ACTIVATIONS[name]
    x = jnp.concatenate([numbers(7, 2, 24, size=3), jnp.full((1, 2, 24), 100.0), jnp.full((1, 2, 24), -100.0)])
    y = definition(np.asarray(x, np.float64))
    error = numbers(*y.shape, seed=1)
    assert_close(
        value_and_gradients(function, error, x), (y, slopes(definition, x, np.asarray(error, np.float64))), 2e-6
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_16_bits_are_rounded_once(name):
    """By 2^-8 at most; autodiff of bfloat16 rounds after every operation."""
    function, definition = ACTIVATIONS[name]
    x = numbers(64, 2, 24, dtype=jnp.bfloat16, size=2)
    exact = definition(np.asarray(x, np.float64))
    assert np.all(np.abs(np.asarray(function(x), np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-6)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_flax_norms(name, alone):
    """With float32, around a mean that is large beside the deviation."""
    x, error = 30 + numbers(3, 5, 16), numbers(3, 5, 16, seed=1)
    ours = norm(name, 1e-5, jnp.float32, "norm", Hooks(alone=alone))
    params = jax.tree.map(lambda leaf: leaf + numbers(*leaf.shape, seed=2), ours.init(jax.random.key(0), x))
    assert jax.tree.structure(params) == jax.tree.structure(NORMS[name].init(jax.random.key(0), x))
    both = [
        value_and_gradients(lambda params, x, of=of: of.apply(params, x), error, params, x)
        for of in (ours, NORMS[name])
    ]
    assert_close(*both, 1e-4)


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_16_bits_compute_in_float32(name):
    x, error = numbers(3, 5, 64, dtype=jnp.bfloat16), numbers(3, 5, 64, seed=1, dtype=jnp.bfloat16)
    params = norm(name, 1e-5, jnp.bfloat16, "norm").init(jax.random.key(0), x)
    run = lambda dtype: value_and_gradients(  # noqa: E731
        lambda params, x: norm(name, 1e-5, dtype, "norm").apply(params, x), error, params, x.astype(dtype)
    )
    few, many = run(jnp.bfloat16), run(jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    assert few[0].dtype == few[-1].dtype == jnp.bfloat16
    assert_close(few, many, 2.0**-8)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("kv_heads", "group"), [(4, 1), (2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_are_those_of_one_product(kind, kv_heads, group, bias):
    """With 8 bits each part has a scale of its own, a power of two, which changes no digit here."""
    features, x = (kv_heads, group + 2, 6), numbers(2, 5, 16)
    inputs = AttentionInputs(features, jnp.float32, bias, 1.0, PRODUCTS[kind], apart=True)
    params = inputs.init(jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: leaf + numbers(*leaf.shape, seed=2, size=0.1), params)

    def of_one_product(params, x):
        y = PRODUCTS[kind](x, params["params"]["kernel"])
        y = y + params["params"]["bias"] if bias else y
        return y[..., :group, :], y[..., group, :], y[..., group + 1, :]

    errors = [numbers(*part.shape, seed=3 + at) for at, part in enumerate(jax.eval_shape(inputs.apply, params, x))]

    def gradients(function):
        y, pull = jax.vjp(function, params, x)
        return *y, *jax.tree.leaves(pull(tuple(errors)))

    with jax.numpy_rank_promotion("allow"):
        assert_close(
            jax.jit(gradients, static_argnums=0)(inputs.apply),
            jax.jit(gradients, static_argnums=0)(of_one_product),
            1e-5,
        )


@pytest.mark.parametrize("kind", PRODUCTS)
def test_gradients_of_a_product_are_autodiff(kind):
    product, x, kernel, error = (
        PRODUCTS[kind],
        numbers(2, 5, 16),
        numbers(16, 3, 4, seed=1),
        numbers(2, 5, 3, 4, seed=2),
    )
    for one, other in zip(product.gradients(x, kernel, error), jax.vjp(product, x, kernel)[1](error), strict=True):
        np.testing.assert_array_equal(one, other)
