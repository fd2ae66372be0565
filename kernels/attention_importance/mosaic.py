"""The Pallas kernels: softmax denominators of every query, then attention summed for every key, on tensor cores.

Both hold 64 rows of one operand in shared memory, stream blocks of the other, and reduce scores [rows, columns] over
the columns in registers: over keys for the denominators, over queries for the attention that a key receives.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.kernels.attention_importance import reference
from jhpt.kernels.pallas import PARAMS, load, over, store

ROWS = 64
"""Rows of one tensor core instruction."""
COLUMNS = 128
STAGES = 2
"""Blocks in shared memory: with heads of 128, two warpgroups of 80 KiB share a multiprocessor's 228 KiB."""

TOKENS = plgpu.Layout.WGMMA
LOWEST = -1e30
"""A finite number below every score, so that rows without a visible key have weights 0 instead of NaN."""


def importance(
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool,
    lengths: jax.Array | None,
    stride: int,
) -> jax.Array:
    """See `attention_importance`.  Calls the reference unless q and k are bfloat16 of width 64 or 128."""
    batch, length, _, width = q.shape
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or width not in (64, 128):
        return reference.importance(q, k, causal=causal, lengths=lengths, stride=stride)
    lengths = jnp.full(batch, length, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    q = _filled(q[:, stride - 1 :: stride], 1)
    k = _filled(k, 1)
    statistics = _over_blocks(partial(_denominators, causal=causal, stride=stride), q, k, lengths)
    received = _over_blocks(partial(_received, causal=causal, stride=stride), k, q, lengths, statistics)
    total = jnp.sum(received, 1)[:, :length]
    seen = jnp.arange(length)[None] < lengths[:, None]
    total = jnp.where(seen, total, 0)
    return total / reference.viewers(seen, jnp.arange(stride - 1, length, stride)) if causal else total


def _filled(x: jax.Array, dim: int) -> jax.Array:
    """x filled up to whole blocks of tokens; the filling is masked by its position."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % COLUMNS)
    return jnp.pad(x, padding)


def _over_blocks(body: Callable[..., None], rows: jax.Array, columns: jax.Array, *others: jax.Array) -> jax.Array:
    """A number for every row and head, float32 [B, H, rows], which `body` computes for 64 rows at a time."""
    batch, length, _, width = rows.shape
    heads = max(rows.shape[2], columns.shape[2])
    return plgpu.kernel(
        partial(body, heads=heads),
        out_type=jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        scratch_types=(plgpu.SMEM((ROWS, width), jnp.bfloat16), plgpu.Barrier()),
        grid=(heads, length // ROWS, batch),
        grid_names=("head", "block", "sample"),
        kernel_name="attention_importance",
        compiler_params=PARAMS,
    )(rows, columns, *others)


def _denominators(
    q_ref: Any,
    k_ref: Any,
    lengths_ref: Any,
    statistics_ref: Any,
    q_block: Any,
    barrier: Any,
    *,
    heads: int,
    causal: bool,
    stride: int,
) -> None:
    """log sum_j exp(score[i, j]) of 64 queries; the largest score is carried with the sum."""
    sample, head, first = _block(heads)
    length = lengths_ref[sample]
    steps = k_ref.shape[1] // COLUMNS
    if causal:  # up to the block of the last query's own key
        steps = jnp.minimum(steps, ((first + ROWS) * stride - 1) // COLUMNS + 1)

    def step(scores: jax.Array, start: jax.Array, carry: Any) -> Any:
        largest, total = carry
        key = start + _iota(1)
        visible = key < length
        if causal:
            visible &= key <= (first + _iota(0)) * stride + stride - 1
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.maximum(largest, jnp.max(scores, 1))
        weights = jnp.exp2(scores - over(highest, scores.shape, TOKENS))
        return highest, total * jnp.exp2(largest - highest) + jnp.sum(weights, 1)

    start = tuple(plgpu.layout_cast(jnp.full(ROWS, value, jnp.float32), TOKENS.reduce(1)) for value in (LOWEST, 0.0))
    largest, total = _stream(step, q_ref, k_ref, q_block, barrier, heads, 0, steps, start)
    store(statistics_ref.at[sample, head, pl.ds(first, ROWS)], largest * math.log(2) + jnp.log(total))


def _received(
    k_ref: Any,
    q_ref: Any,
    lengths_ref: Any,
    statistics_ref: Any,
    received_ref: Any,
    k_block: Any,
    barrier: Any,
    *,
    heads: int,
    causal: bool,
    stride: int,
) -> None:
    """sum_i exp(score[i, j] - statistics[i]) of 64 keys."""
    sample, head, first = _block(heads)
    length = lengths_ref[sample]
    blocks = q_ref.shape[1] // COLUMNS
    skipped = jnp.minimum(first // stride // COLUMNS, blocks - 1) if causal else 0

    def step(scores: jax.Array, start: jax.Array, total: jax.Array) -> jax.Array:
        position = (start + _iota(1)) * stride + stride - 1
        pays = position < length
        if causal:
            pays &= position >= first + _iota(0)
        denominators = load(statistics_ref.at[sample, head, pl.ds(start, COLUMNS)], TOKENS.reduce(0))
        denominators = jax.lax.broadcast_in_dim(denominators * math.log2(math.e), scores.shape, (1,))
        weights = jnp.exp2(scores - plgpu.layout_cast(denominators, TOKENS))
        return total + jnp.sum(jnp.where(pays, weights, 0), 1)

    zero = plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), TOKENS.reduce(1))
    total = _stream(step, k_ref, q_ref, k_block, barrier, heads, skipped, blocks - skipped, zero)
    store(received_ref.at[sample, head, pl.ds(first, ROWS)], total)


def _block(heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sample, head, first row) of this step of the grid."""
    return jax.lax.axis_index("sample"), jax.lax.axis_index("head"), jax.lax.axis_index("block") * ROWS


def _iota(dim: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), dim, layout=TOKENS)


def _stream(
    step: Callable[[jax.Array, jax.Array, Any], Any],
    rows_ref: Any,
    columns_ref: Any,
    rows_block: Any,
    barrier: Any,
    heads: int,
    skipped: Any,
    blocks: Any,
    carry: Any,
) -> Any:
    """carry = step(scores, their first column, carry) for `blocks` blocks of columns; scores are in powers of two."""
    sample, head, first = _block(heads)
    width = rows_ref.shape[3]
    scale = math.log2(math.e) / width**0.5
    plgpu.copy_gmem_to_smem(
        rows_ref.at[sample, pl.ds(first, ROWS), head // (heads // rows_ref.shape[2])], rows_block, barrier
    )
    plgpu.barrier_wait(barrier)

    def body(indices: Any, columns_block: Any, carry: Any) -> Any:
        def product(scores_ref: Any) -> jax.Array:
            plgpu.wgmma(scores_ref, rows_block, columns_block.T)
            return scores_ref[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, COLUMNS), jnp.float32)) * scale
        return step(scores, (indices[0] + skipped) * COLUMNS, carry)

    return plgpu.emit_pipeline(
        body,
        grid=(blocks,),
        in_specs=[plgpu.BlockSpec((COLUMNS, width), lambda index: (index + skipped, 0))],
        max_concurrent_steps=STAGES,
        init_carry=carry,
    )(columns_ref.at[sample, :, head // (heads // columns_ref.shape[2])])
