"""What the Mosaic GPU kernels share: how a block lies in a warpgroup's registers, and which of its numbers are largest.

A kernel of one warpgroup, 128 threads, takes a block from device memory straight into registers.  A layout says which
thread holds what; these put `vector` neighbours of a row into one access and neighbouring accesses into neighbouring
lanes, so that a warp reads whole lines.  Warps are resident in numbers: they, not a pipeline, cover the latency.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
"""The default since jax 0.12, said for older ones."""

WARPS, LANES = 4, 32

_INDEX = inspect.signature(plgpu.load).parameters.get("idx")

WHOLE: dict[str, Any] = {"idx": ()} if _INDEX and _INDEX.default is inspect.Parameter.empty else {}
"""The index of all of a reference: jax 0.10 requires it, 0.11 deprecates it, and 0.12 no longer has it."""


def load(ref: Any, layout: Any) -> jax.Array:
    """What a reference to device memory holds, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False, **WHOLE)  # optimized: for shared memory alone


def store(ref: Any, value: jax.Array) -> None:
    """Registers to device memory, however few bytes a row of them makes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # before jax 0.12, where no store asks for whole sectors
        ref[...] = value


def in_blocks(body: Callable[[Any], None], total: int, size: int, axis: str) -> None:
    """body(start) for the block of this step of a grid of total // size, start ... start + size of `total`.

    Where size does not divide, the last step goes on to the last block; what that shares with the block before comes
    out the same once more.
    """
    step = jax.lax.axis_index(axis)
    if total % size == 0:
        body(step * size)
    else:
        blocks = jnp.where(step == total // size - 1, 2, 1)
        jax.lax.fori_loop(0, blocks, lambda more, _: body(jnp.minimum((step + more) * size, total - size)), None)


def row_per_warp(vector: int, lanes: int = LANES) -> Any:
    """Blocks [4 n, 32 vector m]: no row crosses a warp.  With fewer lanes to a row: [128 / lanes n, lanes vector m]."""
    rows, columns = LANES // lanes, lanes * vector
    if rows == 1:
        tiling = plgpu.Tiling(((WARPS, columns), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARPS * rows, columns), (rows, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def row_per_warpgroup(vector: int) -> Any:
    """Blocks [n, 128 vector m]: all four warps share every row."""
    tiling = plgpu.Tiling(((1, WARPS * LANES * vector), (LANES * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def by_warpgroup(vector: int) -> Any:
    """Blocks [128 vector m]."""
    tiling = plgpu.Tiling(((WARPS * LANES * vector,), (LANES * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def over(row: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """One number for every row, [R] -> [R, ...]; or one for all."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, shape, tuple(range(row.ndim))), layout)


def largest(keys: jax.Array, k: int, *, bits: int, layout: Any) -> jax.Array:
    """Which are the k largest of every row of keys[R, N] or [N], int32; of equal ones those at lower positions: bool.

    The least key taken is found bit by bit, by counting the keys that are not less, until every row has k of them.
    Where all bits leave more, the last keys are equal, and the last position taken is found likewise.

    Args:
      bits: 32, or 31 where no key is negative.
    """
    *rows, columns = keys.shape

    def full(value: int | jax.Array) -> jax.Array:
        return plgpu.layout_cast(jnp.full(rows, value, jnp.int32), layout.reduce(1)) if rows else jnp.int32(value)

    def count(holds: jax.Array) -> jax.Array:
        return jnp.sum(holds.astype(jnp.int32), -1)

    def refine(state: Any) -> Any:
        bit, least, taken, _ = state
        candidate = least ^ (jnp.int32(1) << bit)
        counted = count(keys >= over(candidate, keys.shape, layout))
        least, taken = jnp.where(counted >= k, candidate, least), jnp.where(counted >= k, counted, taken)
        return bit - 1, least, taken, jnp.max(taken) if rows else taken

    lowest = -(1 << 31) if bits == 32 else 0
    _, least, _, most = jax.lax.while_loop(
        lambda state: (state[0] >= 0) & (state[3] > k),
        refine,
        (jnp.int32(bits - 1), full(lowest), full(columns), jnp.int32(columns)),
    )
    least = over(least, keys.shape, layout)
    positions = plgpu.broadcasted_iota(jnp.int32, keys.shape, len(rows), layout=layout)
    width = (columns - 1).bit_length()

    def up_to(last: jax.Array) -> jax.Array:
        """Keys above the least, and those that equal it up to a position."""
        return keys > jnp.where(positions <= over(last, keys.shape, layout), least - 1, least)

    def narrow(index: jax.Array, last: jax.Array) -> jax.Array:
        candidate = last ^ (jnp.int32(1) << (width - 1 - index))
        return jnp.where(count(up_to(candidate - 1)) < k, candidate, last)

    tied = most > k
    last = jax.lax.fori_loop(0, jnp.where(tied, width, 0), narrow, full(jnp.where(tied, 0, columns)))
    return up_to(last)
