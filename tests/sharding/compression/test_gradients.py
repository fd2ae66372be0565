"""A compressed sum of gradients is what its codes say, the same on every rank, and what is not in it is kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from benchmarks.networks.mlp import MLP
from benchmarks.networks.vgg import VGG
from jhpt.core.compression import (
    BLOCK,
    COLUMNS,
    buckets,
    gathers_gradients,
    gradient_bytes,
    sent_of_block,
    share_of_bucket,
)
from jhpt.core.config import GradientCompression
from jhpt.core.families.vgg import VGGConfig
from jhpt.core.load import load_config
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.models.family import build
from jhpt.sharding.compression.gradients import GradientReduction, Part, backward_order, exchanged
from jhpt.sharding.partition import MATRICES, path_name
from tests.covers import quick_and_exhaustive
from tests.sharding.equations import every_equation

SHAPES = [(8, 40), (24, 8, 16), (64, 130)]
"""Of one bucket.  Eight divides the dims of `DIMS`."""
DIMS = (0, 1, 0)

COMPRESSIONS = {
    "8 bits": GradientCompression(kind="quantize"),
    "4 bits": GradientCompression(kind="quantize", bits=4),
    "top 5 %": GradientCompression(kind="topk", share=0.05, block=256),
    "top 5 %, momentum": GradientCompression(kind="topk", share=0.05, block=256, momentum=0.7),
}
WAYS = [(name, ranks, shares) for name in COMPRESSIONS for ranks in (2, 4) for shares in (False, True)]


def gradients_of(ranks, seed=0):
    """[ranks, ...] each, of sizes that differ from one to the next."""
    rng = np.random.default_rng(seed)
    return [np.float32(10.0**-n * rng.standard_t(5, (ranks, *shape))) for n, shape in enumerate(SHAPES)]


def nothing(compression, gradients):
    """(residuals, momenta) before the first step."""
    zeros = [np.zeros_like(g) for g in gradients]
    return zeros, (zeros if compression.momentum else None)


def on_ranks(ranks, run, *arguments):
    """run(this rank's arguments) -> what every rank returns, stacked."""
    mesh = jax.make_mesh((ranks,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])

    def on_rank(*parts):
        return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], parts)))

    return jax.shard_map(on_rank, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(*arguments)


def step(compression, ranks, shares, kernels="reference"):
    """(gradients, residuals, momenta) of all ranks -> the same, sums in the place of gradients."""
    reductions = [GradientReduction(("d",), ranks, dim if shares else None) for dim in DIMS]

    def run(gradients, residuals, momenta):
        parts = list(map(Part, gradients, residuals, momenta or [None] * len(gradients)))
        done = exchanged(parts, reductions, compression, kernels)
        return [p.gradient for p in done], [p.residual for p in done], [p.momentum for p in done] if momenta else None

    return jax.jit(partial(on_ranks, ranks, run))


def whole(sums, shares):
    """Sums of all ranks -> the one that there is; every rank has the same, or its share."""
    if shares:
        return [np.concatenate(list(np.asarray(each)), dim) for each, dim in zip(sums, DIMS, strict=True)]
    for each in sums:
        assert all(np.array_equal(each[0], other, equal_nan=True) for other in each[1:]), "one sum on all ranks"
    return [np.asarray(each[0]) for each in sums]


# Laid out by hand: a bucket as [ranks, parts, numbers].


def laid(leaves, ranks, compression, shares):
    parts = 1 if gathers_gradients(ranks, compression) and not shares else ranks
    if shares:
        turned = [np.moveaxis(np.asarray(x), dim + 1, 1) for x, dim in zip(leaves, DIMS, strict=True)]
        rows = np.concatenate([x.reshape(ranks, ranks, -1) for x in turned], 2)
    else:
        rows = np.concatenate([np.asarray(x).reshape(ranks, -1) for x in leaves], 1)[:, None]
    numbers = share_of_bucket(sum(x[0].size for x in leaves), parts, compression)
    if shares:
        return np.pad(rows, ((0, 0), (0, 0), (0, numbers - rows.shape[2])))
    return np.pad(rows[:, 0], ((0, 0), (0, parts * numbers - rows.shape[2]))).reshape(ranks, parts, numbers)


def expected_codes(wanted, compression, ranks, shares):
    """(sum, residuals) from the same codes, on one device."""
    rows = wanted.reshape(ranks, -1, COLUMNS)
    quantize = partial(segment_quantize, bits=compression.bits, implementation="reference")
    decode_all = partial(dequantize_sum, columns=COLUMNS, bits=compression.bits, implementation="reference")

    def decode(payload):
        return decode_all(jax.tree.map(lambda leaf: leaf[None], payload))

    codes = [quantize(jnp.asarray(x)) for x in rows]
    residual = wanted - np.stack([decode(c) for c in codes]).reshape(wanted.shape)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *codes)
    total = np.asarray(decode_all(stacked))
    if not shares and not gathers_gradients(ranks, compression):
        again = np.asarray(decode(quantize(jnp.asarray(total))))
        for owner, missed in enumerate((total - again).reshape(ranks, -1)):
            residual[owner, owner] += missed
        total = again
    return total.reshape(wanted.shape[1:]), residual


