"""The Pallas kernel: codes of all payloads decoded and summed in registers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.core.compression import Bits
from jhpt.kernels.pallas import LANES, PARAMS, WARPS, in_blocks, load, over, row_per_warp, store
from jhpt.kernels.segments import Knee, Quantized, cut, decoding, most

BLOCK = 2048
"""Sums that a warpgroup holds at a time, unless the smallest block has more: 16 in a thread (32 at most), which leaves
registers for the codes that are being loaded."""
VECTOR = 4
"""Neighbouring sums of a thread: 16 bytes, the widest access."""
IN_FLIGHT = 8
"""Payloads that are loaded at the same time, at most."""
PIECE = 128
"""Bytes that are decoded at a time of groups of more than `WHOLE`."""
WHOLE = 1024
"""Members of the largest group that is decoded in one piece."""


class Scale(NamedTuple):
    """C, and the results of `segments.decoding`."""

    codes: jax.Array
    centre: jax.Array
    inner: jax.Array
    outer: jax.Array


def dequantize_sum(payloads: Quantized, *, columns: int, bits: Bits, group: int, knee: Knee) -> jax.Array:
    """See `dequantize_sum`.  A block is [groups, bytes]; a large group is several, of the same range."""
    count, rows, row_bytes = payloads.codes.shape
    parts, in_row = 8 // bits, row_bytes * 8 // bits
    if not count * rows * in_row:
        return jnp.zeros((rows, columns), jnp.float32)
    group_bytes = group // parts
    pieces = -(-group_bytes // PIECE) if group > WHOLE else 1
    piece = PIECE if group > WHOLE else -(-group_bytes // (LANES * VECTOR)) * LANES * VECTOR
    lanes = LANES
    if pieces == 1 and group_bytes < LANES * VECTOR:
        lanes = 1 << (-(-group_bytes // VECTOR) - 1).bit_length()
        piece = lanes * VECTOR
    smallest = WARPS * LANES // lanes  # groups of the smallest block
    groups = rows * in_row // group
    resident = max(groups * pieces, smallest)
    step_groups = max(min(BLOCK // (parts * piece), resident) // smallest, 1) * smallest

    codes = payloads.codes.reshape(count, groups, group_bytes)
    codes = jnp.pad(codes, ((0, 0), (0, 0), (0, pieces * piece - group_bytes)))
    codes = codes.reshape(count, groups * pieces, piece)
    codes = jnp.pad(codes, ((0, 0), (0, resident - groups * pieces), (0, 0)))
    ranges = jnp.broadcast_to(payloads.ranges, (count, rows, groups // rows)).reshape(count, groups)
    ranges = jnp.pad(jnp.repeat(ranges, pieces, 1), ((0, 0), (0, resident - groups * pieces)))

    scale = Scale(jnp.float32(knee.codes), *decoding(bits, knee))
    total = plgpu.kernel(
        partial(_body, bits=bits, shape=(step_groups, piece), lanes=lanes),
        out_type=jax.ShapeDtypeStruct((resident, parts, piece), jnp.float32),
        grid=(resident // step_groups,),
        grid_names=("step",),
        kernel_name="dequantize_sum",
        compiler_params=PARAMS,
    )(codes, ranges, jnp.stack(scale))
    total = total[: groups * pieces].reshape(groups, pieces, parts, piece)
    total = jnp.moveaxis(total, 2, 1).reshape(groups, parts, -1)[..., :group_bytes]
    return total.reshape(rows, in_row)[:, :columns]


def _body(
    codes_ref: Any, ranges_ref: Any, scale_ref: Any, total_ref: Any, *, bits: Bits, shape: tuple[int, int], lanes: int
) -> None:
    """Decodes and sums bytes [step_groups, bytes].  total_ref: sums [groups, codes of a byte, bytes]."""
    layout = row_per_warp(VECTOR, lanes)
    payloads, parts = codes_ref.shape[0], 8 // bits
    unroll = max(count for count in range(1, IN_FLIGHT + 1) if payloads % count == 0)
    scale = Scale(*(scale_ref[index] for index in range(len(Scale._fields))))

    def work(start: jax.Array) -> None:
        here = pl.ds(start, shape[0])

        def add(payload: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            packed = load(codes_ref.at[payload, here], layout).astype(jnp.int32)
            ranges = load(ranges_ref.at[payload, here], layout.reduce(1))
            wide = over(ranges.astype(jnp.float32), shape, layout)
            each = [((packed << (32 - bits * (part + 1))) >> (32 - bits)).astype(jnp.float32) for part in range(parts)]
            return tuple(total + _decoded(codes, bits, scale) * wide for total, codes in zip(totals, each, strict=True))

        nothing = plgpu.layout_cast(jnp.full(shape, -0.0, jnp.float32), layout)  # -0 + x is x, -0 too
        totals = jax.lax.fori_loop(0, payloads, add, (nothing,) * parts, unroll=unroll)
        for part, total in enumerate(totals):
            store(total_ref.at[here, part], total)

    in_blocks(work, total_ref.shape[0], shape[0], "step")


def _decoded(codes: jax.Array, bits: Bits, scale: Scale) -> jax.Array:
    """Shares of the range, equal to the reference's to the last bit."""
    size = jnp.abs(codes)
    tail = scale.centre + (size - scale.codes) * scale.outer
    share = cut(jnp.where(size <= scale.codes, size * scale.inner, tail))
    return jnp.where(size > most(bits), jnp.nan, jnp.where(codes < 0, -share, share))
