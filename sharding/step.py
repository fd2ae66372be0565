"""A plan's step on its mesh: gradients and sums of a global batch, as one `shard_map`.

All communication is written down: `storage` gathers parameters and sums gradients over the data axes, `tensor` sums
activations, `accumulate` reshards them, `pipeline` hands them on.  Nothing is left to the partitioner.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.core.axes import PIPE
from jhpt.core.config import GradientCompression
from jhpt.core.plan import Zero
from jhpt.core.schedule import timetable
from jhpt.kernels.implementation import Implementation
from jhpt.sharding.compression.gradients import GradientReduction, exchanged_tree
from jhpt.sharding.layer_loop import Finish, LayerLoop
from jhpt.sharding.layout import TABLE, Layout
from jhpt.sharding.model_parts import ModelParts, Recompute, picked
from jhpt.sharding.partition import path_name
from jhpt.sharding.pipeline import Pipeline
from jhpt.sharding.recompute import everything
from jhpt.sharding.sample_chunks import streaming
from jhpt.sharding.single_stage import OneStage, Run
from jhpt.sharding.zero import Storage, names_of, one_layer, summed_together


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A plan, ready to be traced.

    parts: the model at every tensor degree in use.  dtype: what it computes in.  tied: whether the head reads the
    embedding's table; None: there is no table.  unroll: blocks in the program instead of in a loop.  overlap:
    communicate layer by layer, beside the computation of others, instead of before and after all of it.  kernels: those
    of compressed gradients.
    """

    layout: Layout
    parts: Mapping[int, ModelParts]
    dtype: Any
    tied: bool | None
    unroll: bool
    overlap: bool = False
    recompute: Recompute = everything
    kernels: Implementation = "reference"

    def gradients(self, params: Any, rows: Any, key: jax.Array) -> tuple[Any, Any]:
        """Gradient of the mean loss over all predicted tokens, stored like `params`, and the sums.

        Args:
          rows: a tree of global [B, ...].  Row r draws from `fold_in(key, r)`.
        """
        assert not self._compresses, "the plan compresses gradients: take compressed_gradients"
        return self.compressed_gradients(params, rows, key, {})[:2]

    def compressed_gradients(self, params: Any, rows: Any, key: jax.Array, feedback: Any) -> tuple[Any, Any, Any]:
        """`gradients` with what earlier steps have left, and what this one leaves (`feedback`).

        What is left is in the units in which gradients cross the data axes: of the sum of losses, over the size of the
        batch.  That is a multiple of the mean's, and one and the same where all batches predict equally many tokens.
        """
        specs, left_specs = self.layout.specs(params), {k: self.layout.rank_specs(v) for k, v in feedback.items()}
        pieces = max(leaf.size for leaf in jax.tree.leaves(rows))

        def run(params: Any, rows: Any, key: jax.Array, feedback: Any) -> tuple[Any, Any, Any]:
            scale = 1.0 / pieces  # keeps sums near 1, whatever the compute dtype
            rows, keys = self.micro_batches(rows, key)
            working = self._working(params, specs)
            left = jax.tree.map(lambda leaf: leaf[0], feedback)
            if self.layout.stages == 1:
                gradients, sums = self._accumulated(working, rows, keys, scale, specs, left)
            else:
                gradients, sums = self._pipeline(specs).gradients(working, rows, keys, scale)
            sums = self.summed_over_ranks(sums)
            gradients, left = self._without_left(gradients, left)
            gradients = self._stored(completed(gradients, working), specs)
            if self._compresses:
                gradients, left = self._exchanged(gradients, left, specs)
            gradients = jax.tree.map(lambda g: g / (scale * sums.tokens), gradients)
            return gradients, sums, jax.tree.map(lambda leaf: leaf[None], left)

        out = specs, PartitionSpec(), left_specs
        return self._mapped(run, specs, rows, out, left_specs)(params, rows, key, feedback)

    def sums(self, params: Any, rows: Any, key: jax.Array) -> Any:
        """The sums alone, forward only."""
        specs = self.layout.specs(params)

        def run(params: Any, rows: Any, key: jax.Array) -> Any:
            rows, keys = self.micro_batches(rows, key)
            working = self._working(params, specs)
            if self.layout.stages > 1:
                return self.summed_over_ranks(self._pipeline(specs).sums(working, rows, keys))
            stage = self._one_stage(specs, first=self._fetches_once, last=False)
            each = jax.lax.map(lambda piece: stage.sums(working, *piece), (rows, keys))
            return self.summed_over_ranks(jax.tree.map(lambda leaf: leaf.sum(0), each))

        return self._mapped(run, specs, rows, PartitionSpec())(params, rows, key)

    def norm(self, gradients: Any) -> jax.Array:
        """Global norm; what a shared table has on the last stage is a copy and does not count."""
        mesh, specs = self.layout.device_mesh.mesh, self.layout.specs(gradients)

        def run(gradients: Any) -> jax.Array:
            squares = jax.tree_util.tree_map_with_path(self._squares, gradients, specs)
            return jnp.sqrt(jax.lax.psum(sum(jax.tree.leaves(squares)), mesh.axis_names))

        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)(gradients)

    def norms_by_layer(self, gradients: Any) -> Any:
        """A tree like the gradients', with the norm of all of a block, [L], or of all that is in none, ()."""
        mesh, specs = self.layout.device_mesh.mesh, self.layout.specs(gradients)
        stacks = self.layout.stacks(gradients)
        rows = PartitionSpec(PIPE) if self.layout.stages > 1 else PartitionSpec()
        over = tuple(name for name in mesh.axis_names if name != PIPE)

        def run(gradients: Any) -> dict[str, jax.Array]:
            squares = jax.tree_util.tree_map_with_path(partial(self._squares, by_layer=True), gradients, specs)
            named = list(zip(jax.tree.leaves(stacks), jax.tree.leaves(squares), strict=True))
            total = {stack: sum(own for name, own in named if name == stack) for stack, _ in named}
            return {
                stack: jnp.sqrt(jax.lax.psum(own, over if stack else mesh.axis_names)) for stack, own in total.items()
            }

        out = {stack: rows if stack else PartitionSpec() for stack in set(jax.tree.leaves(stacks))}
        norms = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)(gradients)
        return jax.tree.map(lambda stack: norms[stack], stacks)

    def _squares(
        self, path: tuple[Any, ...], leaf: jax.Array, spec: PartitionSpec, by_layer: bool = False
    ) -> jax.Array:
        """Sum of the squares of a leaf, or of each block's part of it; what several devices hold counts in parts."""
        name, mesh = path_name(path), self.layout.device_mesh.mesh
        cut = {name for names in spec for name in names_of(names)}
        holders = math.prod(size for name, size in mesh.shape.items() if name not in cut)
        rest = tuple(range(1, leaf.ndim)) if by_layer and "blocks/" in name else None
        own = jnp.sum(jnp.square(leaf), rest) / holders
        if name == "/".join(TABLE) and self.layout.stages > 1 and self.tied:
            own = jnp.where(jax.lax.axis_index(PIPE) == self.layout.stages - 1, 0.0, own)
        return own

    def _mapped(self, run: Any, specs: Any, rows: Any, out: Any, *more: Any) -> Any:
        row_specs = jax.tree.map(lambda _: self.layout.batch.spec, rows)
        return jax.shard_map(
            run,
            mesh=self.layout.device_mesh.mesh,
            in_specs=(specs, row_specs, PartitionSpec(), *more),
            out_specs=out,
            check_vma=False,
        )

    # What a step does with parameters, rows and gradients around the passes.

    def micro_batches(self, rows: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        """This device's rows and their keys, [M, b, ...]."""
        device_mesh = self.layout.device_mesh
        axes = device_mesh.axes(device_mesh.degrees[0]).data
        local = len(jax.tree.leaves(rows)[0])
        ids = jax.lax.axis_index(axes) * local + jnp.arange(local)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
        cut = lambda leaf: leaf.reshape(self.layout.plan.micro_batches, -1, *leaf.shape[1:])  # noqa: E731
        return jax.tree.map(cut, rows), cut(keys)

    def _working(self, params: Any, specs: Any) -> Any:
        """Parameters as the passes read them: gathered, but blocks that are fetched layer by layer."""
        embedding_and_head, own = self._embedding_and_head(params), self._embedding_and_head_specs(specs)
        working: dict[str, Any] = {}
        for name in embedding_and_head:
            working |= self.storage(self._embedding_and_head_degree(name)).gathered(
                {name: embedding_and_head[name]}, {name: own[name]}
            )
        blocks, own = self._runs(params["blocks"]), self._runs(specs["blocks"])
        if self._zero < 3 and not self._fetches_once:
            blocks = {name: self.storage(t).gathered(blocks[name], own[name]) for name, t, _ in self.layout.runs}
        return {**working, "blocks": blocks}

    def _stored(self, gradients: Any, specs: Any) -> Any:
        """Gradients as the passes leave them -> summed over the data axes and lying like the parameters."""
        embedding_and_head = {name: part for name, part in gradients.items() if name != "blocks"}
        stored = self._stored_embedding_and_head(embedding_and_head, self._embedding_and_head_specs(specs))
        if self.layout.stages > 1 and self.tied:
            folder, name = TABLE  # both ends read it
            last = self.layout.stages - 1
            other = jax.lax.ppermute(stored[folder][name], PIPE, [(0, last), (last, 0)])
            stored[folder] = {**stored[folder], name: stored[folder][name] + other}
        if self.layout.stages > 1:
            stored = jax.tree.map(lambda leaf: leaf[None], stored)

        blocks, own = {}, self._runs(specs["blocks"])
        for name, degree, _ in self.layout.runs:
            storage, part = self.storage(degree, blocks=True), gradients["blocks"][name]
            if self._zero < 3 and not self._gives_late:
                part = storage.scattered(part, own[name])
            blocks[name] = part if self._gives_late and self._zero == 0 else storage.summed(part, own[name])
        return {**stored, "blocks": self._joined(blocks)}

    @property
    def _zero(self) -> Zero:
        """The plan's level; ZeRO-1 over one data rank shares nothing out, and is none."""
        plan = self.layout.plan
        return 0 if plan.zero == 1 and plan.replicas == 1 else plan.zero

    @property
    def _how(self) -> GradientCompression:
        return self.layout.plan.gradient_compression

    @property
    def _compresses(self) -> bool:
        """Whether gradients of matrices are summed in few bits; `_stored` leaves those as they are."""
        return self._how.on

    def _with_left(self, total: Any, left: Any) -> Any:
        """What the last backward pass adds to; layers that give late find there what earlier steps have left, too."""
        if not (self._compresses and self._gives_late):
            return total
        runs = {kind: self._runs(tree["blocks"]) for kind, tree in left.items()}
        so_far = {} if total is None else total["blocks"]
        pairs = {
            name: (so_far.get(name), {kind: each[name] for kind, each in runs.items()}) for name, *_ in self.layout.runs
        }
        return {**(total or {}), "blocks": pairs}

    def _without_left(self, gradients: Any, left: Any) -> tuple[Any, Any]:
        """Takes the pairs of `_with_left` apart again."""
        if not (self._compresses and self._gives_late):
            return gradients, left
        pairs = gradients["blocks"]
        runs = {kind: {name: rest[kind] for name, (_, rest) in pairs.items()} for kind in left}
        left = {kind: {**tree, "blocks": self._joined(runs[kind])} for kind, tree in left.items()}
        return {**gradients, "blocks": {name: own for name, (own, _) in pairs.items()}}, left

    def _exchanged(self, gradients: Any, left: Any, specs: Any) -> tuple[Any, Any]:
        """Stored gradients, whose matrices `_stored` has left as they were: these summed, and what is left of them."""
        specs = {**self._embedding_and_head_specs(specs), "blocks": one_layer(specs["blocks"])}
        embedding_and_head = tuple(name for name in gradients if name != "blocks")
        if self.layout.stages == 1:
            names = embedding_and_head if self._gives_late else (*embedding_and_head, "blocks")
            done, rest = self._exchange(_some(gradients, names), _some_left(left, names), specs)
            return {**gradients, **done}, {kind: {**tree, **rest[kind]} for kind, tree in left.items()}
        slots = jax.tree.map(
            lambda leaf: leaf[0], (_some(gradients, embedding_and_head), _some_left(left, embedding_and_head))
        )
        on_first_and_last = jax.tree.map(
            lambda leaf: leaf[None], self._on_first_and_last_stage(partial(self._exchange, specs=specs), *slots)
        )
        blocks = self._exchange(_some(gradients, ("blocks",)), _some_left(left, ("blocks",)), specs)
        return {**on_first_and_last[0], **blocks[0]}, {
            kind: {**on_first_and_last[1][kind], **blocks[1][kind]} for kind in left
        }

    def _on_first_and_last_stage(self, exchange: Any, gradients: Any, left: Any) -> tuple[Any, Any]:
        """Only on the first and the last stage, as in `_stored_embedding_and_head`."""
        sums, _ = jax.eval_shape(exchange, gradients, left)
        stage = jax.lax.axis_index(PIPE)
        done: tuple[Any, Any] = jax.lax.cond(
            (stage == 0) | (stage == self.layout.stages - 1),
            exchange,
            lambda _, left: (jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums), left),
            gradients,
            left,
        )
        return done

    def _exchange(self, gradients: Any, left: Any, specs: Any) -> tuple[Any, Any]:
        """`exchanged_tree` of some of the model's tree."""
        return exchanged_tree(
            gradients, left, self._reductions(_some(specs, tuple(gradients))), self._how, self.kernels
        )

    def _reductions(self, specs: Any, degree: int | None = None) -> dict[str, GradientReduction]:
        """By path; degree: None: as the path says."""
        leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        named = [(path_name(path), spec) for path, spec in leaves]
        return {name: self.storage(degree or self.layout.degree(name)).reduction(spec) for name, spec in named}

    def _stored_embedding_and_head(self, gradients: Any, specs: Any) -> Any:
        def reduced(gradients: Any) -> Any:
            done: dict[str, Any] = {}
            for name, part in gradients.items():
                storage, own = self.storage(self._embedding_and_head_degree(name)), {name: specs[name]}
                done |= storage.summed(storage.scattered({name: part}, own), own)
            return done

        if self.layout.stages == 1:
            return reduced(gradients)
        # Stages between the ends have nothing to sum; all data ranks of a stage agree on that.
        shapes = jax.eval_shape(reduced, gradients)
        stage = jax.lax.axis_index(PIPE)
        return jax.lax.cond(
            (stage == 0) | (stage == self.layout.stages - 1),
            reduced,
            lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            gradients,
        )

    def _runs(self, blocks: Any) -> Any:
        return {"0": blocks} if self.layout.stacked_whole else blocks

    def _joined(self, runs: Any) -> Any:
        return runs["0"] if self.layout.stacked_whole else runs

    def _embedding_and_head(self, params: Any) -> Any:
        """This device's: what lies in its slots."""
        embedding_and_head = {name: part for name, part in params.items() if name != "blocks"}
        return jax.tree.map(lambda leaf: leaf[0], embedding_and_head) if self.layout.stages > 1 else embedding_and_head

    def _embedding_and_head_specs(self, specs: Any) -> Any:
        embedding_and_head = {name: part for name, part in specs.items() if name != "blocks"}
        return one_layer(embedding_and_head) if self.layout.stages > 1 else embedding_and_head

    def summed_over_ranks(self, sums: Any) -> Any:
        """A tree of scalars, over all data ranks and stages."""
        axes = self.layout.device_mesh.axes(self.layout.degrees[-1]).data
        leaves, tree = jax.tree.flatten(sums)
        return jax.tree.unflatten(tree, summed_together(leaves, axes if self.layout.stages == 1 else (PIPE, *axes)))

    def storage(self, degree: int, blocks: bool = False) -> Storage:
        """How parameters of this degree are held between uses."""
        axes = self.layout.device_mesh.axes(degree)
        cut = axes.tensor if blocks and self.layout.plan.sequence and degree > 1 else ()
        return Storage(axes.data, self.layout.device_mesh.size(axes.data), self.dtype, cut, self._compresses)

    def _embedding_and_head_degree(self, name: str) -> int:
        return self.layout.degrees[0 if name == TABLE[0] else -1]

    # The passes.

    def _accumulated(
        self, working: Any, rows: Any, keys: jax.Array, scale: float, specs: Any, left: Any
    ) -> tuple[Any, Any]:
        """Over all micro-batches of one stage.  The first fetches what all use, the last gives the gradients away."""
        pick = lambda index: (jax.tree.map(lambda leaf: leaf[index], rows), keys[index])  # noqa: E731
        count = len(keys)
        if count == 1:
            total = self._with_left(None, left)
            once = self._one_stage(specs, first=True, last=True).gradients(working, *pick(0), scale, total)
            return once.gradients, once.sums
        start = self._one_stage(specs, first=True, last=False).gradients(working, *pick(0), scale)
        if self._fetches_once:
            working = {**working, "blocks": start.fetched}
        middle = self._one_stage(specs, first=False, last=False)

        def more(carry: tuple[Any, Any], at: int | jax.Array) -> tuple[tuple[Any, Any], None]:
            total, sums = carry
            own = middle.gradients(working, *pick(self._after(total, at)), scale, total)
            return (own.gradients, jax.tree.map(jnp.add, sums, own.sums)), None

        total, sums = start.gradients, start.sums
        if count == 2 and not self._gives_late:
            return more((total, sums), 1)[0]
        if count > 2:
            total = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)
            stop = count - 1 if self._gives_late else count
            total, sums = jax.lax.scan(more, (total, sums), jnp.arange(1, stop))[0]
        if not self._gives_late:
            return total, sums
        at = self._after(total, count - 1)
        total = self._with_left(total, left)
        own = self._one_stage(specs, first=False, last=True).gradients(working, *pick(at), scale, total)
        return own.gradients, jax.tree.map(jnp.add, sums, own.sums)

    def _after(self, total: Any, at: int | jax.Array) -> jax.Array:
        """The index of a micro-batch, known when the gradients of those before are, of the entry at the very end.

        Else the compiler begins its forward pass, where it is not in the same loop, while activations of others are
        held; an optimization_barrier does not keep it from that.
        """
        entry = jax.tree.leaves(picked(total, self.parts[self.layout.degrees[0]].embed_reads))[0]
        return jnp.where(entry.ravel()[0] >= jnp.finfo(jnp.float32).max, 0, at)

    @property
    def _fetches_once(self) -> bool:
        """Whether blocks are gathered by the first micro-batch, layer by layer, instead of all at the start."""
        return self.overlap and self._zero == 1 and self.layout.stages == 1

    @property
    def _gives_late(self) -> bool:
        """Whether gradients of blocks are summed layer by layer in the last backward pass, instead of all after it."""
        return self.overlap and self._zero < 3 and self.layout.stages == 1

    def _one_stage(self, specs: Any, *, first: bool, last: bool) -> OneStage:
        layout = self.layout
        runs = []
        for name, degree, blocks in layout.runs:
            own, storage = one_layer(self._runs(specs["blocks"])[name]), self.storage(degree)
            shared = storage.ranks > 1
            fetches = self._zero == 3 or (first and self._fetches_once)
            gives = self._zero == 3 or (last and self._gives_late)
            loop = LayerLoop(
                stream=streaming(self.parts[degree], layout.sample_chunks[blocks.start], in_turn=self.overlap),
                first=blocks.start,
                count=len(blocks),
                unroll=self.unroll,
                fetch=partial(storage.gathered, specs=own) if fetches else _same,
                finish=self._finish(degree, own, last=last),
                ahead=layout.plan.prefetch if fetches and shared and self.overlap else 0,
                late=gives and shared and self.overlap,
                keep=first and self._fetches_once,
                recompute=self.recompute,
            )
            runs.append(Run(name=name, degree=degree, loop=loop))
        return OneStage(
            device_mesh=layout.device_mesh,
            parts=self.parts,
            runs=tuple(runs),
            entry_degree=layout.degrees[0],
            exit_degree=layout.degrees[-1],
            sequence=layout.plan.sequence,
        )

    def _finish(self, degree: int, specs: Any, *, last: bool) -> Finish:
        """What becomes of a layer's gradient in the backward pass; `_stored` does the rest."""
        storage = self.storage(degree, blocks=True)

        def whole(gradient: Any, total: Any) -> Any:
            return gradient if total is None else jax.tree.map(jnp.add, total, gradient)

        def scattered(gradient: Any, total: Any) -> Any:
            return whole(storage.scattered(gradient, specs), total)

        def given(gradient: Any, total: Any) -> Any:
            own = storage.scattered(whole(gradient, total), specs)
            return storage.summed(own, specs) if self._zero == 0 else own

        def exchanged(gradient: Any, pair: Any) -> Any:
            so_far, left = pair
            return exchanged_tree(
                given(gradient, so_far), left, self._reductions(specs, degree), self._how, self.kernels
            )

        if self._zero == 3:
            return scattered
        if not (last and self._gives_late):
            return whole
        return exchanged if self._compresses else given

    def _pipeline(self, specs: Any) -> Pipeline:
        plan = self.layout.plan
        degree, own = self.layout.degrees[0], one_layer(specs["blocks"])
        storage = self.storage(degree)
        first, count = self.layout.chunks
        return Pipeline(
            parts=_reading_slot(self.parts[degree]) if self.tied is False else self.parts[degree],
            stream=streaming(self.parts[degree], self.layout.sample_chunks[0], in_turn=self.overlap),
            timetable=timetable(plan.schedule, len(plan.stages), plan.chunks, plan.micro_batches),
            first=first,
            count=count,
            unroll=self.unroll,
            fetch=partial(storage.gathered, specs=own) if self._zero == 3 else _same,
            finish=partial(storage.scattered, specs=own) if self._zero == 3 else _same,
            ahead=plan.prefetch if self._zero == 3 and storage.ranks > 1 and self.overlap else 0,
            recompute=self.recompute,
        )


def _same(params: Any) -> Any:
    return params


def _some(tree: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: tree[name] for name in names}


def _some_left(left: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {kind: _some(tree, names) for kind, tree in left.items()}


def completed(gradients: Any, params: Any) -> Any:
    """Zeros for parameters that the loss does not depend on."""
    if not isinstance(params, Mapping):
        return gradients
    nothing = lambda part: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), part)  # noqa: E731
    return {
        name: completed(gradients[name], part) if name in gradients else nothing(part) for name, part in params.items()
    }


def _reading_slot(parts: ModelParts) -> ModelParts:
    """The head's own table lies in the slot of the embedding's (`layout`)."""
    folder, name = TABLE

    def head_loss(embedding_and_head: Any, x: jax.Array, rows: Any, keys: jax.Array) -> Any:
        head = {**embedding_and_head["head"], name: embedding_and_head[folder][name]}
        return parts.head_loss({**embedding_and_head, "head": head}, x, rows, keys)

    return replace(parts, head_loss=head_loss, head_reads=(*parts.head_reads, "/".join(TABLE)))
