"""The Pallas kernel: codes of all payloads decoded and summed in registers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.core.compression import Bits
from jhpt.kernels.pallas import LANES, PARAMS, WARPS, in_blocks, load, over, pairs_per_warp, row_per_warp, store
from jhpt.kernels.segments import Group, Knee, Quantized, cut, decoding, most

BLOCK = 2048
"""Sums that a warpgroup holds at a time: 16 in a thread, which leaves room for the codes that are on their way."""
VECTOR = 4
"""Sums of a thread side by side: 16 bytes, the widest access."""
TOGETHER = 8
"""Payloads on their way at the same time, at most."""
PIECE = 128
"""Members at a time of groups that are larger than `WHOLE`."""
WHOLE = 1024


class Scale(NamedTuple):
    """C and what `segments.decoding` gives."""

    codes: jax.Array
    centre: jax.Array
    inner: jax.Array
    outer: jax.Array


def dequantize_sum(payloads: Quantized, *, columns: int, bits: Bits, group: Group, knee: Knee) -> jax.Array:
    """See `dequantize_sum`."""
    count, rows, row_bytes = payloads.codes.shape
    in_row = row_bytes * 8 // bits
    members = group if isinstance(group, int) else in_row
    if not count * rows * in_row:
        return jnp.zeros((rows, columns), jnp.float32)
    # A block is [groups, members]; a large group is several, of the same range.
    unit = LANES * VECTOR if bits == 8 else LANES * 2
    pieces = -(-members // PIECE) if members > WHOLE else 1
    piece = PIECE if members > WHOLE else -(-members // unit) * unit
    groups = rows * in_row // members
    resident = max(groups * pieces, WARPS)
    at_once = max(min(BLOCK // piece, resident) // WARPS, 1) * WARPS

    codes = payloads.codes.reshape(count, groups, members * bits // 8)
    codes = jnp.pad(codes, ((0, 0), (0, 0), (0, pieces * piece * bits // 8 - codes.shape[2])))
    codes = codes.reshape(count, groups * pieces, piece * bits // 8)
    codes = jnp.pad(codes, ((0, 0), (0, resident - groups * pieces), (0, 0)))
    ranges = jnp.broadcast_to(payloads.ranges, (count, rows, groups // rows)).reshape(count, groups)
    ranges = jnp.pad(jnp.repeat(ranges, pieces, 1), ((0, 0), (0, resident - groups * pieces)))

    scale = Scale(jnp.float32(knee.codes), *decoding(bits, knee))
    total = plgpu.kernel(
        partial(_body, bits=bits, shape=(at_once, piece) if bits == 8 else (at_once, piece // 2, 2)),
        out_type=jax.ShapeDtypeStruct((resident, piece) if bits == 8 else (resident, piece // 2, 2), jnp.float32),
        grid=(resident // at_once,),
        grid_names=("step",),
        kernel_name="dequantize_sum",
        compiler_params=PARAMS,
    )(codes, ranges, jnp.stack(scale))
    total = total.reshape(resident, piece)[: groups * pieces].reshape(groups, -1)[:, :members]
    return total.reshape(rows, in_row)[:, :columns]


def _body(
    codes_ref: Any, ranges_ref: Any, scale_ref: Any, total_ref: Any, *, bits: Bits, shape: tuple[int, ...]
) -> None:
    """Groups [at_once, members], at 4 bits [at_once, members / 2, 2]."""
    layout = row_per_warp(VECTOR) if bits == 8 else pairs_per_warp()
    payloads = codes_ref.shape[0]
    together = max(count for count in range(1, TOGETHER + 1) if payloads % count == 0)
    scale = Scale(*(scale_ref[index] for index in range(len(Scale._fields))))

    def work(start: jax.Array) -> None:
        here = pl.ds(start, shape[0])

        def add(payload: jax.Array, total: jax.Array) -> jax.Array:
            codes = _signed(codes_ref.at[payload, here], bits, shape, layout)
            ranges = load(ranges_ref.at[payload, here], layout.reduce(tuple(range(1, len(shape)))))
            return total + _decoded(codes, bits, scale) * over(ranges.astype(jnp.float32), shape, layout)

        nothing = plgpu.layout_cast(jnp.full(shape, -0.0, jnp.float32), layout)  # -0 + x is x, -0 too
        store(total_ref.at[here], jax.lax.fori_loop(0, payloads, add, nothing, unroll=together))

    in_blocks(work, total_ref.shape[0], shape[0], "step")


def _signed(bytes_ref: Any, bits: Bits, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Codes as float32, of the shape of a block."""
    if bits == 8:
        return load(bytes_ref, layout).astype(jnp.int8).astype(jnp.float32)
    both = load(bytes_ref, layout.reduce(2)).astype(jnp.int32)
    both = plgpu.layout_cast(jax.lax.broadcast_in_dim(both, shape, (0, 1)), layout)
    half = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=layout)
    return ((both << (28 - 4 * half)) >> 28).astype(jnp.float32)


def _decoded(codes: jax.Array, bits: Bits, scale: Scale) -> jax.Array:
    """Shares of the range, the reference's bits."""
    size = jnp.abs(codes)
    tail = scale.centre + (size - scale.codes) * scale.outer
    share = cut(jnp.where(size <= scale.codes, size * scale.inner, tail))
    return jnp.where(size > most(bits), jnp.nan, jnp.where(codes < 0, -share, share))
