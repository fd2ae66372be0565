"""How a device holds parameters between uses: whole, or its share over the data axes (ZeRO).

A share is gathered before use and its gradient scattered after it; both travel in the compute dtype.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.sharding.rules import IN_FLOAT32, path_name


@dataclass(frozen=True)
class Storage:
    """For the parameters of one degree: their data axes, how many ranks those are, and the dtype models compute in.

    partial: the tensor axes where each rank sees only its rows of a sequence, so that gradients of parameters which are
    not on these axes are parts, too.
    """

    data: tuple[str, ...]
    ranks: int
    dtype: Any
    partial: tuple[str, ...] = ()

    def gathered(self, params: Any, specs: Any) -> Any:
        """Every share made whole, in the compute dtype; what models use in float32 stays so.

        specs: partitions of these very leaves.
        """

        def gather(path: tuple[Any, ...], leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            leaf = leaf if IN_FLOAT32.search(path_name(path)) else leaf.astype(self.dtype)
            dim = self._shared_dim(spec)
            return leaf if dim is None else jax.lax.all_gather(leaf, self.data, axis=dim, tiled=True)

        return jax.tree_util.tree_map_with_path(gather, params, specs)

    def scattered(self, gradients: Any, specs: Any) -> Any:
        """Of every gradient whose parameter is held in shares: this rank's share of its sum over the ranks."""

        def scatter(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            dim = self._shared_dim(spec)
            if dim is None:
                return leaf
            return jax.lax.psum_scatter(leaf.astype(self.dtype), self.data, scatter_dimension=dim, tiled=True)

        return jax.tree.map(scatter, gradients, specs)

    def summed(self, gradients: Any, specs: Any) -> Any:
        """What is not scattered: its sum over the ranks.  All in float32, as they are stored."""

        def add(path: tuple[Any, ...], leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            axes = self.data if self.ranks > 1 and self._shared_dim(spec) is None else ()
            axes += self.partial if not _on(spec, self.partial) else ()
            if axes:
                wire = leaf.dtype if IN_FLOAT32.search(path_name(path)) else self.dtype
                leaf = jax.lax.psum(leaf.astype(wire), axes)
            return leaf.astype(jnp.float32)

        return jax.tree_util.tree_map_with_path(add, gradients, specs)

    def _shared_dim(self, spec: PartitionSpec) -> int | None:
        return next((dim for dim, axes in enumerate(spec) if set(_names(axes)) & set(self.data)), None)


def one_layer(specs: Any) -> Any:
    """Partitions of one layer of stacked leaves."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _on(spec: PartitionSpec, axes: tuple[str, ...]) -> bool:
    return any(set(_names(names)) & set(axes) for names in spec)


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
