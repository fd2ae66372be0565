"""A step whose blocks are offloaded: each is one row of numbers in host memory, fetched to the device for its passes.

    forward    fetch a block's row, W[N/dp]; all-gather it to W[N]; compute the block
    backward   fetch and gather it again; compute dW[N] {U_dp}; reduce-scatter it to dW[N/dp]; copy it to the host

`BlockUpdateHooks` say what the optimizer does with a block's rows, and which rows it reads and writes in either pass
(`training.offloaded_training`).  All micro-batches pass through a block before the next block is fetched (`stream`), so
that the bytes copied in a step do not depend on the number of micro-batches.  The embedding and the head stay on the
devices, whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jhpt.sharding.model_parts import ModelParts, added, picked
from jhpt.sharding.offload.rows import OffloadedRows
from jhpt.sharding.offload.stream import HostRows, Layer, Rows, StreamedLoop, Transfers, apart, joined, over_layers
from jhpt.sharding.parameters import completed
from jhpt.sharding.types import Batch, Gradients, LossSums, Params, RowContext, Tree
from jhpt.sharding.zero import Storage

Update = Callable[[Any, Rows], Rows]
"""(pending update, rows of a block) -> rows."""

Pieces = tuple[jax.Array, Batch, RowContext]
"""(x or its gradient, batch, context) of one micro-batch, or stacked [M, ...]."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BlockUpdateHooks:
    """What an optimizer does with a block's rows in the two passes of a step.

    before_forward: (pending, rows) -> rows, before the block's forward pass; None: rows are used as they are.  It
      receives the rows of `forward_reads`, the weights among them; `forward_writes` are written back.
    start_backward: (sums of the whole batch, pending) -> carry of the last block.
    after_backward: (pending, rows, gradient, carry) -> (carry of the block before it, rows), once the block's gradient
      is known.  It receives the weights and the rows of `backward_reads`; `backward_writes` are written back.
    finish_backward: carry that the first block returns -> the same value on every rank.
    """

    before_forward: Update | None
    forward_reads: tuple[str, ...]
    forward_writes: tuple[str, ...]
    start_backward: Callable[[LossSums, Any], Any]
    after_backward: Callable[[Any, Rows, jax.Array, Any], tuple[Any, Rows]]
    backward_reads: tuple[str, ...] = ()
    backward_writes: tuple[str, ...]
    finish_backward: Callable[[Any], Any]


class OffloadedGradients(NamedTuple):
    """The results of a step.

    rows: of the blocks, as the hooks left them.  embedding_and_head: their gradient of the mean loss.  carry: that of
    the hooks, the same on every rank.
    """

    rows: HostRows
    embedding_and_head: Gradients
    sums: LossSums
    carry: Any


