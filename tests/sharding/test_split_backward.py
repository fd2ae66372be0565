"""The backward pass in two: autodiff's together, with weight products in the later one, and little more is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.sharding.layer_vjp import split_layer
from jhpt.sharding.split_backward import split_backward
from tests.sharding.plans import compiled
from tests.sharding.test_layer_vjp import LENGTH, MODELS, WIDTH, inputs, layer_of


def split(block, params, x, at):
    """(the layer, its backward pass in two)"""
    layer = split_layer(block, params, x, at)
    return layer, split_backward(layer, params, at)


def in_two(block, params, x, at, error):
    """(gradient of the parameters, gradient of x), the first from what the pass for the second leaves."""
    layer, parts = split(block, params, x, at)
    saved = layer.forward(params, x, at)[1]
    stored = dict(enumerate(saved)) | {
        place: jnp.zeros(shape.shape, shape.dtype) for place, shape in enumerate(parts.stored) if place >= len(saved)
    }
    down, left = parts.backward(params, at, saved, error)
    stored |= left
    return parts.weights(params, at, tuple(stored[place] for place in range(len(stored)))), down


def by_autodiff(block, params, x, at, error):
    return jax.vjp(lambda params, x: block(params, x, at), params, x)[1](error)


def same(actual, expected):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


def products(function, *arguments):
    """How many matrix products the function computes."""
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_autodiffs(name):
    """With dropout, which both passes draw alike."""
    block, params = layer_of(name)
    x, at = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)
    both = compiled(lambda *given: (in_two(block, *given), by_autodiff(block, *given)), params, x, at, error)
    same(*both)


@pytest.mark.parametrize("name", MODELS)
def test_weight_products_come_later(name):
    """One of each matrix: two in attention, two after it; the backward pass has as many, and four of attention."""
    block, params = layer_of(name)
    x, at = inputs()
    layer, parts = split(block, params, x, at)
    stored = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in parts.stored)
    assert products(parts.weights, params, at, stored) == 4
    assert products(parts.backward, params, at, stored[: len(layer.shapes)], x) == 8


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_lies_where_nothing_is_read_again(name):
    """At most 2 % more than the saved activations, a few sums over rows."""
    block, params = layer_of(name)
    layer, parts = split(block, params, *inputs(rows=4))
    taken = [place for each in parts.left for place in each.places]
    assert len(taken) == len(set(taken))
    assert parts.stored[: len(layer.shapes)] == layer.shapes
    saved, stored = (
        sum(shape.size * shape.dtype.itemsize for shape in shapes) for shapes in (layer.shapes, parts.stored)
    )
    assert saved <= stored <= 1.02 * saved


BLOCKS = {
    "weights that are scaled": lambda w, x, at: jnp.tanh(x @ (w * jnp.sum(w))),
    "a loop": lambda w, x, at: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x, unroll=False),
    "a scan": lambda w, x, at: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.stack([w, 2 * w]))[0],
    "a called function": lambda w, x, at: jax.jit(lambda w, x: jnp.sin(x @ w))(w, jax.jit(jnp.sin)(x)) + x,
    "no weights": lambda w, x, at: jnp.sin(x) * 2,
    "recomputation": jax.checkpoint(lambda w, x, at: jnp.sin(jnp.sin(x @ w) @ w)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_any_layer_can_be_split(name):
    w = jax.random.normal(jax.random.key(5), (WIDTH, WIDTH)) / WIDTH
    x, at = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)
    same(*compiled(lambda *given: (in_two(BLOCKS[name], *given), by_autodiff(BLOCKS[name], *given)), w, x, at, error))


def test_a_gradient_of_queries_keys_and_values_is_cut_into_theirs():
    """Three arrays that are not read again make room for one that is three times as large."""

    def block(w, x, at):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return jnp.sin(q) * jnp.sin(k) * jnp.sin(v)

    x, at = inputs()
    layer, parts = split(block, jnp.ones((WIDTH, 3 * WIDTH)), x, at)
    (left,) = parts.left
    assert left.shape == (len(x), LENGTH, 3 * WIDTH)
    assert len(left.places) > 1 and parts.stored == layer.shapes
