"""A plan's step on its mesh: gradients and sums of a global batch, as one `shard_map`.

All communication is written down, and nothing is left to the partitioner:

    `parameters`          gathers parameters and reduces gradients over the data axes (ZeRO)
    `compression.step`    the same reduction in low precision
    `tensor`              all-reduces activations over the tensor axes
    `single_stage`        reshards activations between layers of different degrees
    `pipeline`            sends activations from stage to stage
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.core.axes import PIPE
from jhpt.kernels.implementation import Implementation
from jhpt.sharding.accumulation import Passes
from jhpt.sharding.compression.step import CompressedReduction
from jhpt.sharding.layout import Layout
from jhpt.sharding.model_parts import ModelParts, Recompute
from jhpt.sharding.norms import GradientNorms
from jhpt.sharding.parameters import ParameterStorage, completed
from jhpt.sharding.recompute import everything
from jhpt.sharding.types import Batch, Feedback, Gradients, LossSums, RowContext, Specs, StoredParams, Tree
from jhpt.sharding.zero import Storage, summed_together

S = TypeVar("S", bound=LossSums)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A plan, ready to be traced.

    parts: the model at every tensor degree in use.  dtype: what it computes in.  tied: whether the head reads the
    embedding's table; None: there is no table.  unroll: blocks stand in the program instead of in a loop.  overlap:
    communicate block by block, beside the computation of other blocks, instead of before and after all computation.
    recompute: what blocks save.  recompute_less: what the blocks save that the plan sets apart (`Plan.other_blocks`).
    kernels: implementation of the kernels for compressed gradients.
    """

    layout: Layout
    parts: Mapping[int, ModelParts]
    dtype: jnp.dtype
    tied: bool | None
    unroll: bool
    overlap: bool = False
    recompute: Recompute = everything
    recompute_less: Recompute = everything
    kernels: Implementation = "reference"

    def gradients(self, params: StoredParams, batch: Batch, key: jax.Array) -> tuple[Gradients, LossSums]:
        """The gradient of the mean loss over all predicted tokens, stored like `params`, and the sums.

            gradient = d(sum of losses over the global batch) / d(params) / (number of predicted tokens)

        Args:
          batch: a tree of global [B, ...].  Row r draws from `fold_in(key, r)`.
        """
        assert not self._parameters.compresses, "the plan compresses gradients: call compressed_gradients"
        return self.compressed_gradients(params, batch, key, {})[:2]

    def compressed_gradients(
        self, params: StoredParams, batch: Batch, key: jax.Array, feedback: Feedback
    ) -> tuple[Gradients, LossSums, Feedback]:
        """`gradients` with the residuals of earlier steps, and the residuals after this one.

        Residuals have the scale of the gradients that are sent over the data axes: gradients of the sum of losses,
        divided by the size of the batch.  This is a multiple of the gradient of the mean loss, always the same one if
        all batches predict equally many tokens.

        Args:
          feedback: `residual` and, with momentum, `momentum` (`compression.feedback`); leaves [data ranks, ...].
        """
        specs = self.layout.specs(params)
        feedback_specs = {kind: self.layout.rank_specs(tree) for kind, tree in feedback.items()}
        pieces = max(leaf.size for leaf in jax.tree.leaves(batch))

        def run(
            params: StoredParams, batch: Batch, key: jax.Array, feedback: Feedback
        ) -> tuple[Gradients, LossSums, Feedback]:
            scale = 1.0 / pieces  # keeps sums near 1, whatever the compute dtype
            batch, context = self.micro_batches(batch, key)
            gathered = self._parameters.gathered(params, specs)
            residuals = jax.tree.map(lambda leaf: leaf[0], feedback)
            gradients, sums = self._passes.gradients(gathered, batch, context, scale, specs, residuals)
            sums = self.summed_over_ranks(sums)
            gradients, residuals = self._compressed.without_residuals(gradients, residuals)
            gradients = self._parameters.reduced(completed(gradients, gathered), specs)
            if self._parameters.compresses:
                gradients, residuals = self._compressed.after_passes(gradients, residuals, specs)
            gradients = jax.tree.map(lambda g: g / (scale * sums.tokens), gradients)
            return gradients, sums, jax.tree.map(lambda leaf: leaf[None], residuals)

        mapped = jax.shard_map(
            run,
            mesh=self.layout.device_mesh.mesh,
            in_specs=(specs, self._batch_specs(batch), PartitionSpec(), feedback_specs),
            out_specs=(specs, PartitionSpec(), feedback_specs),
            check_vma=False,
        )
        result: tuple[Gradients, LossSums, Feedback] = mapped(params, batch, key, feedback)
        return result

    def sums(self, params: StoredParams, batch: Batch, key: jax.Array) -> LossSums:
        """The sums alone, forward only."""
        specs = self.layout.specs(params)

        def run(params: StoredParams, batch: Batch, key: jax.Array) -> LossSums:
            batch, context = self.micro_batches(batch, key)
            gathered = self._parameters.gathered(params, specs)
            return self.summed_over_ranks(self._passes.sums(gathered, batch, context, specs))

        mapped: Callable[[StoredParams, Batch, jax.Array], LossSums] = jax.shard_map(
            run,
            mesh=self.layout.device_mesh.mesh,
            in_specs=(specs, self._batch_specs(batch), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return mapped(params, batch, key)

    def norm(self, gradients: Gradients) -> jax.Array:
        """The global norm of stored gradients, float32 []."""
        return GradientNorms(layout=self.layout, tied=self.tied).norm(gradients)

    def norms_by_layer(self, gradients: Gradients) -> Tree:
        """A tree like the gradients with the norm of each whole block, [L], or of everything outside the blocks, []."""
        return GradientNorms(layout=self.layout, tied=self.tied).by_layer(gradients)

    def micro_batches(self, batch: Batch, key: jax.Array) -> tuple[Batch, RowContext]:
        """This device's rows in micro-batches and their context, [M, b, ...]; inside `shard_map`."""
        device_mesh = self.layout.device_mesh
        axes = device_mesh.axes(device_mesh.degrees[0]).data
        local = len(jax.tree.leaves(batch)[0])
        ids = jax.lax.axis_index(axes) * local + jnp.arange(local)
        context = self.parts[device_mesh.degrees[0]].context(batch, jax.vmap(jax.random.fold_in, (None, 0))(key, ids))
        cut = lambda leaf: leaf.reshape(self.layout.plan.micro_batches, -1, *leaf.shape[1:])  # noqa: E731
        cut_batch, cut_context = jax.tree.map(cut, (batch, context))
        return cut_batch, cut_context

    def summed_over_ranks(self, sums: S) -> S:
        """A tree of scalars, all-reduced over all data ranks and stages; inside `shard_map`."""
        axes = self.layout.device_mesh.axes(self.layout.degrees[-1]).data
        leaves, tree = jax.tree.flatten(sums)
        total: S = jax.tree.unflatten(tree, summed_together(leaves, axes if self.layout.stages == 1 else (PIPE, *axes)))
        return total

    def storage(self, degree: int) -> Storage:
        """How parameters of this tensor degree outside blocks are held between uses."""
        return self._parameters.storage(degree)

    def _batch_specs(self, batch: Batch) -> Specs:
        specs: Specs = jax.tree.map(lambda _: self.layout.batch.spec, batch)
        return specs

    @cached_property
    def _parameters(self) -> ParameterStorage:
        return ParameterStorage(layout=self.layout, dtype=self.dtype, tied=self.tied, overlap=self.overlap)

    @cached_property
    def _compressed(self) -> CompressedReduction:
        return CompressedReduction(parameters=self._parameters, kernels=self.kernels)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(
            parameters=self._parameters,
            compressed=self._compressed,
            parts=self.parts,
            unroll=self.unroll,
            recompute=self.recompute,
            recompute_less=self.recompute_less,
        )