@dataclass(frozen=True, kw_only=True)
class OffloadedBlocks(OffloadedRows):
    """The step of a plan with `offload` over its blocks' rows."""

    def initial(self, offloaded: HostRows, init: Callable[[jax.Array], Params]) -> HostRows:
        """The rows with the weights that `init`, layer -> parameters, returns; block by block, on the devices."""

        def run(offloaded: HostRows) -> HostRows:
            return self._loop.filled(offloaded, lambda layer: self._shard(self.bucket.packed(init(layer))))

        rows = {name: self.spec for name in offloaded}
        return self._mapped(run, (rows,), rows)(offloaded)

    def gradients(
        self,
        offloaded: HostRows,
        embedding_and_head: Params,
        batch: Batch,
        key: jax.Array,
        hooks: BlockUpdateHooks,
        pending: T,
    ) -> OffloadedGradients:
        """The gradient of the mean loss over predicted tokens, and the rows and carry of the hooks.

        Args:
          offloaded: rows by name.
          embedding_and_head: their parameters, whole on every device.
          batch: a tree of global [B, ...].  Row r draws from `fold_in(key, r)`.
          pending: the update that the hooks receive.
        """
        pieces = max(leaf.size for leaf in jax.tree.leaves(batch))

        def run(
            offloaded: HostRows, embedding_and_head: Params, batch: Batch, key: jax.Array, pending: T
        ) -> OffloadedGradients:
            batch, context = self.execution.micro_batches(batch, key)
            gathered, loop = self._gathered(embedding_and_head), self._loop
            update = None if hooks.before_forward is None else partial(hooks.before_forward, pending)
            x, reads, writes = self._embedded(gathered, batch, context), hooks.forward_reads, hooks.forward_writes
            x, passed, offloaded = loop.forward(offloaded, x, context, update, reads, writes)
            gradient, error, sums = self._head_gradient(gathered, x, batch, context, pieces)
            sums = self.execution.summed_over_ranks(sums)
            unit = pieces / sums.tokens
            loop = replace(loop, finish=lambda gradient: self._reduced(gradient) * unit)
            error, carry, offloaded = loop.backward(
                offloaded,
                passed,
                error,
                partial(hooks.after_backward, pending),
                hooks.start_backward(sums, pending),
                hooks.backward_reads,
                hooks.backward_writes,
            )
            gradient = added(gradient, self._embedding_gradient(gathered, error, batch, context))
            gradient = self._reduced_whole(completed(gradient, embedding_and_head))
            gradient = jax.tree.map(lambda leaf: leaf * unit, gradient)
            return OffloadedGradients(offloaded, gradient, sums, hooks.finish_backward(carry))

        rows, everywhere = {name: self.spec for name in offloaded}, PartitionSpec()
        inputs = rows, everywhere, self._batch, everywhere, everywhere
        outputs = OffloadedGradients(rows, everywhere, everywhere, everywhere)  # type: ignore[arg-type]
        return self._mapped(run, inputs, outputs)(offloaded, embedding_and_head, batch, key, pending)

    def sums(self, offloaded: HostRows, embedding_and_head: Params, batch: Batch, key: jax.Array) -> LossSums:
        """The sums alone, by forward passes only, of blocks without a pending update."""

        def run(offloaded: HostRows, embedding_and_head: Params, batch: Batch, key: jax.Array) -> LossSums:
            batch, context = self.execution.micro_batches(batch, key)
            gathered = self._gathered(embedding_and_head)
            x = self._loop.through(offloaded, self._embedded(gathered, batch, context), context)
            each = jax.lax.map(lambda piece: self._parts.head_loss(gathered, *piece), (x, batch, context))
            return self.execution.summed_over_ranks(jax.tree.map(lambda leaf: leaf.sum(0), each))

        rows, everywhere = {name: self.spec for name in offloaded}, PartitionSpec()
        return self._mapped(run, (rows, everywhere, self._batch, everywhere), everywhere)(
            offloaded, embedding_and_head, batch, key
        )

    def over_rows(self, update: Update, offloaded: HostRows, pending: T) -> HostRows:
        """Every block's rows updated as `pending` says; no pass is computed."""

        def run(offloaded: HostRows, pending: T) -> HostRows:
            layer = Layer(
                first=lambda _, rows, carry: (carry, None, {**rows, **update(pending, rows)}),
                second=lambda _, __, carry, ___: (carry, {}),
            )

            def updated(rows: HostRows) -> HostRows:
                return over_layers(
                    rows, layer, None, Transfers(reads=tuple(rows), writes=tuple(rows), prefetch=self.offload.ahead)
                )[1]

            streamed, resident = apart(offloaded)
            return joined(updated(streamed), updated(resident) if resident else {})

        rows = {name: self.spec for name in offloaded}
        return self._mapped(run, (rows, PartitionSpec()), rows)(offloaded, pending)

    def summed(self, value: jax.Array) -> jax.Array:
        """All-reduced over the data ranks; inside a step."""
        return jax.lax.psum(value, self.axes)

    # The embedding and the head.

    def _embedded(self, embedding_and_head: Params, batch: Batch, context: RowContext) -> jax.Array:
        """x of all micro-batches before the first block."""
        return jax.lax.map(lambda piece: self._parts.embed(embedding_and_head, *piece), (batch, context))

    def _head_gradient(
        self, params: Params, x: jax.Array, batch: Batch, context: RowContext, pieces: int
    ) -> tuple[Gradients, jax.Array, LossSums]:
        """(gradient of loss / pieces with respect to what the head reads, gradients of x [M, ...], sums)."""

        def of_piece(piece: Pieces) -> tuple[Gradients, tuple[jax.Array, LossSums]]:
            x, batch, context = piece

            def loss(embedding_and_head: Params, x: jax.Array) -> tuple[jax.Array, LossSums]:
                sums = self._parts.head_loss(embedding_and_head, x, batch, context)
                return sums.loss / pieces, sums

            _, pull, sums = jax.vjp(loss, picked(params, self._parts.head_reads), x, has_aux=True)
            gradient, error = pull(jnp.float32(1))
            return gradient, (error, sums)

        gradient, (error, sums) = _accumulated(of_piece, (x, batch, context))
        # The table's gradient first: it reads that of the logits, which should not be held while blocks are computed.
        gradient, error = jax.lax.optimization_barrier((gradient, error))
        return gradient, error, jax.tree.map(lambda leaf: leaf.sum(0), sums)

    def _embedding_gradient(self, params: Params, error: jax.Array, batch: Batch, context: RowContext) -> Gradients:
        """The gradient with respect to what the embedding reads, from those of x [M, ...]."""

        def of_piece(piece: Pieces) -> tuple[Gradients, None]:
            error, batch, context = piece
            _, pull = jax.vjp(
                lambda embedding_and_head: self._parts.embed(embedding_and_head, batch, context),
                picked(params, self._parts.embed_reads),
            )
            return pull(error)[0], None

        return _accumulated(of_piece, (error, batch, context))[0]

    def _gathered(self, params: Params) -> Params:
        """Whole parameters in the compute dtype, once for all micro-batches."""
        gathered: Params = self._storage.gathered(params, jax.tree.map(lambda _: PartitionSpec(), params))
        return gathered

    def _reduced_whole(self, gradient: Gradients) -> Gradients:
        """The all-reduce of gradients of whole parameters."""
        specs = jax.tree.map(lambda _: PartitionSpec(), gradient)
        reduced: Gradients = self._storage.summed(self._storage.scattered(gradient, specs), specs)
        return reduced

    # The blocks.

    @property
    def _loop(self) -> StreamedLoop:
        return StreamedLoop(
            function=self.execution.recompute(self._parts.block),
            bucket=self.bucket,
            first=0,
            prefetch=self.offload.ahead,
            gather=self._whole,
            cast=self._gathered,
            finish=self._reduced,
        )

    def _whole(self, row: jax.Array) -> jax.Array:
        """W[N/dp] -> W[N]."""
        return jax.lax.all_gather(row, self.axes, tiled=True) if self.ranks > 1 else row

    def _reduced(self, gradient: jax.Array) -> jax.Array:
        """dW[N] {U_dp} -> dW[N/dp]."""
        return jax.lax.psum_scatter(gradient, self.axes, tiled=True) if self.ranks > 1 else gradient

    def _shard(self, row: jax.Array) -> jax.Array:
        """This rank's shard of a row that every rank has whole."""
        size = self.bucket.size // self.ranks
        return jax.lax.dynamic_slice_in_dim(row, jax.lax.axis_index(self.axes) * size, size)

    @property
    def _parts(self) -> ModelParts:
        return self.execution.parts[1]

    @property
    def _storage(self) -> Storage:
        return self.execution.storage(1)

    @property
    def _batch(self) -> PartitionSpec:
        return self.execution.layout.batch.spec

    def _mapped(self, run: Callable[..., T], inputs: object, outputs: object) -> Callable[..., T]:
        mesh = self.execution.layout.device_mesh.mesh
        return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _accumulated(gradients: Callable[[Pieces], tuple[Gradients, T]], pieces: Pieces) -> tuple[Any, T]:
    """(sum of the gradients of all micro-batches, their other results stacked).

    Args:
      gradients: micro-batch -> (gradient, other results).  pieces: [M, ...].
    """
    first: Pieces = jax.tree.map(lambda leaf: leaf[0], pieces)
    if len(jax.tree.leaves(pieces)[0]) == 1:
        gradient, more = gradients(first)
        return gradient, jax.tree.map(lambda leaf: leaf[None], more)

    def add(total: Gradients, piece: Pieces) -> tuple[Gradients, T]:
        gradient, rest = gradients(piece)
        return jax.tree.map(lambda total, one: total + one.astype(jnp.float32), total, gradient), rest

    shapes, _ = jax.eval_shape(gradients, first)
    total, rest = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes), pieces)
    return total, rest


def without_blocks(tree: Mapping[str, Tree]) -> dict[str, Any]:
    """The embedding and the head of a model's tree."""
    return {name: part for name, part in tree.items() if name != "blocks"}
