"""The Pallas kernel: error, threshold, selection and residual of a block in registers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.kernels.order import ordered
from jhpt.kernels.pallas import (
    LANES,
    PARAMS,
    WARPS,
    by_warpgroup,
    in_blocks,
    largest,
    load,
    over,
    row_per_warp,
    store,
)
from jhpt.kernels.topk_sparsify import reference
from jhpt.kernels.topk_sparsify.reference import Sparse

VECTOR = 4
WARP_BLOCK = 1024
"""A block of at most this size has 32 numbers in a lane of one warp; a warpgroup shares larger ones."""
MOST = 8192
"""64 numbers in a thread; more do not fit in registers with their keys."""


def sparsify(gradient: jax.Array, residual: jax.Array, *, keep: int, block: int) -> Sparse:
    """See `topk_sparsify`.  Calls the reference for blocks of more than 8,192 numbers."""
    size = gradient.size
    if block > MOST or not size:
        return reference.sparsify(gradient, residual, keep=keep, block=block)
    by_warp = block <= WARP_BLOCK
    rows, unit = (WARPS, LANES * VECTOR) if by_warp else (1, WARPS * LANES * VECTOR)
    blocks, columns = -(-size // block), -(-block // unit) * unit
    resident = max(blocks, rows)

    def laid_out(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, (0, blocks * block - size)).reshape(blocks, block)
        return jnp.pad(x, ((0, resident - blocks), (0, columns - block)))

    words, rest = plgpu.kernel(
        partial(_body, keep=keep, rows=rows, layout=(row_per_warp if by_warp else by_warpgroup)(VECTOR)),
        out_type=(
            jax.ShapeDtypeStruct((keep, resident), jnp.uint32),
            jax.ShapeDtypeStruct((resident, columns), jnp.float32),
        ),
        grid=(resident // rows,),
        grid_names=("rows",),
        kernel_name="topk_sparsify",
        compiler_params=PARAMS,
    )(laid_out(gradient), laid_out(residual))
    words = words[:, :blocks].T
    values = jax.lax.bitcast_convert_type((words & 0xFFFF).astype(jnp.uint16), jnp.bfloat16)
    positions = (0xFFFF - (words >> 16)).astype(jnp.uint16)
    return Sparse(values, positions, rest[:blocks, :block].reshape(-1)[:size])


def _body(
    gradient_ref: Any,
    residual_ref: Any,
    words_ref: Any,
    left_ref: Any,
    *,
    keep: int,
    rows: int,
    layout: Any,
) -> None:
    """Blocks, `rows` at a time.

    Entries that are sent are written as words: the position, counted from the end, above the bits of the value.  The
    largest word is the first entry, and the next entry is the largest word below it.
    """

    def work(start: jax.Array) -> None:
        here = pl.ds(start, rows) if rows > 1 else start
        error = load(gradient_ref.at[here], layout).astype(jnp.float32) + load(residual_ref.at[here], layout)
        chosen = largest(ordered(jnp.abs(error)), keep, bits=31, layout=layout)
        sent = error.astype(jnp.bfloat16).astype(jnp.float32)
        store(left_ref.at[here], jnp.where(chosen, error - sent, error))

        positions = plgpu.broadcasted_iota(jnp.uint32, error.shape, error.ndim - 1, layout=layout)
        words = ((0xFFFF - positions) << 16) | (jax.lax.bitcast_convert_type(sent, jnp.uint32) >> 16)
        words = jnp.where(chosen, words, jnp.uint32(0))

        def take(index: jax.Array, before: jax.Array) -> jax.Array:
            first = jnp.max(jnp.where(words < over(before, words.shape, layout), words, jnp.uint32(0)), -1)
            store(words_ref.at[index, here], first)
            return first

        everything = jnp.uint32(0xFFFFFFFF)
        if rows > 1:
            everything = plgpu.layout_cast(jnp.full(rows, everything), layout.reduce(1))
        jax.lax.fori_loop(0, keep, take, everything)

    in_blocks(work, left_ref.shape[0], rows, "rows")
