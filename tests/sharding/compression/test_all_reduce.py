"""A compressed sum is what its codes say, the same on every rank, and so are its gradients and its bytes."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jhpt.core.compression import BLOCK, gathers, tokens_of, wire_bytes
from jhpt.core.config import Compression
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.sharding.compression.all_reduce import CompressedAllReduce, others, settle, travelled
from tests.covers import quick_and_exhaustive
from tests.sharding.equations import every_equation

BATCH, LENGTH, WIDTH = 3, 10, 200

COMPRESSIONS = [
    Compression(tokens=tokens, bits=bits, rest_bits=rest)
    for tokens, bits, rest in ((1.0, 8, 4), (1.0, 4, 0), (0.3, 8, 0), (0.3, 8, 4), (0.45, 4, 4))
]
SHORT = [
    Compression(bits=16),
    Compression(tokens=0.3, bits=16, rest_bits=0),
    Compression(tokens=0.3, bits=16, rest_bits=0, steps=2),
    Compression(tokens=0.45, bits=16, rest_bits=4),
]
"""Important tokens in bfloat16; the first is no compression to a user, and what compression is measured against."""
STEPS = [COMPRESSIONS[0].model_copy(update={"steps": 1}), COMPRESSIONS[3].model_copy(update={"steps": 2})]
NO_REST = [Compression(tokens=0.95, bits=8, rest_bits=4, steps=steps) for steps in (1, 2)]
"""Of so few tokens all are important."""


def parts_of(ranks, seed=0):
    return jax.random.t(jax.random.key(seed), 5, (ranks, BATCH, LENGTH, WIDTH))


def chosen(compression, seed=1):
    """None where all tokens are important."""
    if compression.tokens == 1:
        return None
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.permutation(LENGTH)[: tokens_of(compression, LENGTH)]) for _ in range(BATCH)]
    return jnp.asarray(np.stack(rows), jnp.int32)


def on_ranks(ranks, run, *arguments):
    """run(this rank's argument, ...) on so many ranks -> what each returns, stacked."""
    mesh = jax.make_mesh((ranks,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    on_rank = lambda *parts: jax.tree.map(lambda x: x[None], run(*(part[0] for part in parts)))  # noqa: E731
    specs = tuple(P("t") for _ in arguments)
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("t"), check_vma=False))(*arguments)


def added(rows, bits):
    """The sum of every rank's rows, each rounded, in float32."""
    if bits == 16:
        return sum(each.astype(jnp.bfloat16).astype(jnp.float32) for each in rows)
    codes = [segment_quantize(each, bits=bits, implementation="reference") for each in rows]
    codes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *codes)
    return dequantize_sum(codes, columns=WIDTH, bits=bits, implementation="reference")


def expected_sum(parts, compression, tokens):
    """The sum written down on one device, from the same codes."""
    ranks = len(parts)
    kinds = [(tokens, compression.bits)]
    if tokens is not None and compression.rest_bits and tokens.shape[1] < LENGTH:
        kinds.append((others(tokens, LENGTH), compression.rest_bits))
    total = np.zeros((BATCH, LENGTH, WIDTH), np.float32)
    for positions, bits in kinds:
        at = np.arange(LENGTH)[None].repeat(BATCH, 0) if positions is None else np.asarray(positions)
        rows = [part[np.arange(BATCH)[:, None], at].reshape(-1, WIDTH) for part in parts]
        summed = added(rows, bits)
        if not gathers(ranks, compression):
            summed = added([summed], bits)
        total[np.arange(BATCH)[:, None], at] = np.asarray(summed).reshape(*at.shape, WIDTH)
    return total


REDUCED = [(4, compression) for compression in (*COMPRESSIONS, *SHORT, *STEPS, *NO_REST)]
REDUCED += [(2, COMPRESSIONS[3]), (8, COMPRESSIONS[0]), (8, COMPRESSIONS[2]), (8, SHORT[3])]


