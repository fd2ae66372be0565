"""The passes of several stages: one program that walks every device through a timetable.

Inside `shard_map` each device knows its stage.  In a tick it

    1. receives the gradient that its successor sent, while
    2. it runs its forward pass, if it has one, and sends the result on, while
    3. it runs its backward pass, if it has one; the resulting gradient is sent in the next tick.

So with both passes each transfer runs beside the pass that does not need it.  Ticks in which no device has a forward
pass, or none has a backward pass, omit that pass and its transfer; there nothing runs beside the other pass's transfer.
`jhpt.planner.cost.schedule` prices these ticks.  Saved activations lie in a ring with a slot for every micro-batch in
flight.

Under 1f1b the timetable has one pass a tick, and neighbours exchange at the end of it, in turn: in even ticks stages 0
and 1, 2 and 3, ...; in odd ticks 1 and 2, 3 and 4, ....  A collective permute makes only those wait that it names, so
that a stage may begin its tick before others have ended theirs: with forward and backward passes of different length no
time is lost.  Under zb-h1 a tick may end with a weight pass (`split_backward`), before the exchange.

The last stage computes logits and loss in its backward pass, so that they never outlive a tick.
The embedding and the head have a slot on every stage, because all devices run one program; only the first stage uses
the embedding's and only the last the head's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.axes import PIPE
from jhpt.core.schedule import Phase, Timetable, timetable
from jhpt.sharding import stacks
from jhpt.sharding.layer_loop import Fetch
from jhpt.sharding.layer_vjp import Saved, SplitLayer, split_layer
from jhpt.sharding.model_parts import ModelParts, Recompute, picked
from jhpt.sharding.sample_chunks import ChunkedSamples, UnchunkedSamples
from jhpt.sharding.split_backward import SplitBackward, split_backward
from jhpt.sharding.types import Activation, Batch, Gradients, LayerContext, LossSums, Params, RowContext, Tree

T = TypeVar("T")


class Carry(NamedTuple):
    """The state that is passed from tick to tick.

    arrived: input of the next forward pass.  leaving: gradient to be sent to the predecessor.  ring: saved activations
    of forward passes, [slots, layers, ...].  closing: saved activations of the end of each chunk's stream, and
    outputs: x after each chunk, both [slots, ...].  blocks, embedding_and_head: gradients so far.
    """

    arrived: jax.Array
    leaving: jax.Array
    ring: Saved
    closing: Saved
    outputs: jax.Array
    blocks: Tree
    embedding_and_head: Gradients
    sums: LossSums


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages, chunks and their schedule.

    stream: how x is handed from block to block.
    first, count: [S, v] the first block and the number of blocks of every chunk; a device holds v x `depth` rows of
      every stacked leaf, chunk after chunk, of which the last may be unused.
    fetch, finish: from a block's stored parameters to those that it uses, and from its gradient to the stored one.
    unroll: blocks stand in the program instead of in a loop.  prefetch: how many blocks ahead are fetched.
    """

    parts: ModelParts
    stream: UnchunkedSamples | ChunkedSamples
    timetable: Timetable
    first: np.ndarray
    count: np.ndarray
    unroll: bool
    fetch: Fetch
    finish: Callable[[Any], Any]
    prefetch: int
    recompute: Recompute

    @property
    def stages(self) -> int:
        """The number of stages."""
        return int(self.first.shape[0])

    @property
    def chunks(self) -> int:
        """The number of chunks of a stage."""
        return int(self.first.shape[1])

    @property
    def depth(self) -> int:
        """Blocks that every chunk has room for."""
        return int(self.count.max())

    def gradients(self, params: Params, batch: Batch, context: RowContext, scale: float) -> tuple[Gradients, LossSums]:
        """This device's part of the gradient of loss x scale, and of the sums, over all micro-batches.

        params: `{"blocks": {"0": [v depth, ...]}, ...}` of this device; batch, context: trees of
        [M, b, ...].
        """
        device = _Device(self, params, batch, context, scale)
        carry = device.start()
        if self.timetable.in_turn:
            carry = self._walked(device, carry)
        else:
            for phase in self.timetable.phases():
                carry = self._phase(device, phase, carry)
        return {**carry.embedding_and_head, "blocks": {"0": carry.blocks}}, carry.sums

    def _walked(self, device: "_Device", carry: Carry) -> Carry:
        """All ticks of a timetable whose neighbours exchange in turn: one pass a tick, and at its end the exchange."""

        def tick(carry: Carry, now: tuple[jax.Array, ...]) -> tuple[Carry, None]:
            forward, backward, *weights = (table[device.stage] for table in now[1:])
            carry = maybe(forward[0] >= 0, partial(device.forward, entry=forward), carry)
            carry = maybe(backward[0] >= 0, partial(device.backward, entry=backward, error=carry.leaving), carry)
            for entry in weights:
                carry = maybe(entry[0] >= 0, partial(device.weights, entry=entry), carry)
            both = carry.arrived, carry.leaving
            arrived, leaving = jax.lax.switch(now[0] % 2, [partial(self._exchanged, first) for first in (0, 1)], both)
            return carry._replace(arrived=arrived, leaving=leaving), None

        table = self.timetable
        passes = table.forward, table.backward, *(() if table.weights is None else (table.weights,))
        return jax.lax.scan(tick, carry, (jnp.arange(table.ticks), *map(jnp.asarray, passes)))[0]

    def _exchanged(self, first: int, sent: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(activations, gradients) that stages `first` and the next one, `first` + 2 and the next one, ... exchange."""
        pairs = [(s, s + 1) for s in range(first, self.stages - 1, 2)]
        activations, errors = sent
        return jax.lax.ppermute(activations, PIPE, pairs), jax.lax.ppermute(errors, PIPE, [(b, a) for a, b in pairs])

    def _phase(self, device: "_Device", phase: Phase, carry: Carry) -> Carry:
        def tick(carry: Carry, now: tuple[jax.Array, jax.Array]) -> tuple[Carry, None]:
            forward, backward = (table[device.stage] for table in now)
            error, arrived = carry.leaving, carry.arrived
            if phase.backward:
                error = self._sent(error, -1)
            if phase.forward:
                carry = maybe(forward[0] >= 0, partial(device.forward, entry=forward), carry)
                arrived = self._sent(carry.arrived, +1)
            if phase.backward:
                carry = maybe(backward[0] >= 0, partial(device.backward, entry=backward, error=error), carry)
                arrived, carry = _after(arrived, carry)
            return carry._replace(arrived=arrived), None

        table = self.timetable
        now = jnp.asarray(table.forward[phase.ticks]), jnp.asarray(table.backward[phase.ticks])
        return jax.lax.scan(tick, carry, now)[0]

    def sums(self, params: Params, batch: Batch, context: RowContext) -> LossSums:
        """This device's part of the sums over all micro-batches, forward only."""
        device = _Device(self, params, batch, context, 1.0)
        table = self.timetable
        if table.in_turn:  # a forward pass in every tick, because there is none to wait for in between
            table = timetable("gpipe", self.stages, 1, table.micro_batches)
        busy = table.forward[..., 0].max(axis=1) >= 0

        def tick(carry: tuple[jax.Array, LossSums], now: jax.Array) -> tuple[tuple[jax.Array, LossSums], None]:
            entry = now[device.stage]
            carry = maybe(entry[0] >= 0, partial(device.evaluate, entry=entry), carry)
            return (self._sent(carry[0], +1), carry[1]), None

        start = device.start()
        sums: LossSums = jax.lax.scan(tick, (start.arrived, start.sums), jnp.asarray(table.forward[busy]))[0][1]
        return sums

    def _sent(self, x: jax.Array, to: int) -> jax.Array:
        """x of the neighbour before (to=+1) or behind (to=-1); around the ring where stages have several chunks."""
        pairs = [(s, s + to) for s in range(self.stages) if 0 <= s + to < self.stages]
        if self.chunks > 1:
            pairs = [(s, (s + to) % self.stages) for s in range(self.stages)]
        return jax.lax.ppermute(x, PIPE, pairs)


def _after(arrived: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
    """Both as they are, but what has arrived is not used before the backward pass is over.

    Otherwise XLA moves the transfer of activations into the next tick, to the forward pass that waits for them
    (collective-permute-motion, one of its passes; seen with jax 0.11.2), and nothing runs beside it.
    """
    arrived, leaving = jax.lax.optimization_barrier((arrived, carry.leaving))
    return arrived, carry._replace(leaving=leaving)


def maybe(predicate: jax.Array, function: Callable[[T], T], carry: T) -> T:
    """function(carry), or the carry as it is.

    It is a loop of one iteration or none, because loops work in place and a conditional copies its results.
    """
    once = lambda state: (jnp.zeros((), bool), function(state[1]))  # noqa: E731
    result: T = jax.lax.while_loop(lambda state: state[0], once, (predicate, carry))[1]
    return result


class _Device:
    """One device's view of a step; every method is traced into the one program."""

    def __init__(self, pipeline: Pipeline, params: Params, batch: Batch, context: RowContext, scale: float) -> None:
        self.pipeline, self.parts = pipeline, pipeline.parts
        self.params, self.batch, self.context, self.scale = params, batch, context, scale
        self.stage = jax.lax.axis_index(PIPE)
        self.embedding_and_head = {name: value for name, value in params.items() if name != "blocks"}
        self.shape = jax.eval_shape(self.parts.embed, picked(params, self.parts.embed_reads), *self._rows(0))
        self.stream, self.one, at = pipeline.stream, pipeline.fetch(self._row(0)), (_at(context, 0), jnp.int32(0))
        opened = jax.eval_shape(self.stream.opened, self.one, self.shape, at)
        self.split: SplitLayer = split_layer(pipeline.recompute(self.stream.layer), self.one, opened, at)
        late = pipeline.timetable.weights is not None
        self.parted: SplitBackward | None = split_backward(self.split, self.one, at) if late else None
        self.close: SplitLayer = split_layer(lambda _, stream, at: self.stream.closed(stream, at), (), opened, at)

    def start(self) -> Carry:
        """The state before the first tick."""
        slots, depth = self.pipeline.timetable.slots, self.pipeline.depth
        zeros = jnp.zeros(self.shape.shape, self.shape.dtype)
        gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.embedding_and_head)
        finished, stacked = jax.eval_shape(self.pipeline.finish, self.one), self.params["blocks"]["0"]
        sums = jax.eval_shape(self.parts.head_loss, self.params, self.shape, *self._rows(0))
        return Carry(
            arrived=zeros,
            leaving=zeros,
            ring=stacks.filled(self.split.shapes, (slots, depth), jnp.zeros(())),
            closing=stacks.filled(self.close.shapes, (slots,), jnp.zeros(())),
            outputs=jnp.zeros((slots, *self.shape.shape), self.shape.dtype),
            blocks=jax.tree.map(lambda leaf, rows: jnp.zeros((len(rows), *leaf.shape), jnp.float32), finished, stacked),
            embedding_and_head=gradients,
            sums=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums),
        )

    def forward(self, carry: Carry, entry: jax.Array) -> Carry:
        """A forward pass; `arrived` becomes the activation to send."""
        micro_batch, chunk, slot = entry
        context = _at(self.context, micro_batch)
        x = self._entered(carry.arrived, micro_batch, chunk)

        def block(at: jax.Array, layer: Params, x: Activation, ring: Saved) -> tuple[Activation, Saved]:
            y, saved = self.split.forward(layer, x, (context, self._layer(chunk, at)))
            return y, stacks.write(ring, (slot, at), saved)

        stream, ring = self._blocks(chunk, block, (self._opened(x, context), carry.ring))
        x, saved = self.close.forward((), stream, self._end(context, chunk))
        closing = stacks.write(carry.closing, (slot,), saved)
        return carry._replace(arrived=x, ring=ring, closing=closing, outputs=carry.outputs.at[slot].set(x))

    def backward(self, carry: Carry, entry: jax.Array, error: jax.Array) -> Carry:
        """A backward pass; `leaving` becomes the gradient to send."""
        micro_batch, chunk, slot = entry
        context = _at(self.context, micro_batch)

        def with_loss(state: tuple[Params, LossSums, jax.Array]) -> tuple[Params, LossSums, jax.Array]:
            embedding_and_head, sums, _ = state
            return self._exited(embedding_and_head, sums, carry.outputs[slot], micro_batch)

        last = (self.stage == self.pipeline.stages - 1) & (chunk == self.pipeline.chunks - 1)
        embedding_and_head, sums, error = maybe(last, with_loss, (carry.embedding_and_head, carry.sums, error))

        def block(at: jax.Array, layer: Params, error: Activation, ring: Saved, blocks: Tree) -> Any:
            here = context, self._layer(chunk, at)
            if self.parted is None:
                gradient, error = self.split.backward(layer, here, stacks.read(ring, (slot, at)), error)
            else:
                saved = _copied(ring, (slot, at), micro_batch >= 0)
                gradient, error, left = self.parted.backward(layer, here, saved, error)
                ring = _replaced(ring, left, (slot, at))
            return error, ring, self._added(blocks, chunk, at, layer, gradient)

        saved = stacks.read(carry.closing, (slot,))
        _, opened = self.close.backward((), self._end(context, chunk), saved, error)
        opened, ring, blocks = self._blocks(chunk, block, (opened, carry.ring, carry.blocks), reverse=True)
        error = self.stream.opening_error(opened)
        first = (self.stage == 0) & (chunk == 0)
        embedding_and_head = maybe(
            first,
            lambda embedding_and_head: self._embedding_gradient(embedding_and_head, micro_batch, error),
            embedding_and_head,
        )
        return carry._replace(leaving=error, ring=ring, blocks=blocks, embedding_and_head=embedding_and_head, sums=sums)

    def weights(self, carry: Carry, entry: jax.Array) -> Carry:
        """A weight pass: what the backward pass has left of the blocks' gradients."""
        parted, (micro_batch, chunk, slot) = self.parted, entry
        assert parted is not None
        context = _at(self.context, micro_batch)

        def block(at: jax.Array, layer: Params, blocks: Tree) -> tuple[Tree]:
            saved = stacks.read(carry.ring, (slot, at))
            gradient = parted.weights(layer, (context, self._layer(chunk, at)), saved)
            return (self._added(blocks, chunk, at, layer, gradient),)

        return carry._replace(blocks=self._blocks(chunk, block, (carry.blocks,), fetches=parted.reads_parameters)[0])

    def _added(self, blocks: Tree, chunk: jax.Array, at: jax.Array, layer: Params, gradient: Any) -> Any:
        """The blocks' gradients with those of one layer; None: another pass computes it."""
        row = chunk * self.pipeline.depth + at
        nothing = lambda leaf: leaf is None  # noqa: E731
        whole = jax.tree.map(
            lambda one, like: jnp.zeros(like.shape, like.dtype) if one is None else one,
            gradient,
            layer,
            is_leaf=nothing,
        )
        finished = self.pipeline.finish(whole)
        return jax.tree.map(
            lambda one, total, done: total if one is None else total.at[row].add(done),
            gradient,
            blocks,
            finished,
            is_leaf=nothing,
        )

    def evaluate(self, carry: tuple[jax.Array, LossSums], entry: jax.Array) -> tuple[jax.Array, LossSums]:
        """A forward pass that saves nothing; on the last stage it ends in sums."""
        micro_batch, chunk, _ = entry
        x, sums = carry
        context = _at(self.context, micro_batch)

        def block(at: jax.Array, layer: Params, x: Activation, none: None) -> tuple[Activation, None]:
            return self.stream.layer(layer, x, (context, self._layer(chunk, at))), None

        stream = self._opened(self._entered(x, micro_batch, chunk), context)
        stream, _ = self._blocks(chunk, block, (stream, None))
        x = self.stream.closed(stream, self._end(context, chunk))

        def with_loss(sums: LossSums) -> LossSums:
            more = self.parts.head_loss(self.embedding_and_head, x, _at(self.batch, micro_batch), context)
            total: LossSums = jax.tree.map(jnp.add, sums, more)
            return total

        last = (self.stage == self.pipeline.stages - 1) & (chunk == self.pipeline.chunks - 1)
        return x, maybe(last, with_loss, sums)

    def _entered(self, arrived: jax.Array, micro_batch: jax.Array, chunk: jax.Array) -> jax.Array:
        def embedded(_: jax.Array) -> jax.Array:
            return self.parts.embed(self.embedding_and_head, *self._rows(micro_batch))

        return maybe((self.stage == 0) & (chunk == 0), embedded, arrived)

    def _exited(
        self, embedding_and_head: Gradients, sums: LossSums, x: jax.Array, micro_batch: jax.Array
    ) -> tuple[Gradients, LossSums, jax.Array]:
        """(gradients of embedding and head, sums), both with those of this micro-batch added, and the gradient of x."""
        batch, context = self._rows(micro_batch)

        def loss(read: Params, x: jax.Array) -> tuple[jax.Array, LossSums]:
            more = self.parts.head_loss(read, x, batch, context)
            return more.loss * self.scale, more

        _, pull, more = jax.vjp(loss, picked(self.embedding_and_head, self.parts.head_reads), x, has_aux=True)
        gradient, error = pull(jnp.float32(1))
        return _accumulated(embedding_and_head, gradient), jax.tree.map(jnp.add, sums, more), error

    def _embedding_gradient(self, embedding_and_head: Gradients, micro_batch: jax.Array, error: jax.Array) -> Gradients:
        batch, context = self._rows(micro_batch)
        _, pull = jax.vjp(
            lambda embedding_and_head: self.parts.embed(embedding_and_head, batch, context),
            picked(self.embedding_and_head, self.parts.embed_reads),
        )
        return _accumulated(embedding_and_head, pull(error)[0])

    def _blocks(
        self, chunk: jax.Array, block: Callable[..., T], carry: T, reverse: bool = False, fetches: bool = True
    ) -> T:
        """Runs `block(at, parameters, *carry)` over the chunk's blocks and skips rows that the chunk does not use.

        fetches: whether the blocks read their parameters; if not, they get the first one's.
        """
        depth, even = self.pipeline.depth, bool((self.pipeline.count == self.pipeline.depth).all())
        used = jnp.asarray(self.pipeline.count)[self.stage, chunk]

        def fetched(at: jax.Array | int) -> Any:
            if not fetches:
                return self.one
            return self.pipeline.fetch(self._row(chunk * depth + jnp.clip(at, 0, depth - 1)))

        prefetch = self.pipeline.prefetch if fetches else 0

        def step(state: tuple[T, tuple[Params, ...]], at: jax.Array) -> tuple[tuple[T, tuple[Params, ...]], None]:
            carry, ready = state
            following = (fetched(at - prefetch if reverse else at + prefetch),) if prefetch else ()

            def run(carry: T) -> T:
                return block(at, ready[0] if prefetch else fetched(at), *carry)  # type: ignore[misc]

            carry = run(carry) if even else maybe(at < used, run, carry)
            return (carry, (*ready[1:], *following)), None

        start = tuple(fetched(depth - 1 - at if reverse else at) for at in range(prefetch))
        unroll = depth if self.pipeline.unroll else 1
        after: T = jax.lax.scan(step, (carry, start), jnp.arange(depth), reverse=reverse, unroll=unroll)[0][0]
        return after

    def _opened(self, x: jax.Array, context: RowContext) -> Any:
        return self.stream.opened(self.one, x, (context, jnp.int32(0)))

    def _end(self, context: RowContext, chunk: jax.Array) -> LayerContext:
        """(context, the number of the layer after the chunk's last block)."""
        return context, self._layer(chunk, jnp.asarray(self.pipeline.count)[self.stage, chunk])

    def _layer(self, chunk: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.asarray(self.pipeline.first)[self.stage, chunk] + at

    def _rows(self, micro_batch: jax.Array | int) -> tuple[Batch, RowContext]:
        batch, context = _at((self.batch, self.context), micro_batch)
        return batch, context

    def _row(self, row: jax.Array | int) -> Any:
        return _at(self.params["blocks"]["0"], row)


def _at(tree: Tree | Batch | RowContext, index: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _copied(ring: Saved, at: tuple[jax.Array, ...], now: jax.Array) -> Saved:
    """The rows at [*at], apart from the ring.  now: true, which the compiler does not know.

    Otherwise XLA would make reading a row part of everything that uses it, so that some of that would come after the
    row has been replaced and have to read a copy of the whole ring.  (It removes an optimization_barrier too early;
    seen on CPU with jax 0.10.2.)
    """
    empty = tuple(jnp.zeros(stack.shape[len(at) :], stack.dtype) for stack in ring)
    return maybe(now, lambda _: stacks.read(ring, at), empty)


def _replaced(ring: Saved, left: dict[int, jax.Array], at: tuple[jax.Array, ...]) -> Saved:
    """The ring with these arrays at [*at] of the stacks of these numbers."""
    return tuple(stacks.write(stack, at, left[place]) if place in left else stack for place, stack in enumerate(ring))


def _accumulated(total: Gradients, part: Gradients) -> Gradients:
    """`total` plus a subtree of it, in total's dtype."""

    def add(total: Tree, part: Tree) -> Tree:
        if isinstance(total, Mapping) and isinstance(part, Mapping):
            return {name: add(value, part[name]) if name in part else value for name, value in total.items()}
        return total + part.astype(total.dtype)  # type: ignore[union-attr, operator]

    return {name: add(value, part[name]) if name in part else value for name, value in total.items()}
