"""Compressed gradient reduction in a step: which gradients it reduces, when, and where their residuals lie.

`gradients.exchanged_tree` reduces some gradients with their residuals.  A step calls it

    block by block     in the last backward pass, if communication overlaps: the pass adds to pairs (gradient so far,
                       the block's residuals) instead of gradients, and returns (reduced gradient, new residuals)
    after the passes   for everything else; of several stages, only the first and the last reduce embedding and head
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.core.axes import PIPE
from jhpt.core.config import GradientCompression
from jhpt.kernels.implementation import Implementation
from jhpt.sharding.compression.gradients import GradientReduction, exchanged_tree
from jhpt.sharding.parameters import ParameterStorage, block_specs
from jhpt.sharding.partition import path_name
from jhpt.sharding.types import Feedback, Gradients, Specs, Tree
from jhpt.sharding.zero import one_layer

Exchange = Callable[[Gradients, Feedback], tuple[Gradients, Feedback]]


@dataclass(frozen=True, kw_only=True)
class CompressedReduction:
    """The compressed reduction of a step's gradients; every method runs inside `shard_map`.

    residuals, in all methods: `residual` and, with momentum, `momentum` of this data rank (`feedback`).
    kernels: which implementation rounds, sums and selects.
    """

    parameters: ParameterStorage
    kernels: Implementation

    @property
    def _settings(self) -> GradientCompression:
        return self.parameters.layout.plan.gradient_compression

    @property
    def _in_last_pass(self) -> bool:
        return self.parameters.compresses and self.parameters.reduces_in_last_pass

    def with_residuals(self, total: Gradients | None, residuals: Feedback) -> Gradients | None:
        """The sums that the last backward pass adds to; with the blocks' residuals, if it reduces the blocks itself."""
        if not self._in_last_pass:
            return total
        runs = {kind: self.parameters.runs(tree["blocks"]) for kind, tree in residuals.items()}
        so_far: Any = {} if total is None else total["blocks"]
        pairs: dict[str, Any] = {
            name: (so_far.get(name), {kind: each[name] for kind, each in runs.items()})
            for name, *_ in self.parameters.layout.runs
        }
        return {**(total or {}), "blocks": pairs}

    def without_residuals(self, gradients: Gradients, residuals: Feedback) -> tuple[Gradients, Feedback]:
        """(gradients, residuals) from the pairs that the last backward pass returned."""
        if not self._in_last_pass:
            return gradients, residuals
        pairs: Any = gradients["blocks"]
        runs = {kind: {name: rest[kind] for name, (_, rest) in pairs.items()} for kind in residuals}
        new = {kind: {**tree, "blocks": self.parameters.joined_runs(runs[kind])} for kind, tree in residuals.items()}
        return {**gradients, "blocks": {name: gradient for name, (gradient, _) in pairs.items()}}, new

    def of_layer(self, gradient: Tree, residuals: Feedback, specs: Specs, degree: int) -> tuple[Tree, Feedback]:
        """The reduction of one block's gradient in the last backward pass."""
        return exchanged_tree(gradient, residuals, self._reductions(specs, degree), self._settings, self.kernels)

    def after_passes(self, gradients: Gradients, residuals: Feedback, specs: Specs) -> tuple[Gradients, Feedback]:
        """Reduces what is still unreduced: gradients of matrices, laid out like the parameters."""
        layout = self.parameters.layout
        by_name = {**self.parameters.embedding_and_head_specs(specs), "blocks": one_layer(block_specs(specs))}
        embedding_and_head = tuple(name for name in gradients if name != "blocks")
        exchange = partial(self._exchange, specs=by_name)
        if layout.stages == 1:
            names = embedding_and_head if self._in_last_pass else (*embedding_and_head, "blocks")
            done, rest = exchange(_subtree(gradients, names), _subtree_of_each(residuals, names))
            return {**gradients, **done}, {kind: {**tree, **rest[kind]} for kind, tree in residuals.items()}
        slots = jax.tree.map(
            lambda leaf: leaf[0],
            (_subtree(gradients, embedding_and_head), _subtree_of_each(residuals, embedding_and_head)),
        )
        outer = jax.tree.map(lambda leaf: leaf[None], self._on_first_and_last_stage(exchange, *slots))
        inner = exchange(_subtree(gradients, ("blocks",)), _subtree_of_each(residuals, ("blocks",)))
        return {**outer[0], **inner[0]}, {kind: {**outer[1][kind], **inner[1][kind]} for kind in residuals}

    def _on_first_and_last_stage(
        self, exchange: Exchange, gradients: Gradients, residuals: Feedback
    ) -> tuple[Gradients, Feedback]:
        """Zeros on the stages between, as in `ParameterStorage.reduced`."""
        shapes, _ = jax.eval_shape(exchange, gradients, residuals)
        stage = jax.lax.axis_index(PIPE)
        done: tuple[Gradients, Feedback] = jax.lax.cond(
            (stage == 0) | (stage == self.parameters.layout.stages - 1),
            exchange,
            lambda _, residuals: (jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), residuals),
            gradients,
            residuals,
        )
        return done

    def _exchange(self, gradients: Gradients, residuals: Feedback, specs: Specs) -> tuple[Gradients, Feedback]:
        """`exchanged_tree` of a part of the model's tree."""
        reductions = self._reductions({name: specs[name] for name in gradients})
        done: tuple[Gradients, Feedback] = exchanged_tree(
            gradients, residuals, reductions, self._settings, self.kernels
        )
        return done

    def _reductions(self, specs: Specs, degree: int | None = None) -> dict[str, GradientReduction]:
        """The reductions of leaves by path.  degree: of all leaves; None: each leaf has the degree of its path."""
        leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        named = [(path_name(path), spec) for path, spec in leaves]
        degree_of = self.parameters.layout.degree
        return {name: self.parameters.storage(degree or degree_of(name)).reduction(spec) for name, spec in named}


def _subtree(tree: Mapping[str, Tree], names: tuple[str, ...]) -> dict[str, Tree]:
    return {name: tree[name] for name in names}


def _subtree_of_each(residuals: Feedback, names: tuple[str, ...]) -> Feedback:
    return {kind: _subtree(tree, names) for kind, tree in residuals.items()}
