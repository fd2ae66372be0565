"""What the devices of a stage compute for one chunk, and the programs that do it.

    read       parameters as stored -> in the compute dtype                                          once a step
    zeros      gradients before the first micro-batch                                                once a step
    forward    x -> y and saved activations                                                   once a micro-batch
    backward   saved activations, error -> gradients added up, error for the chunk before     once a micro-batch
    finish     gradients summed over the replicas, and the square of their norm                      once a step

Where communication overlaps, the last micro-batch has a backward program of its own, which sums the gradients of each
layer over the replicas beside the computation of the next (`layer_loop`), and `finish` sums what is outside the blocks.
With samples by speed replicas pass through different branches, in which they cannot meet, and `finish` sums all.

Every device keeps saved activations and unreduced gradients of its own: they leave a program as arrays
[devices, ...] and enter the next one as they are.  The last chunk computes its loss in the backward pass, so that
logits never outlive a pass, and its forward pass keeps y for that.

With samples by speed a pass has a branch for every number of rows, and each data rank takes that of its own.  All
have room for the most rows: what a rank with fewer leaves or takes is padded or cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.sharding.accumulation import Passes
from jhpt.sharding.compression.step import CompressedReduction
from jhpt.sharding.layer_vjp import SavedOfLayers
from jhpt.sharding.model_parts import added
from jhpt.sharding.norms import GradientNorms
from jhpt.sharding.parameters import ParameterStorage
from jhpt.sharding.single_stage import OneStage
from jhpt.sharding.stages.layout import EMBEDDING, PlacedChunk
from jhpt.sharding.step import Execution
from jhpt.sharding.types import Batch, Gradients, LossSums, Params, RowContext, Specs, StoredParams
from jhpt.sharding.zero import summed_together

T = TypeVar("T")

X = jax.Array | None
"""x of the first block, or its gradient; None where x is embedded in the chunk."""

SavedOfRuns = list[SavedOfLayers]
"""Saved activations of each run of blocks."""

WHOLE = PartitionSpec()


class ChunkBatch(NamedTuple):
    """The batch of a step on one stage: rows, a tree of [micro-batches, room, ...]; ids: [micro-batches, room], the
    number of every row in the global batch, from which it draws."""

    rows: Batch
    ids: jax.typing.ArrayLike


Given = tuple[ChunkBatch, jax.Array, jax.Array]
"""Batch, key and the number of the micro-batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPrograms:
    """The programs of one chunk.  execution: of its layout.  stored: shapes of its stored parameters."""

    placed: PlacedChunk
    execution: Execution
    stored: StoredParams
    entering: jax.ShapeDtypeStruct | None
    """x [room, ...] as it comes in; None: it is embedded here."""
    scale: float
    """What losses are multiplied by before they are differentiated, which keeps sums near 1."""
    options: Mapping[str, Any]
    """The compiler's."""

    # Programs, each compiled when it is first called.

    def read(self, params: StoredParams) -> Params:
        """Stored parameters -> parameters in the dtypes that passes read; those that are stored so are not copied."""
        stored = self._by_run(params)
        if all(jax.tree.leaves(self._read_as_stored)):
            return stored
        read: Params = jax.tree.map(
            lambda as_stored, old, new: old if as_stored else new, self._read_as_stored, stored, self._cast(params)
        )
        return read

    @cached_property
    def zeros(self) -> "jax.stages.Wrapped":
        """Stored parameters -> gradients before the first micro-batch."""

        def run(params: StoredParams) -> Gradients:
            return jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), jnp.float32), self._by_run(params))

        return self._jitted(self._mapped(run, (self._specs,), self._own))

    @cached_property
    def forward(self) -> "jax.stages.Wrapped":
        """(parameters, x, batch, key, micro-batch) -> (y, what the backward pass needs); the first chunk takes no x."""

        def run(params: Params, x: X, *given: *Given) -> tuple[jax.Array, SavedOfRuns]:
            y, saved = self._of_own_rows(partial(self._forward, params), x, *self._micro_batch(*given))
            return y, _one(saved)

        return self._jitted(self._mapped(run, (self._read_specs, self._x, *self._given), (self._y, self._own)))

    @cached_property
    def backward(self) -> "jax.stages.Wrapped":
        """(gradients so far, parameters, saved, error, batch, key, micro-batch) -> (gradients, error, sums).

        The last chunk takes its y in place of an error, and the others return no sums; the first returns no error.
        """
        return self._backward_program(self._stage)

    @cached_property
    def last_backward(self) -> "jax.stages.Wrapped":
        """`backward` for the last micro-batch.  If the blocks' gradients are reduced in it, it is another program."""
        shared = any(self._parameters.storage(degree).ranks > 1 for _, degree, _ in self.placed.layout.runs)
        if not (shared and self._parameters.reduces_in_last_pass):
            return self.backward
        return self._backward_program(self._stage_for(last=True))

    def _backward_program(self, stage: OneStage) -> "jax.stages.Wrapped":
        def run(
            total: Gradients, params: Params, saved: SavedOfRuns, error: jax.Array, *given: *Given
        ) -> tuple[Gradients, X, LossSums | None]:
            its = partial(self._backward, stage, _its(total), params, _its(saved))
            total, down, sums = self._of_own_rows(its, error, *self._micro_batch(*given))
            return _one(total), down, _one(sums)

        inputs = (self._own, self._read_specs, self._own, self._y, *self._given)
        return self._jitted(self._mapped(run, inputs, (self._own, self._x, self._own)), donate_argnums=0)

    @cached_property
    def evaluate(self) -> "jax.stages.Wrapped":
        """(parameters, x, batch, key, micro-batch) -> y, or the last chunk's sums."""

        def run(params: Params, x: X, *given: *Given) -> jax.Array | LossSums:
            def evaluated(x: X, rows: Batch, context: RowContext) -> jax.Array | LossSums:
                y, _ = self._forward(params, x, rows, context)
                return self._stage.head_loss(params, y, rows, context) if self.placed.heads else y

            out = self._of_own_rows(evaluated, x, *self._micro_batch(*given))
            return _one(out) if self.placed.heads else out

        out = self._own if self.placed.heads else self._y
        return self._jitted(self._mapped(run, (self._read_specs, self._x, *self._given), out))

    @cached_property
    def finish(self) -> "jax.stages.Wrapped":
        """Gradients of all micro-batches -> gradients, summed over the replicas, stored like the parameters."""

        def run(total: Gradients) -> Gradients:
            return self._parameters.reduced(_its(total), self._specs)

        return self._jitted(self._mapped(run, (self._own,), self._specs), donate_argnums=0)

    @cached_property
    def report(self) -> "jax.stages.Wrapped":
        """(gradients, sums of all micro-batches) -> [1 + sums]: the square of their norm, without that of copies, and
        of the last chunk the sums over the batch."""

        def program(gradients: Gradients, sums: Sequence[LossSums]) -> jax.Array:
            own = gradients if self.placed.embeds else {k: v for k, v in gradients.items() if k != EMBEDDING}
            square = jnp.square(GradientNorms(layout=self.placed.layout, tied=None).norm(own))
            return jnp.concatenate([square[None], self._summed(sums)]) if self.placed.heads else square[None]

        return self._jitted(program)

    @cached_property
    def sums(self) -> "jax.stages.Wrapped":
        """Sums of all micro-batches, [devices] -> [sums]."""
        return self._jitted(self._summed)

    # What is inside of them.

    def _forward(self, params: Params, x: X, rows: Batch, context: RowContext) -> tuple[jax.Array, SavedOfRuns]:
        """(y, saved activations) of these rows; x: None if they are embedded here."""
        if self.placed.embeds:
            x = self._stage.embedded(params, rows, context)[0]
        assert x is not None, "a chunk that does not embed is given x"
        y, passed = self._stage.blocks_forward(params, x, context)
        return y, [of_run.saved for of_run in passed]

    def _backward(
        self,
        stage: OneStage,
        total: Gradients,
        params: Params,
        saved: SavedOfRuns,
        error: jax.Array,
        rows: Batch,
        context: RowContext,
    ) -> tuple[Gradients, X, LossSums | None]:
        """(gradients with those of these rows, error for the chunk before, sums of the last chunk)."""
        entering = self._entering(params, rows, context)
        gradient: Gradients = {}
        sums = None
        if self.placed.samples:
            saved = _cut_to(jax.eval_shape(partial(self._forward, params), None, rows, context)[1], saved)
        if self.placed.heads:
            gradient, error, sums = stage.loss_gradient(params, error, rows, context, self.scale)
        passed = stage.resumed(params, entering, context, saved)
        blocks, error = stage.blocks_backward(params, passed, error, total["blocks"])
        if self.placed.embeds:
            gradient = added(gradient, stage.embedded(params, rows, context)[1](error)[0])
        outside = added({name: part for name, part in total.items() if name != "blocks"}, gradient)
        return {**outside, "blocks": blocks}, None if self.placed.embeds else error, sums

    def _of_own_rows(self, function: Callable[..., T], *rows: Any) -> T:
        """function(*rows), of as many rows as this data rank has samples; padded to the result for all rows."""
        samples = self.placed.samples
        if samples is None:
            return function(*rows)
        whole = jax.eval_shape(function, *rows)

        def branch(count: int) -> Callable[..., T]:
            return lambda *rows: _padded_to(whole, function(*jax.tree.map(lambda leaf: leaf[:count], rows)))

        counts = sorted(set(samples))
        rank = jax.lax.axis_index(self.placed.device_mesh.axes(self.placed.entry).data)
        which = jnp.asarray([counts.index(each) for each in samples])[rank]
        result: T = jax.lax.switch(which, list(map(branch, counts)), *rows)
        return result

    def _summed(self, sums: Sequence[LossSums]) -> jax.Array:
        axes = self.placed.device_mesh.axes(self.placed.exit).data

        def run(sums: Sequence[LossSums]) -> jax.Array:
            added_up = [sum(leaves[1:], leaves[0]) for leaves in zip(*map(jax.tree.leaves, sums), strict=True)]
            return jnp.stack(summed_together([leaf[0] for leaf in added_up], axes))

        total: jax.Array = self._mapped(run, (self._own,), WHOLE)(sums)
        return total

    def _micro_batch(self, batch: ChunkBatch, key: jax.Array, at: jax.Array) -> tuple[Batch, RowContext]:
        rows, ids = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), tuple(batch))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
        return rows, self.execution.parts[self.placed.device_mesh.degrees[0]].context(rows, keys)

    def _entering(self, params: Params, rows: Batch, context: RowContext) -> Any:
        """x before the first block, for its shape on one device."""
        if self.entering is None:
            return jax.eval_shape(lambda params: self._stage.embedded(params, rows, context)[0], params)
        sharding = self.placed.named(self._x)
        return jax.ShapeDtypeStruct(sharding.shard_shape(self.entering.shape), self.entering.dtype)

    @cached_property
    def _parameters(self) -> ParameterStorage:
        of, overlap = self.execution, self.execution.overlap and self.placed.samples is None
        return ParameterStorage(layout=self.placed.layout, dtype=of.dtype, tied=of.tied, overlap=overlap)

    @cached_property
    def _stage(self) -> OneStage:
        return self._stage_for(last=False)

    def _stage_for(self, *, last: bool) -> OneStage:
        """The stage's passes over the last micro-batch, or over any other."""
        of, parameters = self.execution, self._parameters
        passes = Passes(
            parameters=parameters,
            compressed=CompressedReduction(parameters=parameters, kernels=of.kernels),
            parts=of.parts,
            unroll=of.unroll,
            recompute=of.recompute,
            recompute_less=of.recompute,
        )
        stage = passes.one_stage(self._specs, first=False, last=last)
        numbered = [
            replace(run, loop=replace(run.loop, first=self.placed.first + run.loop.first)) for run in stage.runs
        ]
        return replace(stage, runs=tuple(numbered), embed_degree=self.placed.entry)

    @cached_property
    def _cast(self) -> "jax.stages.Wrapped":
        """Stored parameters -> those that passes read in another dtype, and None for the others."""

        def run(params: StoredParams) -> Any:
            read = self._in_compute_dtype(params)
            return jax.tree.map(lambda as_stored, leaf: None if as_stored else leaf, self._read_as_stored, read)

        return self._jitted(self._mapped(run, (self._specs,), self._read_specs))

    @cached_property
    def _read_as_stored(self) -> Any:
        """Of each parameter whether passes read it as it is stored."""
        read = jax.eval_shape(self._mapped(self._in_compute_dtype, (self._specs,), self._read_specs), self.stored)
        return jax.tree.map(lambda one, other: one.dtype == other.dtype, self._by_run(self.stored), read)

    def _in_compute_dtype(self, params: StoredParams) -> Params:
        """Nothing is gathered: every replica stores whole parameters (`core.rules`)."""
        return self._parameters.gathered(params, self._specs)

    def _by_run(self, params: StoredParams) -> Params:
        """The same parameters, blocks by the name of their run."""
        return {**params, "blocks": self._parameters.runs(params["blocks"])}

    @property
    def _read_specs(self) -> Specs:
        """Partitions of parameters as passes read them."""
        return {**self._specs, "blocks": self._parameters.run_specs(self._specs)}

    @property
    def _own(self) -> PartitionSpec:
        return self.placed.every_device

    @property
    def _x(self) -> PartitionSpec:
        return self.placed.rows(self.placed.entry)

    @property
    def _y(self) -> PartitionSpec:
        return self.placed.rows(self.placed.exit)

    @property
    def _given(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Of batch, key and micro-batch."""
        return self.placed.batch, WHOLE, WHOLE

    @cached_property
    def _specs(self) -> Specs:
        """Partitions of stored parameters."""
        return self.placed.layout.specs(self.stored)

    def _jitted(self, program: Callable[..., Any], **settings: Any) -> "jax.stages.Wrapped":
        return jax.jit(program, compiler_options=dict(self.options), **settings)

    def _mapped(self, run: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        mesh = self.placed.device_mesh.mesh
        return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _padded_to(whole: Any, tree: T) -> T:
    """Arrays with zeros behind them, as large as those of the tree `whole`."""

    def padded(like: Any, leaf: jax.Array) -> jax.Array:
        missing = [(0, size - n) for size, n in zip(like.shape, leaf.shape, strict=True)]
        return jnp.pad(leaf, missing) if like.shape != leaf.shape else leaf

    result: T = jax.tree.map(padded, whole, tree)
    return result


def _cut_to(part: Any, tree: T) -> T:
    """The first entries of arrays, as many as those of the tree `part` have."""
    result: T = jax.tree.map(lambda like, leaf: leaf[tuple(map(slice, like.shape))], part, tree)
    return result


def _one(tree: T) -> T:
    """Arrays of one device, to become [devices, ...]."""
    result: T = jax.tree.map(lambda leaf: leaf[None], tree)
    return result


def _its(tree: T) -> T:
    """Arrays of one device, from [devices, ...]."""
    result: T = jax.tree.map(lambda leaf: leaf[0], tree)
    return result
