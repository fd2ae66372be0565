"""The passes of one stage over one micro-batch.

Layers of a stage may use its devices differently.  Between a run of layers of tensor degree a and one of degree b, the
rows of a micro-batch are resharded over X, the axes that are data axes for one run and tensor axes for the other:

    a < b   forward x[B/X] -> x[B] by all-gather; backward every rank takes its rows of the gradient
    a > b   forward x[B] -> x[B/X], every rank takes its rows; backward all-gather of the gradient

Activations that are cut along the sequence are gathered before and cut again after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jhpt.sharding.layer_loop import LayerLoop, Passed
from jhpt.sharding.layer_vjp import SavedOfLayers
from jhpt.sharding.mesh import DeviceMesh
from jhpt.sharding.model_parts import ModelParts, added, picked
from jhpt.sharding.ordering import after
from jhpt.sharding.tensor import all_rows, own_rows
from jhpt.sharding.types import Batch, Gradients, LossSums, Params, RowContext

T = TypeVar("T")


def resharded(x: T, device_mesh: DeviceMesh, before: int, after: int) -> T:
    """Rows of layers of tensor degree `before` -> rows of layers of degree `after`; a tree of arrays [b, ...]."""
    low, high = sorted((before, after))
    shared = tuple(name for name in device_mesh.axes(low).data if name not in device_mesh.axes(high).data)
    if not shared or device_mesh.size(shared) == 1:
        return x
    if after > before:
        gathered: T = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, shared, axis=0, tiled=True), x)
        return gathered

    def shard(leaf: jax.Array) -> jax.Array:
        rows = leaf.shape[0] // device_mesh.size(shared)
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(shared) * rows, rows)

    shards: T = jax.tree.map(shard, x)
    return shards


class MicroBatchGradients(NamedTuple):
    """Gradients and sums of a micro-batch.  fetched: gathered blocks, of runs with `keep_fetched`."""

    gradients: Gradients
    sums: LossSums
    fetched: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring blocks of one degree, and where their parameters are."""

    name: str
    degree: int
    loop: LayerLoop


