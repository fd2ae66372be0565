"""Parameters between uses: whole on every device, or sharded over the data axes (ZeRO, also called FSDP).

    before use   all-gather       W[D/dp, F] -> W[D, F]
    after use    reduce-scatter   dW[D, F] {U_dp} -> dW[D/dp, F]

With hybrid sharding (HSDP) dp is a part of the data ranks, and shares are all-reduced over the others once in a step.
Both communicate in the compute dtype.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.sharding.compression.gradients import GradientReduction
from jhpt.sharding.partition import IN_FLOAT32, MATRICES, names_of, path_name
from jhpt.sharding.types import KeyPath, Specs, Tree

SMALL = 1 << 19
"""Bytes up to which tensors share an all-reduce with others.  At 100 GB/s half a MiB takes some microseconds, about as
long as the latency of a collective; larger tensors are not worth the copy."""


@dataclass(frozen=True)
class Storage:
    """The parameters of one tensor degree: their data axes, those of them over which they are sharded, number of data
    ranks, and the dtype that models compute in.

    partial: the tensor axes over which sequences are cut, so that gradients of parameters which are not cut over these
      axes have to be reduced over them, too.
    apart: `compression.gradients` reduces the gradients of matrices, in low precision.
    """

    data: tuple[str, ...]
    shard: tuple[str, ...]
    ranks: int
    dtype: jnp.dtype
    partial: tuple[str, ...] = ()
    apart: bool = False

    def gathered(self, params: Tree, specs: Specs) -> Any:
        """The all-gather of every shard, in the compute dtype; parameters that models use in float32 stay in float32.

        specs: partitions of the leaves of `params`.
        """

        def gather(path: KeyPath, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            leaf = leaf if IN_FLOAT32.search(path_name(path)) else leaf.astype(self.dtype)
            dim = self._shared_dim(spec)
            return leaf if dim is None else jax.lax.all_gather(leaf, self.shard, axis=dim, tiled=True)

        return jax.tree_util.tree_map_with_path(gather, params, specs)

    def scattered(self, gradients: Tree, specs: Specs, beside: Tree | None = None) -> Any:
        """The reduce-scatter of every gradient whose parameter is sharded; the others are returned as they are.

        Parameters that are used in float32 are small and never sharded (`partition.parameter_spec`).

        beside: what is computed at the same time (`_received`).
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        done = [leaf for _, leaf in leaves]
        for index, ((path, leaf), spec) in enumerate(zip(leaves, _partitions(specs), strict=True)):
            dim = self._shared_dim(spec)
            if dim is not None and not self._apart(path):
                wire = leaf.astype(self.dtype)
                done[index] = jax.lax.psum_scatter(wire, self.shard, scatter_dimension=dim, tiled=True)
        return jax.tree.unflatten(tree, _received(done, [leaf for _, leaf in leaves], beside))

    def summed(self, gradients: Tree, specs: Specs, beside: Tree | None = None) -> Any:
        """The all-reduce of every gradient over the data ranks that hold the same of it: all, or with hybrid sharding,
        where it is reduce-scattered, one of each group.  Returns all in float32, as they are stored.

        Small gradients share a collective, because each collective costs its latency.

        beside: what is computed at the same time (`_received`).
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        done = [leaf for _, leaf in leaves]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, ((path, leaf), spec) in enumerate(zip(leaves, _partitions(specs), strict=True)):
            unreduced = self.ranks > 1 and not self._apart(path)
            axes = tuple(axis for axis in self.data if unreduced and not _on(spec, (axis,)))
            axes += self.partial if not _on(spec, self.partial) else ()
            if axes:
                wire = jnp.dtype(leaf.dtype if IN_FLOAT32.search(path_name(path)) else self.dtype)
                alone = leaf.size * wire.itemsize > SMALL
                groups.setdefault((axes, wire, index if alone else None), []).append(index)
        for (axes, wire, _), indices in groups.items():
            sums = summed_together([done[index].astype(wire) for index in indices], axes)
            for index, leaf in zip(indices, sums, strict=True):
                done[index] = leaf
        done = _received(done, [leaf for _, leaf in leaves], beside)
        return jax.tree.unflatten(tree, [leaf.astype(jnp.float32) for leaf in done])

    def reduction(self, spec: PartitionSpec) -> GradientReduction:
        """How the gradient of a leaf of this partition is reduced in low precision."""
        return GradientReduction(self.data, self.ranks, self._shared_dim(spec))

    def _apart(self, path: KeyPath) -> bool:
        return self.apart and MATRICES.search(path_name(path)) is not None

    def _shared_dim(self, spec: PartitionSpec) -> int | None:
        return next((dim for dim, axes in enumerate(spec) if set(names_of(axes)) & set(self.shard)), None)


def _received(done: list[jax.Array], sent: list[jax.Array], beside: Tree | None) -> list[jax.Array]:
    """What collectives have made of `sent`, not used before `beside` is computed; with nothing beside, as it is.

    Where a result is used at once, XLA may wait for it before it starts on products that do not need it: jax 0.11.2
    then hides nothing of gpt2-1.5b's all-reduces on 8 H100 (docs/reports/gpu-compile.md).
    """
    arrived = [index for index, (after, before) in enumerate(zip(done, sent, strict=True)) if after is not before]
    if beside is None or not arrived:
        return done
    later, _ = jax.lax.optimization_barrier(([done[index] for index in arrived], beside))
    results = dict(zip(arrived, later, strict=True))
    return [results.get(index, leaf) for index, leaf in enumerate(done)]


def summed_together(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Every array all-reduced over these axes, in one collective; all arrays have one dtype."""
    if len(leaves) == 1:
        return [jax.lax.psum(leaves[0], axes)]
    stops = list(itertools.accumulate(leaf.size for leaf in leaves))
    parts = jnp.split(jax.lax.psum(jnp.concatenate([leaf.ravel() for leaf in leaves]), axes), stops[:-1])
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def one_layer(specs: Specs) -> Any:
    """Partitions of one layer of stacked leaves."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _partitions(specs: Specs) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _on(spec: PartitionSpec, axes: tuple[str, ...]) -> bool:
    return any(set(names_of(names)) & set(axes) for names in spec)
