"""Digests of arrays, which do not depend on how an array is laid out, so that a restore under any plan is checked.

For an array with entries of at most 32 bits, whose bits are b_i at position i of its row-major order, and wrapping
arithmetic:

    digest = (sum_i b_i m_i mod 2^32,  sum_i b_i n_i mod 2^32)      m_i = A i + B, n_i = C i + D, made odd

A flipped bit changes b_i by +-2^k, and an odd multiple of 2^k is never 0 mod 2^32: every single flip is noticed.  Sums
can be taken in any order, so each process adds up what it holds.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.sharding.gather import gathered
from jhpt.sharding.types import PyTree
from jhpt.training.layered import Layered

MULTIPLIERS = ((0x9E3779B1, 0x85EBCA6B), (0xC2B2AE35, 0x27D4EB2F))
"""(A, B) and (C, D): large odd numbers."""

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""By the bytes of an entry."""

PIECE = 1 << 22
"""Entries that are added up at a time on the host, so that little memory is needed."""


class Part(NamedTuple):
    """A block of an array; starts: its first index along each axis; shape: of the whole array."""

    data: Any
    starts: Sequence[int]
    shape: Sequence[int]


def digests(tree: PyTree) -> dict[str, str]:
    """The digest of every leaf by its path, the same on every process; leaves are jax or numpy arrays or `Layered`.

    All processes must call it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    sums = np.stack([_own_sums(leaf) for _, leaf in leaves]) if leaves else np.zeros((0, 2), np.uint32)
    if jax.process_count() > 1:
        sums = gathered(sums).sum(axis=0, dtype=np.uint32)
    dtypes = [np.dtype(leaf.dtype).name for _, leaf in leaves]
    return {name: f"{dtype} {a:08x}{b:08x}" for name, dtype, (a, b) in zip(names, dtypes, sums.tolist(), strict=True)}


def different(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The leaves whose digests are not those expected.  Those that are in one of the two only do not count, nor those
    that were restored in another dtype, whose bits differ."""
    same_dtype = [name for name in found if name in expected and found[name].split()[0] == expected[name].split()[0]]
    return [name for name in same_dtype if found[name] != expected[name]]


def _own_sums(leaf: Any) -> np.ndarray:
    """[2] uint32: the sums over what this process has to add up of a leaf."""
    if isinstance(leaf, Layered):
        total = np.zeros(2, np.uint32)
        for index in range(leaf.shape[0]):  # all processes read every layer
            total += _sums_of(Part(leaf.layer(index)[None], (index,) + (0,) * (len(leaf.shape) - 1), leaf.shape))
        return total if jax.process_index() == 0 else np.zeros(2, np.uint32)
    if not isinstance(leaf, jax.Array):
        whole = Part(np.asarray(leaf), (0,) * np.ndim(leaf), np.shape(leaf))
        return _sums_of(whole) if jax.process_index() == 0 else np.zeros(2, np.uint32)
    total = np.zeros(2, np.uint32)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            starts = [part.indices(size)[0] for part, size in zip(shard.index, leaf.shape, strict=True)]
            total += _sums_of(Part(shard.data, starts, leaf.shape))
    return total


def _sums_of(part: Part) -> np.ndarray:
    """[2] uint32: the sums over a part, on its device, or in pieces on the host."""
    if isinstance(part.data, jax.Array) and next(iter(part.data.devices())).platform != "cpu":
        starts = jnp.asarray(part.starts, jnp.uint32)
        return np.asarray(_on_device(part.data, starts, tuple(part.shape)))
    data = np.asarray(part.data)
    bits = np.ascontiguousarray(data).reshape(-1).view(BITS[data.dtype.itemsize])
    total = np.zeros(2, np.uint32)
    for first in range(0, bits.size, PIECE):
        piece = bits[first : first + PIECE].astype(np.uint32)
        local = np.arange(first, first + piece.size, dtype=np.uint64)
        total += _sums(np, piece, _positions(local, data.shape, part).astype(np.uint32))
    return total


@partial(jax.jit, static_argnums=2)
def _on_device(data: jax.Array, starts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return sums_of_bits(data, starts, shape)


def sums_of_bits(data: jax.Array, starts: Any = None, shape: Sequence[int] | None = None) -> jax.Array:
    """[2] uint32: the sums over a part of an array of this shape, which starts there; by default over all of it."""
    starts, shape = (0,) * data.ndim if starts is None else starts, shape or data.shape
    bits = jax.lax.bitcast_convert_type(data, BITS[data.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(data.shape, jnp.uint32)
    for axis, size in enumerate(shape):
        here = jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis) + jnp.uint32(starts[axis])
        index = index * jnp.uint32(size % 2**32) + here
    return _sums(jnp, bits, index)


def _positions(local: np.ndarray, sizes: Sequence[int], part: Part) -> np.ndarray:
    """Positions in the whole array of entries at these positions of the part, which has these sizes."""
    if tuple(sizes) == tuple(part.shape):
        return local
    stride, position = 1, np.zeros(local.shape, np.uint64)
    for size, start, whole in zip(reversed(sizes), reversed(part.starts), reversed(part.shape), strict=True):
        position += (local % np.uint64(size) + np.uint64(start)) * np.uint64(stride)
        local = local // np.uint64(size)
        stride *= whole
    return position


def _sums(xp: Any, bits: Any, index: Any) -> Any:
    """[2] the two sums; arrays of numpy or of jax."""
    multiples = [(index * np.uint32(a) + np.uint32(b)) | np.uint32(1) for a, b in MULTIPLIERS]
    return xp.stack([xp.sum(bits * each, dtype=np.uint32) for each in multiples])
