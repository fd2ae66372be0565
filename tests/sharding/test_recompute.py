"""What of a block is kept, and where: by name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import split_layer
from jhpt.sharding.recompute import save_named
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import compiled
from tests.sharding.test_layer_vjp import MODELS, inputs, layer_of

PLACES = ("device", "host", "nowhere")
DRAWS = list(itertools.product(MODELS, range(4)))


def read_by_backward(name):
    """Of a residual sum nothing is kept; after BERT's last one comes a norm."""
    return NAMED_TENSORS if name == "bert" else NAMED_TENSORS[:-1]


def wrapped(name, places):
    """(the block, its parameters); places: of the named tensors."""
    block, params = layer_of(name)
    at = {place: [tensor for tensor, chosen in places.items() if chosen == place] for place in PLACES}
    return save_named(at["device"], at["host"])(block), block, params


def drawn(name, seed):
    rng = np.random.default_rng(seed)
    return {tensor: PLACES[int(rng.integers(3))] for tensor in read_by_backward(name)}


def sizes(shapes):
    """(where, size) of all, ascending."""
    return sorted((str(shape.memory_space), shape.size) for shape in shapes)


@pytest.mark.parametrize(("name", "seed"), quick_and_exhaustive(DRAWS, DRAWS[::5]))
def test_what_is_named_is_kept_where_it_is_to_be(name, seed):
    """That, and the block's input, whether it is named or not."""
    places = drawn(name, seed)
    some, _, params = wrapped(name, places)
    every, _, _ = wrapped(name, dict.fromkeys(places, "device"))
    x, at = inputs()
    whole = split_layer(every, params, x, at).shapes
    each = {}
    for tensor in places:
        alone, _, _ = wrapped(name, {tensor: "device", "residual_in": "device"})
        counts = [shape.size for shape in split_layer(alone, params, x, at).shapes]
        each[tensor] = sum(counts) - x.size if tensor != "residual_in" else x.size
    assert sum(each.values()) == sum(shape.size for shape in whole)
    spaces = {"device": stacks.DEVICE, "host": stacks.HOST}
    expected = [
        (str(spaces[place]), each[tensor])
        for tensor, place in (places | {"residual_in": places["residual_in"].replace("nowhere", "device")}).items()
        if place in spaces
    ]
    assert sizes(split_layer(some, params, x, at).shapes) == sorted(expected)


@pytest.mark.parametrize(("name", "seed"), quick_and_exhaustive(DRAWS, DRAWS[::4]))
def test_gradients_are_the_same(name, seed):
    """To 1e-6 of the largest entry, whatever is kept wherever."""
    some, plain, params = wrapped(name, drawn(name, seed))
    x, at = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)

    def both(params, x, at, error):
        split = split_layer(some, params, x, at)
        y, saved = split.forward(params, x, at)
        expected, pull = jax.vjp(lambda params, x: plain(params, x, at), params, x)
        return (y, *split.backward(params, at, saved, error)), (expected, *pull(error))

    actual, expected = compiled(both, params, x, at, error)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_stacks_lie_where_their_rows_do():
    """Rows are written into, and read from, stacks with two indices, in a loop, on the device and on the host."""
    here, there = jnp.arange(3.0), jnp.arange(4.0, dtype=jnp.bfloat16)

    @jax.jit
    def there_and_back():
        rows = here, jax.device_put(there, stacks.HOST)
        stacked = stacks.filled(jax.tree.map(jax.typeof, rows), (2, 5), jnp.float32(7))

        def write(at, stacked):
            numbers = here + at, jax.device_put(there + at.astype(there.dtype), stacks.HOST)
            return stacks.write(stacked, (1, at), numbers)

        stacked = jax.lax.fori_loop(1, 5, write, stacked)
        return stacked, stacks.read(stacked, (1, jnp.int32(4)))

    stacked, (first, second) = there_and_back()
    kinds = [leaf.sharding.memory_kind for leaf in (*stacked, first, second)]
    assert kinds == ["device", "pinned_host", "device", "pinned_host"]
    np.testing.assert_array_equal(first, here + 4)
    np.testing.assert_array_equal(second, there + 4)
    np.testing.assert_array_equal(stacked[0][0], 7.0)
    np.testing.assert_array_equal(np.asarray(stacked[1], np.float32)[1, 1:, 0], [1, 2, 3, 4])