@dataclass(frozen=True, kw_only=True)
class OneStage:
    """All layers on the same devices.

    parts: the model at every tensor degree in use.  runs: its blocks.  sequence: whether activations between layers of
    a degree above 1 are cut along the sequence.
    """

    device_mesh: DeviceMesh
    parts: Mapping[int, ModelParts]
    runs: tuple[Run, ...]
    embed_degree: int
    head_degree: int
    sequence: bool

    def gradients(
        self, params: Params, batch: Batch, context: RowContext, scale: float, total: Gradients | None = None
    ) -> MicroBatchGradients:
        """The gradient of one micro-batch's loss x scale, added to `total`; sums are float32.

        params, total: `{"blocks": {run: ...}, ...}`; batch, context: of the smallest degree.
        """
        x, pull_embed = self.embedded(params, batch, context)
        x, passed = self.blocks_forward(params, x, context)
        embedding_and_head, error, sums = self.loss_gradient(params, x, batch, context, scale)
        # Otherwise the compiler computes the table's gradient only at the end of the step and holds the logits'
        # gradient until then: gpt2-1.5b with two micro-batches of 8 needs 5.4 instead of 4.8 GB of temporary memory
        # (compiled for an H100).
        error = after(error, embedding_and_head)
        # Not earlier: while the logits exist, a gradient in float32 takes memory that may be missing.
        total = jax.tree.map(lambda leaf: _widened(leaf, error), total)

        fetched = {run.name: of_run.fetched for run, of_run in zip(self.runs, passed, strict=True)}
        blocks, error = self.blocks_backward(params, passed, error, None if total is None else total["blocks"])
        (embedding,) = pull_embed(error)
        embedding_and_head = added(embedding_and_head, embedding)
        if total is not None:
            embedding_and_head = added(
                {name: part for name, part in total.items() if name != "blocks"}, embedding_and_head
            )
        return MicroBatchGradients(embedding_and_head | {"blocks": blocks}, sums, fetched)

    def sums(self, params: Params, batch: Batch, context: RowContext) -> LossSums:
        """Sums over one micro-batch, forward only."""
        x, _ = self.blocks_forward(params, self._embed(params, batch, context), context)
        return self.head_loss(params, x, batch, context)

    def embedded(
        self, params: Params, batch: Batch, context: RowContext
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[Gradients]]]:
        """(x before the first block, its gradient -> that of the parameters that the embedding reads)."""
        x, pull = jax.vjp(
            lambda embedding_and_head: self._embed(embedding_and_head, batch, context),
            picked(params, self._first.embed_reads),
        )
        return x, pull

    def blocks_forward(self, params: Params, x: jax.Array, context: RowContext) -> tuple[jax.Array, list[Passed]]:
        """x after the embedding -> (x before the head, what every run passes to its backward pass)."""
        degree, passed = self.embed_degree, []
        for run in self.runs:
            x, degree = self._between(x, degree, run.degree), run.degree
            x, of_run = run.loop.forward(params["blocks"][run.name], x, self._of_degree(context, degree))
            passed.append(of_run)
        return self._between(x, degree, self.head_degree), passed

    def resumed(
        self, params: Params, x: jax.Array, context: RowContext, saved: Sequence[SavedOfLayers]
    ) -> list[Passed]:
        """What `blocks_forward` passed on, from what it saved in another program; x: for its shape."""
        degree, passed = self.embed_degree, []
        for run, of_run in zip(self.runs, saved, strict=True):
            at, loop, blocks = self._of_degree(context, run.degree), run.loop, params["blocks"][run.name]
            x, degree = jax.eval_shape(partial(self._between, before=degree, after=run.degree), x), run.degree
            passed.append(loop.resumed(blocks, x, at, of_run))
            if run is self.runs[-1]:
                break
            x = jax.eval_shape(lambda blocks, x, at, loop=loop: loop.forward(blocks, x, at)[0], blocks, x, at)
        return passed

    def blocks_backward(
        self, params: Params, passed: Sequence[Passed], error: jax.Array, total: Any
    ) -> tuple[dict[str, Any], jax.Array]:
        """(gradients of all blocks by run, gradient of x after the embedding).

        error: gradient of x before the head.  total: the sum over earlier micro-batches.
        """
        blocks, degree = dict[str, Any](), self.head_degree
        for run, of_run in zip(reversed(self.runs), reversed(passed), strict=True):
            error, degree = self._between(error, degree, run.degree), run.degree
            used = of_run.fetched if run.loop.keep_fetched else params["blocks"][run.name]
            loop = run.loop.with_fetched() if run.loop.keep_fetched else run.loop
            blocks[run.name], error = loop.backward(used, of_run, error, None if total is None else total[run.name])
        return blocks, self._between(error, degree, self.embed_degree)

    def loss_gradient(
        self, params: Params, x: jax.Array, batch: Batch, context: RowContext, scale: float
    ) -> tuple[Gradients, jax.Array, LossSums]:
        """(gradient of loss x scale, that of x before the head, sums)."""

        def loss(embedding_and_head: Params, x: jax.Array) -> tuple[jax.Array, LossSums]:
            sums = self.head_loss(embedding_and_head, x, batch, context)
            return sums.loss * scale, sums

        _, pull, sums = jax.vjp(loss, picked(params, self._last.head_reads), x, has_aux=True)
        gradient, error = pull(jnp.float32(1))
        return gradient, error, sums

    def _of_degree(self, rows: T, degree: int) -> T:
        """Rows of the smallest degree -> those of layers of this one."""
        return resharded(rows, self.device_mesh, self.device_mesh.degrees[0], degree)

    def _between(self, x: jax.Array, before: int, after: int) -> jax.Array:
        """x, or its gradient, from layers of tensor degree `before` to layers of degree `after`."""
        if before == after:
            return x
        if self.sequence and before > 1:
            x = all_rows(self.device_mesh.axes(before).tensor, x)
        x = resharded(x, self.device_mesh, before, after)
        return own_rows(self.device_mesh.axes(after).tensor, x) if self.sequence and after > 1 else x

    @property
    def _first(self) -> ModelParts:
        return self.parts[self.embed_degree]

    @property
    def _last(self) -> ModelParts:
        return self.parts[self.head_degree]

    def _embed(self, embedding_and_head: Params, batch: Batch, context: RowContext) -> jax.Array:
        return self._first.embed(embedding_and_head, *self._of_degree((batch, context), self.embed_degree))

    def head_loss(self, embedding_and_head: Params, x: jax.Array, batch: Batch, context: RowContext) -> LossSums:
        """Sums over the rows of a micro-batch."""
        sums: LossSums = self._last.head_loss(
            embedding_and_head, x, *self._of_degree((batch, context), self.head_degree)
        )
        return sums


def _widened(leaf: jax.Array, done: jax.Array) -> jax.Array:
    """The leaf in float32; if it has to be converted, then only after `done` is computed."""
    return leaf if leaf.dtype == jnp.float32 else after(leaf.astype(jnp.float32), done)
