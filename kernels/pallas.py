"""Functions that the Mosaic GPU kernels share: layouts of a block in a warpgroup's registers, and its largest numbers.

A kernel of one warpgroup, 128 threads, loads a block from device memory directly into registers.  A layout says which
thread holds which numbers.  These layouts put `vector` neighbours of a row into one access and neighbouring accesses
into neighbouring lanes, so that a warp reads whole lines.  Many resident warps, not a pipeline, hide the latency.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
"""The default since jax 0.12, set for older versions."""

WARPS, LANES = 4, 32

_INDEX = inspect.signature(plgpu.load).parameters.get("idx")

WHOLE: dict[str, Any] = {"idx": ()} if _INDEX and _INDEX.default is inspect.Parameter.empty else {}
"""The index of a whole reference: jax 0.10 requires it, 0.11 deprecates it, and 0.12 no longer has it."""


def load(ref: Any, layout: Any) -> jax.Array:
    """Device memory to registers."""
    return plgpu.load(ref, layout=layout, optimized=False, **WHOLE)  # optimized: for shared memory alone


def store(ref: Any, value: jax.Array) -> None:
    """Registers to device memory, also if a row has only a few bytes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # before jax 0.12, where no store asks for whole sectors
        ref[...] = value


def in_blocks(body: Callable[[Any], None], total: int, size: int, axis: str) -> None:
    """Calls body(start) for the block of this grid step, start ... start + size of `total`; the grid has total // size
    steps.

    If size does not divide `total`, the last step also computes the last block, which overlaps with the block before
    and gives the same results there.
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
    """Broadcasts one number for every row, [R] -> [R, ...], or one number for all."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, shape, tuple(range(row.ndim))), layout)


def largest(keys: jax.Array, k: int, *, bits: int, layout: Any) -> jax.Array:
    """Whether each of keys[R, N] or [N], int32, is among the k largest of its row; of equal keys the first are: bool.

    The smallest chosen key is found bit by bit, by counting the keys that are not smaller, until every row has k of
    them.  If more are left after all bits, these keys are equal, and the last chosen position is found in the same way.

    Args:
      bits: 32, or 31 if no key is negative.
    """
    *rows, columns = keys.shape

    def full(value: int | jax.Array) -> jax.Array:
        return plgpu.layout_cast(jnp.full(rows, value, jnp.int32), layout.reduce(1)) if rows else jnp.int32(value)

    def count(holds: jax.Array) -> jax.Array:
        return jnp.sum(holds.astype(jnp.int32), -1)

    def refine(state: Any) -> Any:
        bit, least, number, _ = state
        candidate = least ^ (jnp.int32(1) << bit)
        counted = count(keys >= over(candidate, keys.shape, layout))
        least, number = jnp.where(counted >= k, candidate, least), jnp.where(counted >= k, counted, number)
        return bit - 1, least, number, jnp.max(number) if rows else number

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
        """Whether keys are above the smallest chosen key, or equal to it up to a position."""
        return keys > jnp.where(positions <= over(last, keys.shape, layout), least - 1, least)

    def narrow(index: jax.Array, last: jax.Array) -> jax.Array:
        candidate = last ^ (jnp.int32(1) << (width - 1 - index))
        return jnp.where(count(up_to(candidate - 1)) < k, candidate, last)

    tied = most > k
    last = jax.lax.fori_loop(0, jnp.where(tied, width, 0), narrow, full(jnp.where(tied, 0, columns)))
    return up_to(last)
