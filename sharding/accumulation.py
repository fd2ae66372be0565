"""The passes of a step over a device's micro-batches: gradient accumulation on one stage, or a pipeline of several.

On one stage the first micro-batch may gather the blocks for all of them, and the last may reduce their gradients block
by block in its backward pass (`ParameterStorage`):

    first      gather, forward, backward
    middle     forward, backward, gradients added up in float32 (a loop)
    last       forward, backward, reduce

With ZeRO-2 and ZeRO-3 every backward pass reduce-scatters the blocks' gradients, and their shares are added up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.schedule import timetable
from jhpt.sharding.compression.step import CompressedReduction
from jhpt.sharding.layer_loop import Finish, LayerLoop
from jhpt.sharding.layout import TABLE, Layout
from jhpt.sharding.model_parts import ModelParts, Recompute, picked
from jhpt.sharding.parameters import ParameterStorage, block_specs
from jhpt.sharding.pipeline import Pipeline
from jhpt.sharding.sample_chunks import streaming
from jhpt.sharding.single_stage import OneStage, Run
from jhpt.sharding.types import Batch, Feedback, Gradients, LossSums, Params, RowContext, Specs, Tree
from jhpt.sharding.zero import one_layer

MOST_UNROLLED = 8
"""Micro-batches that are unrolled at most, because compile time grows with them."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes; every method runs inside `shard_map`.

    parts: the model at every tensor degree in use.  unroll: blocks stand in the program instead of in a loop.
    recompute: of the first blocks, or of all.  recompute_less: of those that save more (`Layout.other_blocks`).
    """

    parameters: ParameterStorage
    compressed: CompressedReduction
    parts: Mapping[int, ModelParts]
    unroll: bool
    recompute: Recompute
    recompute_less: Recompute

    @property
    def _layout(self) -> Layout:
        return self.parameters.layout

    def gradients(
        self, params: Params, batch: Batch, context: RowContext, scale: float, specs: Specs, residuals: Feedback
    ) -> tuple[Gradients, LossSums]:
        """(gradient of loss x scale, sums) of all micro-batches on this device.

        params: as `ParameterStorage.gathered` returns them.  batch: a tree of [M, b, ...].  context: a tree of
        [M, b, ...].
        residuals: of earlier steps, for compressed gradients.
        """
        if self._layout.stages == 1:
            return self._accumulated(params, batch, context, scale, specs, residuals)
        return self._pipeline(specs).gradients(params, batch, context, scale)

    def sums(self, params: Params, batch: Batch, context: RowContext, specs: Specs) -> LossSums:
        """The sums alone, forward only."""
        if self._layout.stages > 1:
            return self._pipeline(specs).sums(params, batch, context)
        stage = self.one_stage(specs, first=self.parameters.gathers_in_first_pass, last=False)
        pieces = batch, context
        each = jax.lax.scan(lambda _, piece: (None, stage.sums(params, *piece)), None, pieces, unroll=self._unrolled)[1]
        sums: LossSums = jax.tree.map(lambda leaf: leaf.sum(0), each)
        return sums

    def _accumulated(
        self, params: Params, batch: Batch, context: RowContext, scale: float, specs: Specs, residuals: Feedback
    ) -> tuple[Gradients, LossSums]:
        """All micro-batches of one stage: the first gathers the parameters for all, the last reduces the gradients."""

        def pick(index: int | jax.Array) -> tuple[Batch, RowContext]:
            picked_batch, picked_context = jax.tree.map(lambda leaf: leaf[index], (batch, context))
            return picked_batch, picked_context

        count, reduces_in_last = self._layout.plan.micro_batches, self.parameters.reduces_in_last_pass
        if count == 1:
            total = self.compressed.with_residuals(None, residuals)
            only = self.one_stage(specs, first=True, last=True).gradients(params, *pick(0), scale, total)
            return only.gradients, only.sums
        start = self.one_stage(specs, first=True, last=False).gradients(params, *pick(0), scale)
        if self.parameters.gathers_in_first_pass:
            params = {**params, "blocks": start.fetched}
        middle = self.one_stage(specs, first=False, last=False)

        def add(carry: tuple[Gradients, LossSums], at: int | jax.Array) -> tuple[tuple[Gradients, LossSums], None]:
            total, sums = carry
            one = middle.gradients(params, *pick(self._once_known(total, at)), scale, total)
            return (one.gradients, jax.tree.map(jnp.add, sums, one.sums)), None

        total, sums = start.gradients, start.sums
        if count == 2 and not reduces_in_last:
            return add((total, sums), 1)[0]
        if count > 2:
            total = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)
            stop = count - 1 if reduces_in_last else count
            total, sums = jax.lax.scan(add, (total, sums), jnp.arange(1, stop), unroll=self._unrolled)[0]
        if not reduces_in_last:
            return total, sums
        at = self._once_known(total, count - 1)
        last = self.one_stage(specs, first=False, last=True)
        one = last.gradients(params, *pick(at), scale, self.compressed.with_residuals(total, residuals))
        return one.gradients, jax.tree.map(jnp.add, sums, one.sums)

    @property
    def _unrolled(self) -> bool | int:
        """Whether micro-batches stand in the program one after the other instead of in a loop.

        XLA's CPU client computes a convolution that is in a loop on one thread and without its fast kernel: vgg with 4
        micro-batches took 12 times as long as with one.
        """
        layout = self._layout
        on_cpu = layout.device_mesh.mesh.devices.flat[0].platform == "cpu"
        return (on_cpu and not layout.alike and layout.plan.micro_batches <= MOST_UNROLLED) or 1

    def _once_known(self, total: Gradients, at: int | jax.Array) -> jax.Array:
        """The index of a micro-batch, known only once the embedding's gradient, the last one of the micro-batches
        before it, is computed.

        Otherwise the compiler begins a forward pass that is outside the loop while the activations of other
        micro-batches are still in memory; an optimization_barrier does not prevent that.
        """
        embedding = jax.tree.leaves(picked(total, self.parts[self._layout.degrees[0]].embed_reads))[0]
        return jnp.where(embedding.ravel()[0] >= jnp.finfo(jnp.float32).max, 0, at)

    def one_stage(self, specs: Specs, *, first: bool, last: bool) -> OneStage:
        """The stage for the first, the last or any other micro-batch."""
        layout, parameters = self._layout, self.parameters
        runs = []
        for name, degree, blocks in layout.runs:
            layer_specs, storage = one_layer(parameters.run_specs(specs)[name]), parameters.storage(degree)
            shared = storage.ranks > 1
            fetches = parameters.zero == 3 or (first and parameters.gathers_in_first_pass)
            reduces = parameters.scatters_in_every_pass or (last and parameters.reduces_in_last_pass)
            loop = LayerLoop(
                stream=streaming(self.parts[degree], layout.sample_chunks[blocks.start], in_turn=parameters.overlap),
                first=blocks.start,
                count=len(blocks),
                unroll=self.unroll,
                fetch=partial(storage.gathered, specs=layer_specs) if fetches else _as_stored,
                finish=self._finish(degree, layer_specs, last=last),
                prefetch=layout.plan.prefetch if fetches and shared and parameters.overlap else 0,
                finish_late=reduces and shared and parameters.overlap,
                keep_fetched=first and parameters.gathers_in_first_pass,
                recompute=self.recompute_less if blocks.start in layout.other_blocks else self.recompute,
            )
            runs.append(Run(name=name, degree=degree, loop=loop))
        return OneStage(
            device_mesh=layout.device_mesh,
            parts=self.parts,
            runs=tuple(runs),
            embed_degree=layout.degrees[0],
            head_degree=layout.degrees[-1],
            sequence=layout.plan.sequence,
        )

    def _finish(self, degree: int, specs: Specs, *, last: bool) -> Finish:
        """What the backward pass does with a layer's gradient; `ParameterStorage.reduced` does the rest."""
        storage = self.parameters.storage(degree, blocks=True)

        def add(gradient: Tree, total: Tree | None, beside: Tree | None = None) -> Tree:
            return gradient if total is None else jax.tree.map(jnp.add, total, gradient)

        def scatter(gradient: Tree, total: Tree | None, beside: Tree | None) -> Tree:
            return add(storage.scattered(gradient, specs, beside), total)

        def reduce(gradient: Tree, total: Tree | None, beside: Tree | None) -> Tree:
            share = storage.scattered(add(gradient, total), specs, beside)
            return storage.summed(share, specs, beside) if self.parameters.sums_in_last_pass else share

        def compress(gradient: Tree, pair: tuple[Tree | None, Feedback], beside: Tree | None) -> tuple[Tree, Feedback]:
            total, residuals = pair
            return self.compressed.of_layer(reduce(gradient, total, beside), residuals, specs, degree)

        if self.parameters.scatters_in_every_pass:
            return scatter
        if not (last and self.parameters.reduces_in_last_pass):
            return add
        return compress if self.parameters.compresses else reduce

    def _pipeline(self, specs: Specs) -> Pipeline:
        plan, parameters = self._layout.plan, self.parameters
        degree, layer_specs = self._layout.degrees[0], one_layer(block_specs(specs))
        storage, parts = parameters.storage(degree), self.parts[degree]
        first, count = self._layout.chunks
        sharded = parameters.zero == 3
        return Pipeline(
            parts=_reading_slot(parts) if parameters.tied is False else parts,
            stream=streaming(parts, self._layout.sample_chunks[0], in_turn=parameters.overlap),
            timetable=timetable(plan.schedule, len(plan.stages), plan.chunks, plan.micro_batches),
            first=first,
            count=count,
            unroll=self.unroll,
            fetch=partial(storage.gathered, specs=layer_specs) if sharded else _as_stored,
            finish=partial(storage.scattered, specs=layer_specs) if parameters.scatters_in_every_pass else _as_stored,
            prefetch=plan.prefetch if sharded and storage.ranks > 1 and parameters.overlap else 0,
            recompute=self.recompute,
        )


def _as_stored(params: Tree) -> Tree:
    return params


def _reading_slot(parts: ModelParts) -> ModelParts:
    """The head's untied table lies in the slot of the embedding's (`layout`)."""
    folder, name = TABLE

    def head_loss(embedding_and_head: Any, x: jax.Array, batch: Batch, context: RowContext) -> LossSums:
        head = {**embedding_and_head["head"], name: embedding_and_head[folder][name]}
        sums: LossSums = parts.head_loss({**embedding_and_head, "head": head}, x, batch, context)
        return sums

    return replace(parts, head_loss=head_loss, head_reads=(*parts.head_reads, "/".join(TABLE)))
