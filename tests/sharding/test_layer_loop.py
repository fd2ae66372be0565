"""The layer loop: whichever way it runs, fetches and finishes, it is autodiff of one layer after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jhpt.sharding.layer_loop import LayerLoop
from jhpt.sharding.model_parts import Halves
from jhpt.sharding.ordering import ORDERING_TOKEN, depend_on
from jhpt.sharding.recompute import everything, save_named, save_nothing
from jhpt.sharding.sample_chunks import ChunkedSamples, UnchunkedSamples
from tests.covers import pairwise, quick_and_exhaustive

ROWS, LENGTH, WIDTH = 5, 3, 4
COUNT, FIRST = 3, 2
WRAPPED = {"everything": everything, "named": save_named(("inside", ORDERING_TOKEN)), "input": save_nothing}
WAYS = {
    "unrolled": dict(unroll=True),
    "unrolled, kept": dict(unroll=True, keep_fetched=True),
    "loop": dict(unroll=False),
    "ahead": dict(unroll=False, prefetch=1),
    "two ahead": dict(unroll=False, prefetch=2),
    "further ahead than there are layers": dict(unroll=False, prefetch=COUNT + 1),
    "late": dict(unroll=False, finish_late=True),
    "ahead, late, kept": dict(unroll=False, prefetch=1, finish_late=True, keep_fetched=True),
}


class Parted(NamedTuple):
    """What is left to do of half a layer, whole numbers among it."""

    x: jax.Array
    part: jax.Array
    bias: jax.Array
    shift: jax.Array


def first(params, x, at, ticket):
    """A product alone."""
    part = checkpoint_name(depend_on(x, ticket) @ params["w"], "inside")
    return Parted(x, part, params["b"], jnp.argmax(x, -1, keepdims=True))


def finish(parted, at):
    """x + dropout(tanh(x w + b)) / (1 + the position of the largest x), with a mask for every row and layer."""
    keys, layer = at
    inside = jnp.tanh(parted.part + jnp.broadcast_to(parted.bias, parted.part.shape)) / (1.0 + parted.shift)
    saved = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 0.7, inside.shape[1:]))(keys)
    return parted.x + jnp.where(saved, inside, 0.0)


HALVES = Halves(
    first=first,
    second=lambda params, parted, at, ticket: first(params, finish(parted, at), at, ticket),
    finish=finish,
)
block = HALVES.block

STREAMS = {
    "whole": UnchunkedSamples(block),
    **{f"{n} chunks": ChunkedSamples(halves=HALVES, chunks=n) for n in (1, 2, 9)},
    "3 in turn": ChunkedSamples(halves=HALVES, chunks=3, in_turn=True),
}


def stack():
    """[COUNT, ...] parameters."""
    rng = np.random.default_rng(0)
    shapes = {"w": (COUNT, WIDTH, WIDTH), "b": (COUNT, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def inputs():
    """(x, keys, error)"""
    x, error = (jax.random.normal(jax.random.key(seed), (ROWS, LENGTH, WIDTH)) for seed in (1, 4))
    return x, jax.random.split(jax.random.key(2), ROWS), error


def doubled(stored):
    """Parameters are stored as halves."""
    return jax.tree.map(lambda leaf: 2 * leaf, stored)


def thirds(gradient, total, beside):
    """Gradients are stored as thirds."""
    third = jax.tree.map(lambda leaf: leaf / 3, gradient)
    return third if total is None else jax.tree.map(jnp.add, third, total)


def in_order(params, x, keys):
    """Layers FIRST, FIRST + 1, ..."""
    for at in range(COUNT):
        x = block(jax.tree.map(lambda leaf, at=at: leaf[at], params), x, (keys, jnp.int32(FIRST + at)))
    return x


LOOPS = pairwise(tuple(WAYS), tuple(WRAPPED), tuple(STREAMS), (False, True))


@pytest.mark.parametrize(("way", "wrapped", "stream", "adds"), quick_and_exhaustive(LOOPS, LOOPS[1::3]))
def test_a_loop_is_autodiff_of_its_layers(way, wrapped, stream, adds):
    """Of stored parameters: halves are doubled on the way in, gradients divided by three on the way out, and added to
    what earlier micro-batches left."""
    params, (x, keys, error) = stack(), inputs()
    settings = WAYS[way] | {"stream": STREAMS[stream], "recompute": WRAPPED[wrapped]}
    loop = LayerLoop(first=FIRST, count=COUNT, fetch=doubled, finish=thirds, **settings)
    halves = jax.tree.map(lambda leaf: leaf / 2, params)
    total = jax.tree.map(jnp.ones_like, params) if adds else None

    @jax.jit
    def both(halves, x, keys, error, total):
        y, passed = loop.forward(halves, x, keys)
        if not loop.keep_fetched:
            return y, *loop.backward(halves, passed, error, total), params
        return y, *loop.with_fetched().backward(passed.fetched, passed, error, total), passed.fetched

    y, pull = jax.vjp(lambda params, x: in_order(params, x, keys), params, x)
    gradient, down = pull(error)
    gradient = jax.tree.map(lambda leaf: leaf / 3 + adds, gradient)
    actual = both(halves, x, keys, error, total)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves((y, gradient, down, params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_layers_draw_by_their_number_in_the_model():
    """The same layers elsewhere lose something else."""
    loops = [
        LayerLoop(stream=UnchunkedSamples(block), first=first, count=COUNT, unroll=False, fetch=doubled, finish=thirds)
        for first in (0, 0, FIRST)
    ]
    x, keys, _ = inputs()
    first, again, elsewhere = (jax.jit(lambda *a, loop=loop: loop.forward(*a)[0])(stack(), x, keys) for loop in loops)
    np.testing.assert_array_equal(first, again)
    assert np.any(first != elsewhere)


@pytest.mark.parametrize(("ahead", "order"), [(0, [0, 1, 2, 2, 1, 0]), (1, [0, 1, 2, 2, 1, 0, 0])])
def test_nothing_is_fetched_twice_on_one_way(ahead, order):
    """Ahead, the last fetch of the forward pass is the first of the backward pass; the very last one is not used."""
    fetched = []

    def noted(stored):
        jax.debug.callback(lambda at: fetched.append(int(at)), stored["at"], ordered=True)
        return stored["w"]

    loop = LayerLoop(
        stream=UnchunkedSamples(lambda w, x, at: x * w),
        first=0,
        count=COUNT,
        unroll=False,
        fetch=noted,
        finish=lambda gradient, total, beside: gradient,
        prefetch=ahead,
    )
    params = {"w": jnp.arange(1.0, COUNT + 1), "at": jnp.arange(COUNT)}

    @jax.jit
    def both(params, x, keys):
        y, passed = loop.forward(params, x, keys)
        return y, *loop.backward(params, passed, jnp.ones_like(x))

    x, keys, _ = inputs()
    y, gradient, down = both(params, x, keys)
    jax.effects_barrier()
    assert fetched == order
    np.testing.assert_allclose(y, 6 * x, rtol=1e-6)
    np.testing.assert_allclose(down, jnp.full_like(x, 6), rtol=1e-6)
    np.testing.assert_allclose(gradient, 6 * jnp.sum(x) / params["w"], rtol=1e-4)