def expected_largest(wanted, compression):
    """(sum, residuals, where nothing was sent) by sorting."""
    blocks = wanted.reshape(len(wanted), -1, compression.block)
    order = np.argsort(-np.abs(blocks), -1, kind="stable")[..., : sent_of_block(compression)]
    sent = np.zeros_like(blocks)
    values = np.asarray(jnp.asarray(np.take_along_axis(blocks, order, -1)).astype(jnp.bfloat16).astype(jnp.float32))
    np.put_along_axis(sent, order, values, -1)
    saved = np.ones_like(blocks)
    np.put_along_axis(saved, order, 0, -1)
    return sent.sum(0).reshape(wanted.shape[1:]), wanted - sent.reshape(wanted.shape), saved.reshape(wanted.shape)


@pytest.mark.parametrize(("name", "ranks", "shares"), quick_and_exhaustive(WAYS, WAYS[1::5]))
def test_three_steps_are_those_of_the_codes(name, ranks, shares):
    """The second and third with what the one before has left."""
    compression, run = COMPRESSIONS[name], step(COMPRESSIONS[name], ranks, shares)
    residuals, momenta = nothing(compression, gradients_of(ranks))
    saved, velocity = laid(residuals, ranks, compression, shares), laid(residuals, ranks, compression, shares)
    for seed in range(3):
        gradients = gradients_of(ranks, seed)
        sums, residuals, momenta = run(gradients, residuals, momenta)
        numbers = laid(gradients, ranks, compression, shares)
        if compression.momentum:
            numbers = velocity = compression.momentum * velocity + numbers
        if compression.kind == "quantize":
            total, saved = expected_codes(numbers + saved, compression, ranks, shares)
        else:
            total, saved, unsent = expected_largest(numbers + saved, compression)
            velocity = velocity * unsent
        total_here = laid([x[None] for x in whole(sums, shares)], 1, compression, False).ravel()
        expected = [x[None] for x in taken(total, shares)]
        expected = laid(expected, 1, compression, False).ravel()
        assert np.abs(total_here - expected).max() <= 1e-6 * np.abs(expected).max()
        assert np.abs(laid(residuals, ranks, compression, shares) - saved).max() <= 1e-6 * np.abs(saved).max()
        if compression.momentum:
            assert np.abs(laid(momenta, ranks, compression, shares) - velocity).max() <= 1e-6 * np.abs(velocity).max()


