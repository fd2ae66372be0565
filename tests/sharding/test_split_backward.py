"""The backward pass in two: autodiff's together, the largest weight products later, and no more stored in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.sharding.layer_vjp import split_layer
from jhpt.sharding.recompute import save_named
from jhpt.sharding.split_backward import split_backward
from tests.sharding.plans import compiled
from tests.sharding.test_layer_vjp import LENGTH, WIDTH, block_of, inputs

WRAPPED = {"everything": lambda block: block, "named": save_named(NAMED_TENSORS)}
SHAPE = dict(vocab_size=200, num_layers=1, d_model=WIDTH, num_heads=4, max_length=8)
MODELS = {
    "gpt": GPTConfig(**SHAPE, dropout=0.1),
    "llama": GPTConfig(
        **SHAPE,
        d_ff=64,
        num_kv_heads=2,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=False,
    ),
    "bert": BERTConfig(**SHAPE, dropout=0.1),
}


def split(block, params, x, at):
    """(the layer, its backward pass in two)"""
    layer = split_layer(block, params, x, at)
    return layer, split_backward(layer, params, at)


def in_two(block, params, x, at, error):
    """(gradient of the parameters, gradient of x), the weight pass from what the backward pass leaves."""
    layer, parts = split(block, params, x, at)
    saved = layer.forward(params, x, at)[1]
    now, down, left = parts.backward(params, at, saved, error)
    later = parts.weights(params, at, tuple(left.get(place, tensor) for place, tensor in enumerate(saved)))
    nothing = lambda leaf: leaf is None  # noqa: E731
    both = jax.tree.map(lambda one, other: one if other is None else other, now, later, is_leaf=nothing)
    assert not any(map(nothing, jax.tree.leaves(both, is_leaf=nothing)))
    return both, down


def by_autodiff(block, params, x, at, error):
    return jax.vjp(lambda params, x: block(params, x, at), params, x)[1](error)


def same(actual, expected):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


def products(function, *arguments):
    """How many matrix products the function computes."""
    return str(jax.make_jaxpr(function)(*arguments)).count("= dot_general")


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_autodiffs(name, wrapped):
    """With dropout, which both passes draw alike."""
    block, params = block_of(MODELS[name])
    x, at = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)
    block = WRAPPED[wrapped](block)
    same(*compiled(lambda *given: (in_two(block, *given), by_autodiff(block, *given)), params, x, at, error))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_weight_products_come_later(name, dtype):
    """In places of what has been saved: only what has been read is replaced, and nothing is added."""
    block, params = block_of(MODELS[name], dtype)
    x, at = inputs(dtype=dtype)
    layer, parts = split(WRAPPED["named"](block), params, x, at)
    taken = [place for each in parts.left for place in each.places]
    assert len(taken) == len(set(taken)) and set(taken) <= set(range(len(layer.shapes)))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    late = {path for path, later in zip(paths, parts.late, strict=True) if later}
    assert {path.removesuffix("/kernel") for path in late if path.endswith("/kernel")} == {"mlp/up", "mlp/down"}
    saved = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in layer.shapes)
    both = (
        (layer.backward, params, at, saved, x),
        (parts.backward, params, at, saved, x),
        (parts.weights, params, at, saved),
    )
    whole, now, later = (products(*each) for each in both)
    assert (now, later) == (whole - 2, 2)


@pytest.mark.parametrize("name", MODELS)
def test_all_weights_wait_where_everything_is_saved(name):
    block, params = block_of(MODELS[name])
    layer, parts = split(block, params, *inputs())
    saved = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in layer.shapes)
    assert products(parts.weights, params, inputs()[1], saved) == 4


BLOCKS = {
    "weights that are scaled": lambda w, x, at: jnp.tanh(x @ (w * jnp.sum(w))),
    "a scan": lambda w, x, at: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.stack([w, 2 * w]))[0],
    "a called function": lambda w, x, at: jax.jit(lambda w, x: jnp.sin(x @ w))(w, jax.jit(jnp.sin)(x)) + x,
    "no weights": lambda w, x, at: jnp.sin(x) * 2,
    "weights that are used twice": jax.checkpoint(lambda w, x, at: jnp.sin(jnp.sin(x @ w) @ w)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_any_layer_can_be_split(name):
    w = jax.random.normal(jax.random.key(5), (WIDTH, WIDTH)) / WIDTH
    x, at = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)
    same(*compiled(lambda *given: (in_two(BLOCKS[name], *given), by_autodiff(BLOCKS[name], *given)), w, x, at, error))


def test_a_large_array_is_cut_and_a_small_one_padded():
    """Three arrays that are not read again make room for one that is a little smaller than all of them."""

    def block(w, x, at):
        q, k, v = jnp.split(jnp.sin(x), 3, axis=-1)
        return x * (jnp.concatenate([jnp.sin(q), k, v[..., :-1]], -1) @ w)

    x, at = inputs()
    w = jnp.ones((WIDTH - 1, WIDTH))
    _, parts = split(block, w, x, at)
    assert parts.late == (True,)
    same(*compiled(lambda *given: (in_two(block, *given), by_autodiff(block, *given)), w, x, at, jnp.cos(x)))
    assert sum(each.wasted for each in parts.left) < len(x) * LENGTH * WIDTH
