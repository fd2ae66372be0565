"""The Pallas kernel: gather, range, codes and packing of groups while they lie in registers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.core.compression import Bits, codes_in_row
from jhpt.kernels.pallas import (
    LANES,
    PARAMS,
    WARPS,
    in_blocks,
    load,
    over,
    pairs_per_warp,
    pairs_per_warpgroup,
    row_per_warp,
    row_per_warpgroup,
    store,
)
from jhpt.kernels.segment_quantize import reference
from jhpt.kernels.segments import Group, Knee, Quantized, most

BLOCK = 4096
"""Numbers that a warpgroup holds at a time: 32 in a thread."""
WARP_GROUP = 1024
"""Larger groups are shared by the four warps."""
MOST = 8192
"""Larger groups do not fit in registers."""


class Placement(NamedTuple):
    """A layout for groups, and its smallest block: so many groups of so many numbers."""

    groups: int
    members: int
    layout: Any


def quantize(
    x: jax.Array, *, bits: Bits, group: Group, knee: Knee, rows: jax.Array | None, seed: jax.Array | None
) -> Quantized:
    """See `segment_quantize`; `rows` have to be rows of x.

    By tensor the range has to be known before the first code: two passes, which the compiler fuses just as well, so
    they are left to the reference, and so are groups of more than 8,192.
    """
    members = group if isinstance(group, int) else x.shape[1]
    if group == "tensor" or members > MOST or not x.size or (rows is not None and not rows.size):
        return reference.quantize(x, bits=bits, group=group, knee=knee, rows=rows, seed=seed)
    in_row, place = -(-x.shape[1] // members), placement(members, bits, x.dtype)
    if rows is not None and in_row < place.groups:  # a row alone would fill its block with empty groups
        x, rows = x[rows], None
    count = len(x) if rows is None else len(rows)

    x = jnp.pad(x, ((0, 0), (0, in_row * members - x.shape[1])))
    x = x.reshape(1 if rows is None else len(x), -1, members)  # without a gather all rows are one
    resident, filled = max(x.shape[1], place.groups), -(-members // place.members) * place.members
    x = jnp.pad(x, ((0, 0), (0, resident - x.shape[1]), (0, filled - members)))
    at_once = max(min(BLOCK // filled, resident) // place.groups, 1) * place.groups
    pitch = codes_in_row(in_row * members, bits, group)
    picked = 1 if rows is None else count

    fitted = isinstance(knee.centre, jax.Array) or isinstance(knee.codes, jax.Array)
    inputs = {
        "x": x if bits == 8 else x.reshape(*x.shape[:2], -1, 2),
        "rows": rows,
        "seed": None if seed is None else jnp.reshape(seed, 1).astype(jnp.uint32),
        "knee": jnp.array(knee, jnp.float32) if fitted else None,
    }
    codes, ranges = plgpu.kernel(
        partial(
            _body,
            bits=bits,
            knee=knee,
            layout=place.layout,
            at_once=at_once,
            pitches=(pitch, pitch // in_row),
        ),
        out_type=(
            jax.ShapeDtypeStruct((picked, resident, filled * bits // 8), jnp.uint8),
            jax.ShapeDtypeStruct((picked, resident), jnp.bfloat16),
        ),
        grid=(picked, resident // at_once),
        grid_names=("row", "step"),
        kernel_name="segment_quantize",
        compiler_params=PARAMS,
    )(inputs)
    real = count * in_row // picked
    codes = codes[:, :real, : pitch // in_row * bits // 8].reshape(count, -1)
    return Quantized(codes, ranges[:, :real].reshape(count, -1))


def placement(members: int, bits: Bits, dtype: Any) -> Placement:
    """Groups over warps; at 4 bits the two numbers of a byte lie in one thread."""
    shared = members > WARP_GROUP
    if bits == 4:
        columns = 2 * LANES * (WARPS if shared else 1)
        return Placement(1 if shared else WARPS, columns, pairs_per_warpgroup() if shared else pairs_per_warp())
    vector = 16 // jnp.dtype(dtype).itemsize  # bytes of the widest access
    if shared:
        return Placement(1, WARPS * LANES * vector, row_per_warpgroup(vector))
    lanes = min(LANES, 1 << (-(-members // vector) - 1).bit_length())
    return Placement(WARPS * LANES // lanes, lanes * vector, row_per_warp(vector, lanes))


def _body(
    inputs: dict[str, Any],
    codes_ref: Any,
    ranges_ref: Any,
    *,
    bits: Bits,
    knee: Knee,
    layout: Any,
    at_once: int,
    pitches: tuple[int, int],
) -> None:
    """Groups [at_once, members], at 4 bits [at_once, members / 2, 2].

    pitches: codes from row to row and from group to group.
    """
    row = jax.lax.axis_index("row")
    source = row if inputs["rows"] is None else inputs["rows"][row]
    if inputs["knee"] is not None:
        knee = Knee(inputs["knee"][0], inputs["knee"][1])

    def work(start: jax.Array) -> None:
        here = pl.ds(start, at_once)
        x = load(inputs["x"].at[source, here], layout).astype(jnp.float32)
        finite = jnp.abs(x) < jnp.inf
        largest = jnp.where(finite, jnp.abs(x), 0)
        while largest.ndim > 1:
            largest = jnp.max(largest, -1)
        ranges = reference.rounded_up(largest)
        store(ranges_ref.at[row, here], ranges)

        noise = None
        if inputs["seed"] is not None:
            position = (row * pitches[0] + start * pitches[1]).astype(jnp.uint32)
            word = reference.mixed(position + _offsets(x.shape, pitches[1], layout))
            word = reference.mixed(word ^ inputs["seed"][0])
            noise = (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)
        codes = reference.encode(x, over(ranges.astype(jnp.float32), x.shape, layout), bits, knee, noise)
        codes = jnp.where(finite, codes, -most(bits) - 1).astype(jnp.int8)
        if bits == 4:
            half = plgpu.broadcasted_iota(jnp.int32, x.shape, 2, layout=layout)
            codes = jnp.sum((codes.astype(jnp.int32) & 0xF) << (4 * half), -1)
        store(codes_ref.at[row, here], codes.astype(jnp.uint8))

    in_blocks(work, ranges_ref.shape[1], at_once, "step")


def _offsets(shape: tuple[int, ...], pitch: int, layout: Any) -> jax.Array:
    """Where every number of a block lies from its first one, groups being `pitch` apart."""
    steps = (pitch, 1) if len(shape) == 2 else (pitch, 2, 1)
    axes = [plgpu.broadcasted_iota(jnp.uint32, shape, dim, layout=layout) for dim in range(len(shape))]
    return sum(jnp.uint32(step) * axis for step, axis in zip(steps, axes, strict=True))