@pytest.mark.parametrize(
    ("ranks", "compression"),
    quick_and_exhaustive(REDUCED, [REDUCED[index] for index in (2, 4, 8, 10, 13, 16)]),
    ids=str,
)
def test_sum_is_that_of_the_codes_on_every_rank(ranks, compression):
    parts, tokens = parts_of(ranks), chosen(compression)
    compressed = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression)
    sums = np.asarray(on_ranks(ranks, lambda part: compressed.reduce_over_tensor_axis(part, tokens), parts))
    assert all(np.array_equal(sums[0], other) for other in sums[1:]), "one residual stream"
    expected = expected_sum(parts, compression, tokens)
    assert np.abs(sums[0] - expected).max() <= 1e-6 * np.abs(expected).max()
    exact = np.asarray(parts.sum(0) if tokens is None or compression.rest_bits else travelled(parts.sum(0), tokens))
    only = (
        compression.bits
        if tokens is None or tokens.shape[1] == LENGTH or not compression.rest_bits
        else compression.rest_bits
    )
    assert np.linalg.norm(sums[0] - exact) < {16: 0.004, 8: 0.03, 4: 0.3}[only] * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "compression",
    quick_and_exhaustive(
        (COMPRESSIONS[0], COMPRESSIONS[2], COMPRESSIONS[3], SHORT[1], SHORT[3]), (COMPRESSIONS[2], COMPRESSIONS[3])
    ),
    ids=str,
)
def test_gradients_take_the_same_rows(compression):
    """g passes the error on to the rows that travelled; f sums errors as g sums activations."""
    ranks, tokens = 4, chosen(compression)
    compressed, errors = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression), parts_of(ranks, seed=5)

    def run(parts, error):
        g = jax.vjp(lambda parts: compressed.reduce_over_tensor_axis(parts, tokens), parts)[1](error)[0]
        f = jax.vjp(lambda x: compressed.copy_to_tensor_axis(x, tokens), parts)[1](error)[0]
        return g, f, compressed.sum(error, tokens)

    g, f, summed = on_ranks(ranks, run, parts_of(ranks), errors)
    drops = tokens is not None and not compression.rest_bits
    for gradient, error in zip(g, errors, strict=True):
        assert np.array_equal(gradient, travelled(error, tokens) if drops else error)
    assert np.array_equal(f, summed)


def test_each_direction_can_be_switched_off():
    ranks, tokens = 4, chosen(COMPRESSIONS[2])
    errors = parts_of(ranks, seed=5)

    def run(parts, error, compression):
        compressed = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression)
        y, back = jax.vjp(lambda parts: compressed.reduce_over_tensor_axis(parts, tokens), parts)
        return y, back(error)[0], jax.vjp(lambda x: compressed.copy_to_tensor_axis(x, tokens), parts)[1](error)[0]

    plain = np.asarray(errors.sum(0))
    y, g, f = on_ranks(
        ranks,
        partial(run, compression=Compression(bits=8, tokens=0.3, rest_bits=0, backward=False)),
        parts_of(ranks),
        errors,
    )
    assert np.allclose(f[0], plain, atol=1e-5) and not np.allclose(y[0], parts_of(ranks).sum(0), atol=1e-2)
    y, g, f = on_ranks(
        ranks,
        partial(run, compression=Compression(bits=8, tokens=0.3, rest_bits=0, forward=False)),
        parts_of(ranks),
        errors,
    )
    assert np.allclose(y[0], parts_of(ranks).sum(0), atol=1e-5) and np.array_equal(g, errors)
    assert not np.allclose(f[0], plain, atol=1e-2)


def test_a_choice_may_come_after_the_input():
    """Entering before the tokens are known is entering with them."""
    ranks, compression = 4, COMPRESSIONS[3]
    compressed, tokens = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression), chosen(compression)

    def late(x):
        x, placeholder = compressed.copy_before_choice(x, tokens.shape[1])
        y = jnp.sin(x)
        return settle(y, placeholder, tokens)

    def run(x, error):
        known = jax.vjp(lambda x: jnp.sin(compressed.copy_to_tensor_axis(x, tokens)), x)[1](error)[0]
        return known, jax.vjp(late, x)[1](error)[0], jax.vjp(jax.checkpoint(late), x)[1](error)[0]

    known, later, again = on_ranks(ranks, run, parts_of(ranks), parts_of(ranks, seed=5))
    assert np.array_equal(known, later) and np.array_equal(known, again)


