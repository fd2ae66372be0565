"""The Pallas kernel: gather, range, codes and packing of groups in registers."""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.core.compression import Bits, codes_in_row
from jhpt.kernels.pallas import LANES, PARAMS, WARPS, in_blocks, load, over, row_per_warp, row_per_warpgroup, store
from jhpt.kernels.segment_quantize import reference
from jhpt.kernels.segments import Knee, Quantized

BLOCK = 4096
"""Numbers that a warpgroup holds at a time: 32 in a thread."""
WARP_GROUP = 1024
"""The four warps share larger parts of groups."""
MOST = 8192
"""Larger groups do not fit in registers."""


class Placement(NamedTuple):
    """A layout for parts of groups.  groups, members: parts in its smallest block, and numbers in each."""

    groups: int
    members: int
    layout: Any


def quantize(
    x: jax.Array, *, bits: Bits, group: int, knee: Knee, rows: jax.Array | None, seed: jax.Array | None
) -> Quantized:
    """See `segment_quantize`; `rows` have to be rows of x.

    At 8 bits a group is one part; at 4 bits it is two halves, and a byte takes a code from each.

    It calls the reference for groups of more than 8,192 numbers, which do not fit in registers.
    """
    width = codes_in_row(x.shape[1], group)
    if group > MOST or not x.size or (rows is not None and not rows.size):
        return reference.quantize(x, bits=bits, group=group, knee=knee, rows=rows, seed=seed)
    parts, in_row = 8 // bits, width // group
    part = group // parts
    place = placement(part, x.dtype)
    if rows is not None and in_row < place.groups:  # a row alone would fill its block with empty groups
        x, rows = x[rows], None
    count = len(x) if rows is None else len(rows)

    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    x = x.reshape(1 if rows is None else len(x), -1, parts, part)  # without a gather all rows are one
    resident, filled = max(x.shape[1], place.groups), -(-part // place.members) * place.members
    x = jnp.pad(x, ((0, 0), (0, resident - x.shape[1]), (0, 0), (0, filled - part)))
    step_groups = max(min(BLOCK // (parts * filled), resident) // place.groups, 1) * place.groups
    picked = 1 if rows is None else count

    fitted = isinstance(knee.centre, jax.Array) or isinstance(knee.codes, jax.Array)
    inputs = {
        "x": x,
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
            step_groups=step_groups,
            pitches=(width, group, part),
        ),
        out_type=(
            jax.ShapeDtypeStruct((picked, resident, filled), jnp.uint8),
            jax.ShapeDtypeStruct((picked, resident), jnp.bfloat16),
        ),
        grid=(picked, resident // step_groups),
        grid_names=("row", "step"),
        kernel_name="segment_quantize",
        compiler_params=PARAMS,
    )(inputs)
    real = count * in_row // picked
    return Quantized(codes[:, :real, :part].reshape(count, -1), ranges[:, :real].reshape(count, -1))


def placement(part: int, dtype: Any) -> Placement:
    """The placement of parts of groups on warps."""
    vector = 16 // jnp.dtype(dtype).itemsize  # bytes of the widest access
    if part > WARP_GROUP:
        return Placement(1, WARPS * LANES * vector, row_per_warpgroup(vector))
    lanes = min(LANES, 1 << (-(-part // vector) - 1).bit_length())
    return Placement(WARPS * LANES // lanes, lanes * vector, row_per_warp(vector, lanes))


def _body(
    inputs: dict[str, Any],
    codes_ref: Any,
    ranges_ref: Any,
    *,
    bits: Bits,
    knee: Knee,
    layout: Any,
    step_groups: int,
    pitches: tuple[int, int, int],
) -> None:
    """Parts [step_groups, numbers] of groups.

    pitches: codes from row to row, from group to group and from part to part.
    """
    row = jax.lax.axis_index("row")
    source = row if inputs["rows"] is None else inputs["rows"][row]
    if inputs["knee"] is not None:
        knee = Knee(inputs["knee"][0], inputs["knee"][1])

    def work(start: jax.Array) -> None:
        here = pl.ds(start, step_groups)
        each = [load(inputs["x"].at[source, here, part], layout).astype(jnp.float32) for part in range(8 // bits)]
        ranges = reference.rounded_up(reduce(jnp.maximum, (_largest(x) for x in each)))
        store(ranges_ref.at[row, here], ranges)
        wide = over(ranges.astype(jnp.float32), each[0].shape, layout)
        codes = []
        for part, x in enumerate(each):
            noise = None
            if inputs["seed"] is not None:
                position = (row * pitches[0] + start * pitches[1] + part * pitches[2]).astype(jnp.uint32)
                word = reference.mixed(position + _offsets(x.shape, pitches[1], layout))
                word = reference.mixed(word ^ inputs["seed"][0])
                noise = (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)
            codes.append(reference.encode(x, wide, bits, knee, noise) & (2**bits - 1))
        packed = codes[0] if bits == 8 else codes[0] | (codes[1] << 4)
        store(codes_ref.at[row, here], packed.astype(jnp.uint8))

    in_blocks(work, ranges_ref.shape[1], step_groups, "step")


def _largest(x: jax.Array) -> jax.Array:
    """The largest magnitude of every row; infinite if a number is NaN, which a maximum might lose, or beyond
    `LARGEST`."""
    size = jnp.abs(x)
    return jnp.max(jnp.where(size <= reference.LARGEST, size, jnp.inf), -1)


def _offsets(shape: tuple[int, ...], pitch: int, layout: Any) -> jax.Array:
    """The distance of every number of a block from its first, if groups are `pitch` numbers apart."""
    axes = [plgpu.broadcasted_iota(jnp.uint32, shape, dim, layout=layout) for dim in range(2)]
    return jnp.uint32(pitch) * axes[0] + axes[1]
