"""The state that compressed gradient reductions carry from step to step: `residual` and, with momentum, `momentum`.

Both are trees like the stored parameters, with None for leaves that are not compressed: only matrices and tables are.
Leaves are float32 [R, *stored shape], one entry for each of R data ranks; R differs from leaf to leaf where tensor
degrees do.

A checkpoint holds them as [R, *shape in the model's tree], where R is the number of data ranks at the smallest degree;
entries of ranks that a leaf does not have are zero.  Under the same plan they are restored bit for bit.  On R' ranks,
rank i gets the sum of the entries i, i + R', i + 2 R' ...: only the sum over the ranks matters, and it does not change.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jhpt.core.config import GradientCompression
from jhpt.sharding.layout import Layout
from jhpt.sharding.partition import MATRICES, path_name
from jhpt.sharding.types import Feedback, KeyPath, Params, StoredParams


def fresh(layout: Layout, params: StoredParams, compression: GradientCompression) -> dict[str, Any] | None:
    """Zeros, before the first step; None: nothing is compressed.  params: as they are stored."""
    if not compression.on:
        return None

    def zeros(path: KeyPath, leaf: jax.Array) -> jax.Array | None:
        name = path_name(path)
        return jnp.zeros((layout.data_ranks(name), *leaf.shape), jnp.float32) if MATRICES.search(name) else None

    kinds = ("residual", "momentum") if compression.momentum else ("residual",)
    return {kind: jax.tree_util.tree_map_with_path(zeros, params) for kind in kinds}


def saved(layout: Layout, feedback: Feedback, tied: bool | None) -> dict[str, Any]:
    """Training's feedback in the form of a checkpoint."""
    ranks = _most_ranks(layout)

    def filled(leaf: jax.Array) -> jax.Array:
        return jnp.concatenate([leaf, jnp.zeros((ranks - len(leaf), *leaf.shape[1:]), leaf.dtype)])

    model_tree = jax.vmap(lambda tree: layout.model_tree(tree, tied))
    return {name: model_tree(jax.tree.map(filled, tree)) for name, tree in feedback.items()}


def loaded(layout: Layout, feedback: Feedback) -> dict[str, Any]:
    """The feedback of a checkpoint in the form of training, whatever the number of ranks was."""

    def for_its_ranks(path: KeyPath, leaf: jax.Array) -> jax.Array:
        return folded(leaf, layout.data_ranks(path_name(path)))

    def stored(tree: Params) -> Any:
        at_most = jax.tree.map(lambda leaf: folded(leaf, _most_ranks(layout)), tree)
        return jax.tree_util.tree_map_with_path(for_its_ranks, jax.vmap(layout.stored)(at_most))

    return {name: stored(tree) for name, tree in feedback.items()}


def folded(leaf: jax.Array, ranks: int) -> jax.Array:
    """[R, ...] -> [ranks, ...] with the same sum over the first dim."""
    fill = -len(leaf) % ranks
    leaf = jnp.concatenate([leaf, jnp.zeros((fill, *leaf.shape[1:]), leaf.dtype)]) if fill else leaf
    rounds = leaf.reshape(-1, ranks, *leaf.shape[1:])
    return rounds[0] if len(rounds) == 1 else rounds.sum(0)


def shardings(layout: Layout, feedback: Feedback) -> dict[str, Any]:
    """Where feedback lies during training."""
    place = lambda spec: NamedSharding(layout.device_mesh.mesh, spec)  # noqa: E731
    return {name: jax.tree.map(place, layout.rank_specs(tree)) for name, tree in feedback.items()}


def saved_shardings(layout: Layout, feedback: Feedback) -> dict[str, Any]:
    """Where feedback lies on its way from or to a checkpoint: leaves cut over all devices, whatever the number of
    ranks."""
    one_rank = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    all_ranks = lambda one: NamedSharding(one.mesh, PartitionSpec(None, *one.spec))  # noqa: E731
    return {
        name: jax.tree.map(all_ranks, layout.model_shares(jax.tree.map(one_rank, tree)))
        for name, tree in feedback.items()
    }


def _most_ranks(layout: Layout) -> int:
    return layout.device_mesh.size(layout.device_mesh.axes(layout.device_mesh.degrees[0]).data)