def taken(total, shares):
    """[parts, numbers] -> gradients."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    if not shares:
        pieces = np.split(total.ravel()[: sum(sizes)], np.cumsum(sizes)[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]
    sizes = [size // len(total) for size in sizes]
    pieces = np.split(total[:, : sum(sizes)], np.cumsum(sizes)[:-1], 1)
    turned = [(shape[dim], *shape[:dim], *shape[dim + 1 :]) for shape, dim in zip(SHAPES, DIMS, strict=True)]
    return [np.moveaxis(p.reshape(shape), 0, dim) for p, shape, dim in zip(pieces, turned, DIMS, strict=True)]


LEFT = [*((name, 4, shares) for name in list(COMPRESSIONS)[:3] for shares in (True, False)), ("8 bits", 8, False)]


@pytest.mark.parametrize(
    ("name", "ranks", "shares"),
    quick_and_exhaustive(LEFT, [LEFT[0], *LEFT[3:5]]),
)
def test_what_was_applied_and_what_is_left_are_all_gradients(name, ranks, shares):
    compression, run = COMPRESSIONS[name], step(COMPRESSIONS[name], ranks, shares)
    residuals, momenta = nothing(compression, gradients_of(ranks))
    given_, applied = 0.0, 0.0
    for seed in range(20):
        gradients = gradients_of(ranks, seed)
        sums, residuals, momenta = run(gradients, residuals, momenta)
        applied = [a + s for a, s in zip(applied or [0.0] * 3, whole(sums, shares), strict=True)]
        given_ = [g + np.asarray(x, np.float64).sum(0) for g, x in zip(given_ or [0.0] * 3, gradients, strict=True)]
    for all_, sent, left in zip(given_, applied, residuals, strict=True):
        missing = np.asarray(left, np.float64).sum(0)
        assert np.abs(sent + missing - all_).max() <= 1e-5 * np.abs(all_).max()
        assert np.abs(missing).max() > 1e-4 * np.abs(all_).max(), "and something was left"


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_alone_everything_arrives(name):
    compression = COMPRESSIONS[name]
    gradients = gradients_of(1)
    left, momenta = gradients_of(1, 1), gradients_of(1, 2) if compression.momentum else None
    sums, residuals, momenta = step(compression, 1, False)(gradients, left, momenta)
    for total, gradient, before, after in zip(sums, gradients, left, residuals, strict=True):
        assert np.array_equal(total, gradient + before) and not after.any()


@pytest.mark.parametrize(("name", "shares"), [(name, shares) for name in COMPRESSIONS for shares in (False, True)])
def test_not_a_number_is_seen_by_all(name, shares):
    """With all that shares its range, where it has one."""
    compression, gradients = COMPRESSIONS[name], gradients_of(4)
    gradients[1][2, 3, 7, 5] = np.nan
    sums, *_ = step(compression, 4, shares)(gradients, *nothing(compression, gradients))
    missing = [np.isnan(total) for total in whole(sums, shares)]
    assert missing[1][3, 7, 5] and sum(each.sum() for each in missing) <= (
        BLOCK if compression.kind == "quantize" else 1
    )


@pytest.mark.parametrize(("name", "ranks", "shares"), [*WAYS, ("8 bits", 8, False), ("top 5 %", 8, True)])
def test_bytes_are_those_of_the_formula(name, ranks, shares):
    """Of the collectives' results on the wire: (t-1)/t of an all_to_all, t-1 shares of an all_gather."""
    compression, gradients = COMPRESSIONS[name].model_copy(update={"bucket": 3000}), gradients_of(ranks)
    traced = jax.make_jaxpr(step(compression, ranks, shares))(gradients, *nothing(compression, gradients))
    sent = 0.0
    for equation in every_equation(traced.jaxpr):
        assert equation.primitive.name not in ("psum", "psum2", "psum_invariant", "reduce_scatter", "ppermute")
        if equation.primitive.name in ("all_to_all", "all_gather"):
            sent += equation.outvars[0].aval.size * equation.outvars[0].aval.dtype.itemsize * (ranks - 1) / ranks
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    together = [sum(sizes[at] for at in bucket) for bucket in buckets(sizes, 3000)]
    assert len(together) == 2
    assert sent == sum(gradient_bytes(ranks, compression, numbers, shares=shares) for numbers in together)