@pytest.mark.parametrize("compression", (COMPRESSIONS[3], SHORT[0], SHORT[3]), ids=str)
def test_not_a_number_is_seen_by_all(compression):
    """With all that shares its range, where it has one."""
    parts, tokens = parts_of(4).at[2, 1, 3, 7].set(jnp.nan), chosen(compression)
    compressed = CompressedAllReduce(axes=("t",), ranks=4, compression=compression)
    sums = np.asarray(on_ranks(4, lambda part: compressed.reduce_over_tensor_axis(part, tokens), parts))
    bits = compression.bits if tokens is None or 3 in tokens[1] else compression.rest_bits
    columns = [7] if bits == 16 else range(BLOCK)
    assert np.array_equal(np.argwhere(np.isnan(sums[0])), [[1, 3, column] for column in columns])
    assert np.array_equal(np.isnan(sums[0]), np.isnan(sums[3]))


SENT = list(itertools.product((2, 4, 8), (*COMPRESSIONS, *SHORT, *STEPS)))


@pytest.mark.parametrize(("ranks", "compression"), quick_and_exhaustive(SENT, SENT[::4]))
def test_bytes_are_those_of_the_formula(ranks, compression):
    """Of the collectives' results on the wire: (t-1)/t of an all_to_all, t-1 shares of an all_gather."""
    compressed, tokens = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression), chosen(compression)
    mesh = jax.make_mesh((ranks,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    run = jax.shard_map(
        lambda part: compressed.reduce_over_tensor_axis(part[0], tokens)[None],
        mesh=mesh,
        in_specs=P("t"),
        out_specs=P("t"),
        check_vma=False,
    )
    traced = jax.make_jaxpr(run)(parts_of(ranks))
    sent = 0.0
    for equation in every_equation(traced.jaxpr):
        size = equation.outvars[0].aval.size * equation.outvars[0].aval.dtype.itemsize if equation.outvars else 0
        if equation.primitive.name in ("all_to_all", "all_gather"):
            sent += size * (ranks - 1) / ranks
        assert equation.primitive.name not in ("psum", "psum2", "psum_invariant", "reduce_scatter")
    assert sent == wire_bytes(ranks, compression, BATCH, LENGTH, WIDTH)


def test_others_are_the_rest():
    tokens = jnp.array([[1, 3], [0, 4]])
    assert others(tokens, 5).tolist() == [[0, 2, 4], [1, 2, 3]]


def test_at_least_one_token_is_important():
    assert [tokens_of(Compression(bits=8, tokens=share), 10) for share in (0.01, 0.1, 0.3, 0.31, 1)] == [1, 1, 3, 4, 10]


def test_important_tokens_alone_compress():
    """In 16 bits, all of them, nothing is compressed; some of them are fewer bytes."""
    assert not Compression().on and not Compression(bits=16, rest_bits=0).on
    assert Compression(tokens=0.3).on and Compression(bits=8).on
    assert not Compression(tokens=0.3, forward=False, backward=False).on


def test_steps_may_be_chosen():
    """Where codes may be gathered for a rounding less, two steps send 2 / t of the bytes."""
    once, twice = COMPRESSIONS[3], STEPS[1]
    assert gathers(4, once) and not gathers(4, twice)
    sent = [wire_bytes(4, compression, 4, 160, 256) for compression in (once, twice)]  # rows that shares divide
    assert sent[1] == sent[0] / 2


def test_kernels_of_a_gpu_lower_inside_a_sum():
    """The wire hands its implementation on to every kernel."""
    compression, ranks = STEPS[1], 4
    compressed = CompressedAllReduce(axes=("t",), ranks=ranks, compression=compression, implementation="mosaic")
    mesh = jax.make_mesh((ranks,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    run = jax.shard_map(
        lambda part: compressed.reduce_over_tensor_axis(part[0], chosen(compression))[None],
        mesh=mesh,
        in_specs=P("t"),
        out_specs=P("t"),
        check_vma=False,
    )
    text = jax.jit(run).trace(parts_of(ranks)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 6  # both kinds of rows: quantized, added, quantized again, and decoded
