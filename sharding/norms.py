"""Norms of gradients that lie on a mesh.

    norm = sqrt(sum over all numbers g of g^2)

Each device sums the squares of the numbers that it holds, divided by the number of devices that hold the same ones, and
one all-reduce adds the devices' sums.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.core.axes import PIPE
from jhpt.sharding.layout import TABLE, Layout
from jhpt.sharding.partition import names_of, path_name
from jhpt.sharding.types import Gradients, KeyPath, Tree


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Norms of stored gradients.

    tied: the head reads the embedding's table, so the last stage holds a copy, which must not be counted.
    """

    layout: Layout
    tied: bool | None

    def norm(self, gradients: Gradients) -> jax.Array:
        """The global norm, float32 []."""
        mesh, specs = self.layout.device_mesh.mesh, self.layout.specs(gradients)

        def run(gradients: Gradients) -> jax.Array:
            squares = jax.tree_util.tree_map_with_path(self._squares, gradients, specs)
            return jnp.sqrt(jax.lax.psum(sum(jax.tree.leaves(squares)), mesh.axis_names))

        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)(gradients)

    def by_layer(self, gradients: Gradients) -> Tree:
        """A tree like the gradients with the norm of each whole block, [L], or of everything outside the blocks, []."""
        mesh, specs = self.layout.device_mesh.mesh, self.layout.specs(gradients)
        stacks = self.layout.stacks(gradients)
        rows = PartitionSpec(PIPE) if self.layout.stages > 1 else PartitionSpec()
        in_stage = tuple(name for name in mesh.axis_names if name != PIPE)

        def run(gradients: Gradients) -> dict[str, jax.Array]:
            squares = jax.tree_util.tree_map_with_path(partial(self._squares, by_layer=True), gradients, specs)
            named = list(zip(jax.tree.leaves(stacks), jax.tree.leaves(squares), strict=True))
            total = {stack: sum(square for name, square in named if name == stack) for stack, _ in named}
            return {
                stack: jnp.sqrt(jax.lax.psum(square, in_stage if stack else mesh.axis_names))
                for stack, square in total.items()
            }

        out = {stack: rows if stack else PartitionSpec() for stack in set(jax.tree.leaves(stacks))}
        norms: Mapping[str, jax.Array] = jax.shard_map(
            run, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False
        )(gradients)
        by_leaf: Tree = jax.tree.map(lambda stack: norms[stack], stacks)
        return by_leaf

    def _squares(self, path: KeyPath, leaf: jax.Array, spec: PartitionSpec, by_layer: bool = False) -> jax.Array:
        """This device's share of the sum of a leaf's squares, [], or of those of each of its blocks, [L]."""
        name, mesh = path_name(path), self.layout.device_mesh.mesh
        cut = {name for names in spec for name in names_of(names)}
        holders = math.prod(size for name, size in mesh.shape.items() if name not in cut)
        dims = tuple(range(1, leaf.ndim)) if by_layer and "blocks/" in name else None
        share = jnp.sum(jnp.square(leaf), dims) / holders
        if name == "/".join(TABLE) and self.layout.stages > 1 and self.tied:
            share = jnp.where(jax.lax.axis_index(PIPE) == self.layout.stages - 1, 0.0, share)
        return share
