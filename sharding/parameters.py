"""How a plan's parameters are stored between uses and gathered for the passes, and how their gradients are reduced.

In the notation of the scaling book, for a matrix W[D, F] that tensor parallelism cuts by column and ZeRO by row, over
dp data ranks and tp tensor ranks:

    stored      W[D/dp, F/tp]         float32
    gathered    W[D, F/tp]            compute dtype; all-gather over dp: before each use (ZeRO-3) or once in a step
    gradient    dW[D, F/tp] {U_dp}    unreduced: every data rank has the gradient of its own rows of the batch
    stored      dW[D/dp, F/tp]        reduce-scatter over dp, once in a step or, with ZeRO-2 and 3, in every
                                      micro-batch; without ZeRO dW[D, F/tp] by all-reduce

With hybrid sharding dp is the inner part of the data ranks.  Shares dW[D/dp, F/tp] {U_replica} are all-reduced over the
outer part once in a step.

With several stages every stage holds the embedding and the head in a slot (`layout`); only the first and the last stage
have gradients of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.axes import PIPE
from jhpt.core.plan import Zero
from jhpt.sharding.layout import TABLE, Layout
from jhpt.sharding.types import Gradients, Params, Specs, StoredParams, Tree
from jhpt.sharding.zero import Storage, one_layer


@dataclass(frozen=True, kw_only=True)
class ParameterStorage:
    """The parameters of a model on one device; every method runs inside `shard_map`.

    dtype: what the model computes in.  tied: whether the head reads the embedding's table; None: there is no table.
    overlap: gather and reduce block by block, beside the computation of other blocks.
    """

    layout: Layout
    dtype: jnp.dtype
    tied: bool | None
    overlap: bool

    @property
    def zero(self) -> Zero:
        """The plan's ZeRO level.  ZeRO-1 and ZeRO-2 over one data rank shard nothing and count as 0; with one
        micro-batch nothing is added up, and ZeRO-2 counts as 1."""
        plan = self.layout.plan
        if plan.zero < 3 and plan.replicas == 1:
            return 0
        return 1 if plan.zero == 2 and plan.micro_batches == 1 else plan.zero

    @property
    def compresses(self) -> bool:
        """Whether gradients of matrices are reduced in low precision; `reduced` leaves these unreduced."""
        return self.layout.plan.gradient_compression.on

    @property
    def gathers_in_first_pass(self) -> bool:
        """Whether the first micro-batch gathers the blocks one by one; otherwise all are gathered before it."""
        return self.overlap and self.zero in (1, 2) and self.layout.stages == 1

    @property
    def scatters_in_every_pass(self) -> bool:
        """Whether every backward pass reduce-scatters the blocks' gradients one by one, and shares are added up."""
        return self.zero > 1

    @property
    def reduces_in_last_pass(self) -> bool:
        """Whether only the last backward pass reduces the blocks' gradients, one by one; if no pass reduces them, all
        are reduced after the last one."""
        return self.overlap and not self.scatters_in_every_pass and self.layout.stages == 1

    @property
    def sums_in_last_pass(self) -> bool:
        """Whether what the last backward pass reduces is also summed there, over data ranks that hold the same."""
        return self.reduces_in_last_pass and (self.zero == 0 or self.layout.plan.shards < self.layout.plan.replicas)

    def storage(self, degree: int, blocks: bool = False) -> Storage:
        """How parameters of this tensor degree are held between uses.

        blocks: of blocks, whose activations are cut along the sequence with sequence parallelism.
        """
        axes = self.layout.device_mesh.axes(degree)
        cut = axes.tensor if blocks and self.layout.plan.sequence and degree > 1 else ()
        ranks = self.layout.device_mesh.size(axes.data)
        return Storage(axes.data, axes.shard, ranks, self.dtype, cut, self.compresses)

    def runs(self, blocks: Tree) -> Mapping[str, Tree]:
        """Blocks by the name of their run of equal layers (`Layout.runs`)."""
        if self.layout.stacked_whole:
            return {"0": blocks}
        assert isinstance(blocks, Mapping)
        return blocks

    def joined_runs(self, runs: Mapping[str, Tree]) -> Tree:
        """The inverse of `runs`."""
        return runs["0"] if self.layout.stacked_whole else runs

    def run_specs(self, specs: Specs) -> Mapping[str, Specs]:
        """Partitions of the blocks by the name of their run."""
        blocks = block_specs(specs)
        if self.layout.stacked_whole:
            return {"0": blocks}
        return {name: run for name, run in blocks.items() if isinstance(run, Mapping)}

    def gathered(self, params: StoredParams, specs: Specs) -> Params:
        """Parameters as the passes read them.  Blocks that are gathered one by one stay as they are stored."""
        embedding_and_head, part_specs = self._in_slot(params), self.embedding_and_head_specs(specs)
        gathered: dict[str, Tree] = {}
        for name, part in embedding_and_head.items():
            storage = self.storage(self._degree_of(name))
            gathered |= storage.gathered({name: part}, {name: part_specs[name]})
        blocks, run_specs = self.runs(params["blocks"]), self.run_specs(specs)
        if self.zero < 3 and not self.gathers_in_first_pass:
            blocks = {
                name: self.storage(degree).gathered(blocks[name], run_specs[name])
                for name, degree, _ in self.layout.runs
            }
        return {**gathered, "blocks": blocks}

    def reduced(self, gradients: Gradients, specs: Specs) -> Gradients:
        """Gradients as the passes leave them -> reduced over the data axes, and laid out like the parameters."""
        embedding_and_head = {name: part for name, part in gradients.items() if name != "blocks"}
        reduced = dict(self._reduced_embedding_and_head(embedding_and_head, self.embedding_and_head_specs(specs)))
        if self.layout.stages > 1 and self.tied:
            folder, name = TABLE  # the embedding reads it on the first stage and the head on the last
            last = self.layout.stages - 1
            table: Any = reduced[folder]
            # Not an exchange: between CPU processes messages that cross take twice as long (docs/reports/hybrid.md).
            groups = [[0, last], *([stage] for stage in range(1, last))]
            total = jax.lax.psum(table[name], PIPE, axis_index_groups=groups)
            reduced[folder] = {**table, name: total}
        if self.layout.stages > 1:
            reduced = jax.tree.map(lambda leaf: leaf[None], reduced)

        blocks, run_specs, runs = dict[str, Tree](), self.run_specs(specs), gradients["blocks"]
        for name, degree, _ in self.layout.runs:
            storage, part = self.storage(degree, blocks=True), runs[name]
            if not self.scatters_in_every_pass and not self.reduces_in_last_pass:
                part = storage.scattered(part, run_specs[name])
            blocks[name] = part if self.sums_in_last_pass else storage.summed(part, run_specs[name])
        return {**reduced, "blocks": self.joined_runs(blocks)}

    def _reduced_embedding_and_head(self, gradients: Gradients, specs: Specs) -> Gradients:
        def reduced(gradients: Gradients) -> dict[str, Tree]:
            done: dict[str, Tree] = {}
            for name, part in gradients.items():
                storage, part_specs = self.storage(self._degree_of(name)), {name: specs[name]}
                done |= storage.summed(storage.scattered({name: part}, part_specs), part_specs)
            return done

        if self.layout.stages == 1:
            return reduced(gradients)
        # The stages between the first and the last have nothing to reduce, and all data ranks of a stage agree on that.
        shapes = jax.eval_shape(reduced, gradients)
        stage = jax.lax.axis_index(PIPE)
        stored: Gradients = jax.lax.cond(
            (stage == 0) | (stage == self.layout.stages - 1),
            reduced,
            lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            gradients,
        )
        return stored

    def _in_slot(self, params: StoredParams) -> StoredParams:
        """The embedding and the head in this device's slots."""
        embedding_and_head = {name: part for name, part in params.items() if name != "blocks"}
        if self.layout.stages == 1:
            return embedding_and_head
        slots: StoredParams = jax.tree.map(lambda leaf: leaf[0], embedding_and_head)
        return slots

    def embedding_and_head_specs(self, specs: Specs) -> Specs:
        """Partitions of the embedding and the head, without the dimension of stages."""
        embedding_and_head = {name: part for name, part in specs.items() if name != "blocks"}
        return one_layer(embedding_and_head) if self.layout.stages > 1 else embedding_and_head

    def _degree_of(self, name: str) -> int:
        """The tensor degree of the embedding, or of anything else outside the blocks."""
        return self.layout.degrees[0 if name == TABLE[0] else -1]


def block_specs(specs: Specs) -> Specs:
    """Partitions of all blocks."""
    blocks = specs["blocks"]
    assert isinstance(blocks, Mapping)
    return blocks


def completed(gradients: Gradients, params: Params) -> Gradients:
    """Gradients with zeros for the parameters that the loss does not depend on."""

    def part(name: str, params: Tree) -> Tree:
        if name not in gradients:
            zeros: Tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
            return zeros
        gradient = gradients[name]
        return (
            completed(gradient, params) if isinstance(params, Mapping) and isinstance(gradient, Mapping) else gradient
        )

    return {name: part(name, tree) for name, tree in params.items()}