def test_bytes_worked_out_by_hand():
    """2^20 numbers in 4 ranks: rows of 1,024 numbers are 1,024 or 512 bytes of codes and 8 ranges of 2 bytes."""
    assert gradient_bytes(4, COMPRESSIONS["8 bits"], 1 << 20) == 2 * 3 * 256 * (1024 + 16)
    assert gradient_bytes(4, COMPRESSIONS["8 bits"], 1 << 20, shares=True) == 3 * 256 * (1024 + 16)
    assert gradient_bytes(4, COMPRESSIONS["4 bits"], 1 << 20) == 3 * 1024 * (512 + 16), "4 x 4 < 32: gathered"
    assert gradient_bytes(8, COMPRESSIONS["4 bits"], 1 << 20) == 2 * 7 * 128 * (512 + 16)
    assert gradient_bytes(4, COMPRESSIONS["top 5 %"], 1 << 20) == 3 * 4096 * 13 * 4
    assert gradient_bytes(1, COMPRESSIONS["8 bits"], 1 << 20) == 0


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
@settings(deadline=None, derandomize=True)
def test_buckets_cover_everything_once_in_order_and_are_no_larger_than_needed(sizes, capacity):
    cut = buckets(sizes, capacity)
    assert [at for bucket in cut for at in bucket] == list(range(len(sizes)))
    for bucket in cut:
        assert sum(sizes[at] for at in bucket[:-1]) < capacity
    assert all(sum(sizes[at] for at in bucket) >= capacity for bucket in cut[:-1])


def test_order_is_that_of_the_backward_pass():
    rows = {
        "blocks/attention/qkv/kernel": 3,
        "blocks/mlp/up/kernel": 3,
        "embedding/tokens": None,
        "head/tokens": None,
    }
    assert backward_order(rows) == [
        ("head/tokens", None),
        *((f"blocks/{half}/kernel", layer) for layer in (2, 1, 0) for half in ("mlp/up", "attention/qkv")),
        ("embedding/tokens", None),
    ]
    runs = {f"blocks/{run}/mlp/up/kernel": 2 for run in (0, 2, 10)}
    assert backward_order(runs) == [(f"blocks/{run}/mlp/up/kernel", row) for run in (10, 2, 0) for row in (1, 0)]


@pytest.mark.parametrize("name", ("gpt-tiny", "llama-8b", "bert-tiny", "mlp", "vgg"))
def test_matrices_and_tables_are_what_has_more_than_one_dim(name):
    networks = {
        "mlp": MLP(inputs=12, width=16, hidden=32, num_blocks=6, classes=24),
        "vgg": VGG(config=VGGConfig(image_size=16, convolutions=((8,), (8, 16)), dense=(32,), num_classes=16)),
    }
    model = networks[name] if name in networks else build(load_config(name).model)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    paths = [(path_name(path), len(leaf.shape) - ("blocks/" in path_name(path))) for path, leaf in leaves]
    assert any(dims == 1 for _, dims in paths)
    for path, dims in paths:
        assert bool(MATRICES.search(path)) == (dims > 1 and not path.endswith("bias")), path


@pytest.mark.parametrize(("name", "count"), [("8 bits", 6), ("top 5 %", 1)])
def test_kernels_of_a_gpu_lower_inside_an_exchange(name, count):
    """Quantized, decoded for the residual, added, quantized again, decoded for the residual again, and decoded in the
    end: six; or selected."""
    gradients = gradients_of(4)
    traced = step(COMPRESSIONS[name], 4, False, "mosaic").trace(gradients, *nothing(COMPRESSIONS[name], gradients))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == count
