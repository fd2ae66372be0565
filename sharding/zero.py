"""How a device holds parameters between uses: whole, or its share over the data axes (ZeRO).

A share is gathered before use and its gradient scattered after it; both travel in the compute dtype.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.sharding.compression.gradients import GradientReduction
from jhpt.sharding.partition import IN_FLOAT32, MATRICES, path_name

SMALL = 1 << 19
"""Bytes up to which tensors are summed together with others.  At 100 GB/s half a MiB travels for about as long as a
collective takes to begin, some microseconds; what is larger is not worth a copy."""


@dataclass(frozen=True)
class Storage:
    """For the parameters of one degree: their data axes, how many ranks those are, and the dtype models compute in.

    partial: the tensor axes where each rank sees only its rows of a sequence, so that gradients of parameters which are
    not on these axes are parts, too.
    apart: gradients of matrices are left to `gradients`, which sums them over the data axes in few bits.
    """

    data: tuple[str, ...]
    ranks: int
    dtype: Any
    partial: tuple[str, ...] = ()
    apart: bool = False

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
        """Of every gradient whose parameter is held in shares: this rank's share of its sum over the ranks.

        What is used in float32 is small and never held in shares (`rules.parameter_spec`).
        """

        def scatter(path: tuple[Any, ...], leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            dim = self._shared_dim(spec)
            if dim is None or self._apart(path):
                return leaf
            return jax.lax.psum_scatter(leaf.astype(self.dtype), self.data, scatter_dimension=dim, tiled=True)

        return jax.tree_util.tree_map_with_path(scatter, gradients, specs)

    def summed(self, gradients: Any, specs: Any) -> Any:
        """What is not scattered: its sum over the ranks.  All in float32, as they are stored.

        Small ones travel together: every collective costs its latency.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        done = [leaf for _, leaf in leaves]
        together: dict[tuple[Any, ...], list[int]] = {}
        for index, ((path, leaf), spec) in enumerate(zip(leaves, _partitions(specs), strict=True)):
            here = self.ranks > 1 and self._shared_dim(spec) is None and not self._apart(path)
            axes = self.data if here else ()
            axes += self.partial if not _on(spec, self.partial) else ()
            if axes:
                wire = jnp.dtype(leaf.dtype if IN_FLOAT32.search(path_name(path)) else self.dtype)
                alone = leaf.size * wire.itemsize > SMALL
                together.setdefault((axes, wire, index if alone else None), []).append(index)
        for (axes, wire, _), indices in together.items():
            sums = summed_together([done[index].astype(wire) for index in indices], axes)
            for index, leaf in zip(indices, sums, strict=True):
                done[index] = leaf
        return jax.tree.unflatten(tree, [leaf.astype(jnp.float32) for leaf in done])

    def reduction(self, spec: PartitionSpec) -> GradientReduction:
        """How the gradient of a leaf of this partition is summed in few bits."""
        return GradientReduction(self.data, self.ranks, self._shared_dim(spec))

    def _apart(self, path: tuple[Any, ...]) -> bool:
        return self.apart and MATRICES.search(path_name(path)) is not None

    def _shared_dim(self, spec: PartitionSpec) -> int | None:
        return next((dim for dim, axes in enumerate(spec) if set(names_of(axes)) & set(self.data)), None)


def summed_together(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Every array's sum over the ranks of these axes, in one collective; the arrays are of one dtype."""
    if len(leaves) == 1:
        return [jax.lax.psum(leaves[0], axes)]
    embedding_and_head = list(itertools.accumulate(leaf.size for leaf in leaves))
    parts = jnp.split(jax.lax.psum(jnp.concatenate([leaf.ravel() for leaf in leaves]), axes), embedding_and_head[:-1])
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def one_layer(specs: Any) -> Any:
    """Partitions of one layer of stacked leaves."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _partitions(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _on(spec: PartitionSpec, axes: tuple[str, ...]) -> bool:
    return any(set(names_of(names)) & set(axes) for names in spec)


def names_of(axes: Any) -> tuple[str, ...]:
    """Mesh axes of one dimension of a partition."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
