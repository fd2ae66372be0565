"""A layer's parameters as one contiguous array, a bucket: one copy to or from the host instead of one for each leaf.

Leaves lie one after the other, each from a multiple of `ALIGN` numbers on.  Zeros fill the gaps, and optimizers that
work number by number leave them zero.  Leaves with weight decay come first, so that one comparison with a position says
which numbers decay.  Packing and unpacking are exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.sharding.partition import path_name
from jhpt.sharding.types import Params

ALIGN = 128
"""Numbers; 512 bytes of float32, wider than any access of a GPU."""


@dataclass(frozen=True)
class Bucket:
    """Where every leaf of a layer lies.

    tree: the tree structure.  shapes, offsets: of the leaves, in numbers.  size: numbers in the bucket.
    decayed: weight decay acts on the numbers before this position.
    """

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    decayed: int

    def packed(self, params: Params) -> jax.Array:
        """A layer's tree -> [size], in the dtype of its first leaf."""
        leaves = self.tree.flatten_up_to(params)
        order = sorted(range(len(leaves)), key=lambda at: self.offsets[at])
        pieces, end = list[jax.Array](), 0
        for at, stop in zip(order, [*(self.offsets[at] for at in order[1:]), self.size], strict=True):
            flat = leaves[at].ravel()
            pieces.append(jnp.pad(flat, (0, stop - self.offsets[at] - flat.size)))
            end = stop
        assert end == self.size
        return jnp.concatenate(pieces)

    def unpacked(self, flat: jax.Array) -> Any:
        """The inverse of `packed`."""
        leaves = [
            jax.lax.slice_in_dim(flat, offset, offset + math.prod(shape)).reshape(shape)
            for shape, offset in zip(self.shapes, self.offsets, strict=True)
        ]
        return jax.tree.unflatten(self.tree, leaves)

    def stacked(self, layers: Params, columns: slice) -> np.ndarray:
        """A slice of `packed` of many layers, in the host's memory: leaves [*L, ...] -> [*L, columns]."""
        leaves, (start, stop, _) = self.tree.flatten_up_to(layers), columns.indices(self.size)
        leading = leaves[0].shape[: leaves[0].ndim - len(self.shapes[0])]
        rows = np.zeros((*leading, stop - start), leaves[0].dtype)
        for leaf, offset, shape in zip(leaves, self.offsets, self.shapes, strict=True):
            first, last = max(offset, start), min(offset + math.prod(shape), stop)
            if first < last:
                rows[..., first - start : last - start] = leaf.reshape(*leading, -1)[
                    ..., first - offset : last - offset
                ]
        return rows

    def views(self, row: np.ndarray) -> list[np.ndarray]:
        """The leaves of a row in the host's memory, in the tree's order."""
        return [
            row[offset : offset + math.prod(shape)].reshape(shape)
            for shape, offset in zip(self.shapes, self.offsets, strict=True)
        ]

    @property
    def decays(self) -> jax.Array:
        """bool [size]."""
        return jnp.arange(self.size) < self.decayed


def bucket_of(layer: Params, decays: Callable[[str], bool] = lambda path: False, parts: int = 1) -> Bucket:
    """The bucket of a layer of these shapes.

    Args:
      layer: a tree of arrays or shapes, all of one dtype.
      decays: whether weight decay acts on the leaf of this path.
      parts: equal shares into which it can be cut, each of a multiple of `ALIGN` numbers.

    Raises:
      ValueError: leaves of several dtypes, which one array cannot hold.
    """
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(layer)]
    dtypes = {jnp.dtype(leaf.dtype) for _, leaf in named}
    if len(dtypes) > 1:
        raise ValueError(f"one bucket holds numbers of one dtype, these are {', '.join(sorted(map(str, dtypes)))}")
    order = sorted(range(len(named)), key=lambda at: not decays(named[at][0]))
    offsets, end, decayed = [0] * len(named), 0, 0
    for at in order:
        path, leaf = named[at]
        offsets[at] = end
        end += -(-math.prod(leaf.shape) // ALIGN) * ALIGN
        decayed = end if decays(path) else decayed
    end = -(-end // (ALIGN * parts)) * ALIGN * parts
    shapes = tuple(tuple(leaf.shape) for _, leaf in named)
    return Bucket(jax.tree.structure(layer), shapes, tuple(offsets), end, decayed)
