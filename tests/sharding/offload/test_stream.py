"""Layers that come from the host and go there are the layers of a plain loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jhpt.sharding.layer_loop import LayerLoop
from jhpt.sharding.offload.buckets import bucket_of
from jhpt.sharding.offload.stream import GRADIENT, RESIDENT, WEIGHTS, Layer, StreamedLoop, Transfers, over_layers
from jhpt.sharding.recompute import everything, save_named, save_nothing
from jhpt.sharding.sample_chunks import UnchunkedSamples
from tests.covers import pairwise, quick_and_exhaustive
from tests.sharding.test_layer_loop import COUNT, FIRST, block, inputs, stack

AHEAD = (0, 1, 2, COUNT + 1)


def on_host(tree):
    """Leaves in pinned memory."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return jax.device_put(tree, NamedSharding(mesh, P(), memory_kind="pinned_host"))


def left(_, gradient, squares):
    """A layer's gradient goes to the host; the sum of all squares."""
    return squares + jnp.sum(jnp.square(gradient)), {GRADIENT: gradient}


ZERO = jnp.float32(0)


ORDERS = list(itertools.product(AHEAD, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(
    ("ahead", "reverse", "late", "apart"),
    quick_and_exhaustive(ORDERS, pairwise(AHEAD, (False, True), (False, True), (False, True))),
)
def test_rows_come_and_go_in_order(ahead, reverse, late, apart):
    """What is read is what lay there before the pass; what is written lies there after it, and nowhere else."""
    a, b, c = (np.random.default_rng(seed).normal(size=(COUNT, 4)).astype(np.float32) for seed in range(3))

    def computed(layer, rows, carry):
        total = carry * 2 + rows["a"].sum() + layer
        return total, {"b": rows["a"] * total, "a": rows["a"] + 1}

    def first(layer, rows, carry):
        if late:
            return carry, rows, {}
        total, done = computed(layer, rows, carry)
        return total, None, done

    def second(layer, rows, carry, soon):
        assert not soon
        return computed(layer, rows, carry) if late else (carry, {})

    made = Layer(first=first, second=second, ordered=apart)

    def run(offloaded):
        return over_layers(
            offloaded,
            made,
            jnp.float32(1),
            Transfers(reads=("a",), writes=("a", "b"), reverse=reverse, prefetch=ahead, write_late=late),
        )

    actual, offloaded = jax.jit(run, donate_argnums=0)(on_host({"a": a, "b": b, "c": c}))
    assert {leaf.sharding.memory_kind for leaf in offloaded.values()} == {"pinned_host"}
    total, written = np.float32(1), np.zeros_like(b)
    for layer in range(COUNT)[:: -1 if reverse else 1]:
        total = total * 2 + a[layer].sum() + layer
        written[layer] = a[layer] * total
    assert np.allclose(actual, total, rtol=1e-6)
    assert np.array_equal(offloaded["a"], a + 1) and np.allclose(offloaded["b"], written, rtol=1e-5)
    assert np.array_equal(offloaded["c"], c)


def streamed_loop(ahead, wrap):
    params = stack()
    bucket = bucket_of(jax.tree.map(lambda leaf: leaf[0], params), lambda path: path == "w")
    rows = jnp.stack([bucket.packed(jax.tree.map(lambda leaf, at=at: leaf[at], params)) for at in range(COUNT)])
    return StreamedLoop(function=wrap(block), bucket=bucket, first=FIRST, prefetch=ahead), rows


def cut(tree, pieces):
    """Rows as so many micro-batches."""
    return jax.tree.map(lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), tree)


def whole(tree):
    """`cut` backwards."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


WRAPS = {"everything": everything, "input": save_nothing, "on the host": save_named((), ("inside",))}
PASSES = [(*at, name) for at in ((0, 1), (1, 5), (2, 1), (COUNT + 1, 5)) for name in WRAPS]


@pytest.mark.parametrize(("ahead", "pieces", "saved"), quick_and_exhaustive(PASSES, PASSES[::4]))
def test_a_pass_is_that_of_a_plain_loop(ahead, pieces, saved):
    """In micro-batches of any number."""
    wrap = WRAPS[saved]
    params, (x, keys, error) = stack(), inputs()
    plain = LayerLoop(
        stream=UnchunkedSamples(wrap(block)),
        first=FIRST,
        count=COUNT,
        unroll=False,
        fetch=lambda params: params,
        finish=lambda gradient, total, beside: gradient,
    )

    def expected(params, x, keys, error):
        y, passed = plain.forward(params, x, keys)
        return y, *plain.backward(params, passed, error)

    loop, rows = streamed_loop(ahead, wrap)

    def run(offloaded, x, keys, error):
        y, passed, offloaded = loop.forward(offloaded, cut(x, pieces), cut(keys, pieces))
        down, squares, offloaded = loop.backward(offloaded, passed, cut(error, pieces), left, ZERO)
        through = loop.through(offloaded, cut(x, pieces), cut(keys, pieces))
        return whole(y), whole(down), squares, offloaded, whole(through)

    y, gradients, down = jax.jit(expected)(params, x, keys, error)
    offloaded = on_host({WEIGHTS: rows, GRADIENT: jnp.full_like(rows, jnp.nan)})
    own_y, own_down, squares, offloaded, through = jax.jit(run, donate_argnums=0)(offloaded, x, keys, error)
    assert np.allclose(through, y, rtol=1e-6, atol=1e-6) and np.allclose(own_y, y, rtol=1e-6, atol=1e-6)
    assert np.allclose(own_down, down, rtol=1e-5, atol=1e-6)
    assert np.array_equal(offloaded[WEIGHTS], rows)
    size = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients))
    assert float(squares) == pytest.approx(size, rel=1e-5)
    for at in range(COUNT):
        leaves = loop.bucket.unpacked(jnp.asarray(np.asarray(offloaded[GRADIENT][at])))
        for name, leaf in leaves.items():
            assert np.abs(leaf - gradients[name][at]).max() <= 1e-6 * np.abs(gradients[name]).max()


def test_an_update_before_the_forward_pass_is_used_and_kept():
    """The step that the last gradient asks for, applied to a layer when it is fetched."""
    x, keys, _ = inputs()
    loop, rows = streamed_loop(1, everything)
    gradient = jax.random.normal(jax.random.key(7), rows.shape)

    def update(rows):
        return {**rows, WEIGHTS: rows[WEIGHTS] - 0.1 * rows[GRADIENT]}

    def run(offloaded, x, keys):
        y, _, offloaded = loop.forward(offloaded, x[None], keys[None], update, (WEIGHTS, GRADIENT), (WEIGHTS,))
        return y, offloaded

    def plain(offloaded, x, keys):
        return loop.forward(offloaded, x[None], keys[None])[0]

    y, offloaded = jax.jit(run)(on_host({WEIGHTS: rows, GRADIENT: gradient}), x, keys)
    assert np.allclose(offloaded[WEIGHTS], rows - 0.1 * gradient, rtol=1e-6)
    assert np.allclose(jax.jit(plain)(offloaded, x, keys), y, rtol=1e-6)


def test_what_is_resident_and_what_is_streamed_give_the_same_bits():
    """The same pass over rows on the device."""
    x, keys, error = inputs()
    loop, rows = streamed_loop(1, everything)

    def run(offloaded, x, keys, error):
        y, passed, offloaded = loop.forward(offloaded, x[None], keys[None])
        return y, *loop.backward(offloaded, passed, error[None], left, ZERO)

    offloaded = {WEIGHTS: rows, GRADIENT: jnp.zeros_like(rows)}
    one, other = (jax.tree.leaves(jax.jit(run)(each, x, keys, error)) for each in (on_host(offloaded), offloaded))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ahead", AHEAD)
def test_what_is_needed_last_comes_as_it_lay_there(ahead, late):
    """Rows that an iteration fetches for its second half, and changes."""
    a, m = (np.random.default_rng(seed).normal(size=(COUNT, 4)).astype(np.float32) for seed in range(2))

    def second(layer, rows, carry, soon):
        done = {"m": soon["m"] * 2 + rows["a"]} if late else {}
        return carry + soon["m"].sum(), done

    made = Layer(
        first=lambda layer, rows, carry: (carry, rows, {} if late else {"m": rows["a"]}), second=second, ordered=True
    )

    def run(offloaded):
        transfers = Transfers(
            reads=("a",), writes=("m",), late_reads=("m",), reverse=True, prefetch=ahead, write_late=late
        )
        return over_layers(offloaded, made, jnp.float32(0), transfers)

    actual, offloaded = jax.jit(run, donate_argnums=0)(on_host({"a": a, "m": m}))
    assert np.array_equal(offloaded["m"], m * 2 + a if late else a) and np.array_equal(offloaded["a"], a)
    assert np.allclose(actual, (m if late else a).sum(), rtol=1e-5)


LEAVING = list(itertools.product((0, 1, 2), (0, 2), (1, 5)))


@pytest.mark.parametrize(("ahead", "resident", "pieces"), quick_and_exhaustive(LEAVING, LEAVING[1::5]))
def test_a_layer_that_leaves_changed_is_one_that_is_changed_afterwards(ahead, resident, pieces):
    """The step is taken in the backward pass, with rows that come for it; whatever stays on the device."""
    x, keys, error = inputs()
    loop, rows = streamed_loop(ahead, save_nothing)
    momentum = jax.random.normal(jax.random.key(9), rows.shape)

    def leave(rows, gradient, count):
        momentum = 0.9 * rows["momentum"] + gradient
        return count + 1, {WEIGHTS: rows[WEIGHTS] - 0.1 * momentum, "momentum": momentum}

    def plain(offloaded, x, keys, error):
        _, passed, offloaded = loop.forward(offloaded, x[None], keys[None])
        return loop.backward(offloaded, passed, error[None], left, ZERO)[2][GRADIENT]

    def run(offloaded, x, keys, error):
        _, passed, offloaded = loop.forward(offloaded, cut(x, pieces), cut(keys, pieces))
        names = ("momentum",), (WEIGHTS, "momentum")
        _, count, offloaded = loop.backward(offloaded, passed, cut(error, pieces), leave, jnp.int32(0), *names)
        return count, offloaded

    gradient = jax.jit(plain)(on_host({WEIGHTS: rows, GRADIENT: rows}), x, keys, error)
    expected = 0.9 * momentum + np.asarray(gradient)
    stays = np.arange(COUNT) % (1 + resident) > 0
    offloaded = {WEIGHTS: rows[~stays], "momentum": momentum[~stays]}
    there = {RESIDENT + WEIGHTS: rows[stays], RESIDENT + "momentum": momentum[stays]} if resident else {}
    count, offloaded_after = jax.jit(run, donate_argnums=0)(on_host(offloaded) | there, x, keys, error)
    assert int(count) == COUNT
    for prefix, which in (("", ~stays), (RESIDENT, stays)) if resident else (("", ~stays),):
        for name, whole in (("momentum", expected), (WEIGHTS, rows - 0.1 * expected)):
            actual = np.asarray(offloaded_after[prefix + name])
            assert np.abs(actual - whole[which]).max() <= 2e-6 * np.abs(whole).max(), prefix + name
