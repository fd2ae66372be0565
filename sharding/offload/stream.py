"""Layers whose parameters are offloaded: rows of host arrays are copied in and out while other layers are computed.

An array on the host is [L, N], one row for each layer.  One pass over the layers, forward or backward, is one loop,
with the steps of every loop over layers (`layer_loop`).  Its iteration for layer l

    writes      the rows that it computes first, such as an optimizer's update; with `write_late`, the rows that the
                iteration before has computed last, such as gradients
    fetches     the rows of the layer that is used `prefetch` iterations later
    computes    layer l, on rows that an earlier iteration has fetched

A compiler that copies asynchronously (XLA on GPUs) then runs copies in both directions beside the computation.  The
device holds the rows of `prefetch + 1` layers and those on their way back, however many layers there are.

The loop carries the host's arrays and changes them in place.  XLA does so only if nothing reads an array as it was
before a write.  Therefore a row is written first, and then another is fetched from the array that results, so that
writes run beside the first half of a layer's computation and these fetches beside the second.  Rows of arrays that the
pass does not write are fetched beside the first half, so that copies in both directions run at the same time.  XLA
finds that order itself if it sees the operations of a layer.  If they are in inner loops, over micro-batches or other
layers, the two halves are passed separately (`Layer`).

Some layers may stay on the device: k resident layers follow each layer that is streamed, so that its copies run beside
the computation of k + 1 layers.  An iteration is then such a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import Saved, SplitLayer, split_layer
from jhpt.sharding.model_parts import BlockFunction
from jhpt.sharding.offload.buckets import Bucket
from jhpt.sharding.types import Activation, Params, RowContext

DEVICE = jax.memory.Space.Device

Rows = dict[str, jax.Array]
"""The rows of one layer, on the device, by name."""

HostRows = dict[str, jax.Array]
"""[L, ...] by name, on the host; arrays on the device are read and written there."""

Index = int | jax.Array
"""The number of a micro-batch or of an iteration."""

C = TypeVar("C")
T = TypeVar("T")

Pass = tuple[C, tuple[Rows, ...], Rows, HostRows]
"""(carry, rows that are ready for the next iterations, rows that the next iteration writes, arrays on the host)."""

WEIGHTS, GRADIENT = "weights", "gradient"
"""Names of rows that every step uses; an optimizer adds the names of its state."""

RESIDENT = "resident "
"""Prefix of the names of resident layers' rows, [groups k, N] on the device."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's computation in two halves.

    first: (layer, its rows, carry) -> (carry, what the second half needs, rows to write now).
    second: (layer, what the first half returned for it, carry, rows of `late_reads`) -> (carry, rows for the next
      iteration to write).
    ordered: fetches wait for the first half; otherwise they need not.
    """

    first: Callable[[jax.Array, Rows, Any], tuple[Any, Any, Rows]]
    second: Callable[[jax.Array, Any, Any, Rows], tuple[Any, Rows]]
    ordered: bool = False

    def whole(self, layer: jax.Array, rows: Rows, carry: C, late_rows: Rows) -> tuple[C, Rows]:
        """(carry, all rows to write), one half after the other."""
        carry, between, now = self.first(layer, rows, carry)
        carry, late = self.second(layer, between, carry, late_rows)
        return carry, now | late


AfterBackward = Callable[[Rows, jax.Array, Any], tuple[Any, Rows]]
"""(a layer's rows, its finished gradient, carry) -> (carry for the layer before it, rows to be written)."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Which rows the iterations of a pass copy, and when.

    reads: names of rows that are fetched for an iteration.  writes: names of rows that it writes.
    late_reads: names of rows that an iteration fetches itself, whatever `prefetch` says, for its second half.
    reverse: from the last layer to the first.
    prefetch: iterations between a fetch and its use; 0: an iteration fetches the rows that it uses.
    write_late: an iteration writes the rows that the second half of the iteration before has computed; otherwise those
      that its first half has computed.
    """

    reads: Sequence[str]
    writes: Sequence[str]
    late_reads: Sequence[str] = ()
    reverse: bool = False
    prefetch: int = 1
    write_late: bool = False

    @property
    def read_and_written(self) -> list[str]:
        """Names of rows that are both fetched and written."""
        return [name for name in self.writes if name in (*self.reads, *self.late_reads)]

    @property
    def only_read(self) -> list[str]:
        """Names of rows that are fetched ahead and not written, where others are."""
        return [name for name in self.reads if self.read_and_written and name not in self.writes]

    def layer(self, offloaded: HostRows, step: Index) -> jax.Array:
        """The layer of an iteration.

        Clipping changes no number, but without it XLA starts fetches behind the products (jax 0.11.2).
        """
        count = len(next(iter(offloaded.values())))
        at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 1)
        return count - 1 - at if self.reverse else at

    def fetched(self, offloaded: HostRows, step: Index, names: Sequence[str]) -> Rows:
        """Rows of an iteration's layer, copied to the device."""
        rows = {
            name: jax.lax.dynamic_index_in_dim(offloaded[name], self.layer(offloaded, step), 0, keepdims=False)
            for name in names
        }
        return {name: jax.device_put(row, DEVICE) for name, row in rows.items()}

    def written(self, offloaded: HostRows, step: Index, rows: Rows) -> HostRows:
        """The arrays after `rows` of an iteration's layer are copied into them."""

        def put(name: str) -> jax.Array:
            row = jax.device_put(rows[name], jax.typeof(offloaded[name]).memory_space)
            return jax.lax.dynamic_update_index_in_dim(offloaded[name], row, self.layer(offloaded, step), 0)

        return {**offloaded, **{name: put(name) for name in self.writes}}


def over_layers(offloaded: Mapping[str, jax.Array], layer: Layer, carry: C, transfers: Transfers) -> tuple[C, HostRows]:
    """One pass over all layers: (carry, arrays on the host) after it.

    XLA copies a row by a memcpy, which leaves a GPU's processors to others, only if its number is an affine function of
    the loop's iteration (jax 0.11.2).  So an iteration that has nothing to write is not in the loop, and those with
    nothing to fetch are in another.
    """
    prefetch, reads = transfers.prefetch, transfers.reads
    host = dict(offloaded)
    count = len(next(iter(host.values())))

    def iteration(step: Index, state: Pass[C], *, fetches: bool = prefetch > 0, late: bool = True) -> Pass[C]:
        """fetches: rows for a later iteration.  late: rows of the iteration before are written."""
        carry, ready, before, host = state
        if late and transfers.write_late:
            host = transfers.written(host, step - 1, before)
        if prefetch == 0:
            ready = (transfers.fetched(host, step, reads),)
        early = transfers.fetched(host, step + prefetch, transfers.only_read) if fetches else {}
        carry, between, done = layer.first(transfers.layer(host, step), ready[0], carry)
        if not transfers.write_late:
            host = transfers.written(host, step, done)
        if layer.ordered and transfers.read_and_written:
            changed = {name: host[name] for name in transfers.read_and_written}
            changed, early, carry = jax.lax.optimization_barrier((changed, early, carry))
            host = host | changed
        if prefetch:
            behind = [name for name in reads if name not in early]
            later = early | transfers.fetched(host, step + prefetch, behind) if fetches else ready[0]
            ready = (*ready, later)
        number, late_rows = transfers.layer(host, step), transfers.fetched(host, step, transfers.late_reads)
        carry, now = layer.second(number, between, carry, late_rows)
        if layer.ordered and fetches:
            carry, ready = _fetched_beside(carry, ready, reads[0])
        return carry, ready[1:], now, host

    ready = tuple(transfers.fetched(host, step, reads) for step in range(min(prefetch, count)))
    state: Pass[C] = carry, ready, {}, host
    start = 1 if transfers.write_late else 0
    if start:
        state = iteration(0, state, fetches=0 < prefetch < count, late=False)
    stop = max(start, count - prefetch)
    if start < stop:
        state = jax.lax.fori_loop(start, stop, iteration, state)
    if stop < count:
        # Of a number of iterations that XLA does not know.  It would take a loop of one apart, and then hold what the
        # next pass fetches while the last layer of this one is computed.
        last = jax.lax.optimization_barrier(jnp.int32(count))
        state = jax.lax.fori_loop(stop, last, partial(iteration, fetches=False), state)
    carry, _, done, host = state
    return carry, transfers.written(host, count - 1, done) if transfers.write_late else host


def _fetched_beside(carry: C, ready: tuple[Rows, ...], name: str) -> tuple[C, tuple[Rows, ...]]:
    """The same, where a fetched row and what the second half has computed depend on each other.

    Otherwise XLA may wait for one of the fetches before the second half begins (jax 0.11.2, four rows and several
    micro-batches).  A single row is enough; if all of them take part, XLA copies each once more.
    """
    *others, last = ready
    carry, row = jax.lax.optimization_barrier((carry, last[name]))
    return carry, (*others, last | {name: row})


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """The results of a forward pass that the backward pass needs.

    saved: activations of every layer and micro-batch, stacked [L, M, ...].
    """

    split: SplitLayer
    context: RowContext
    saved: Saved


@dataclass(frozen=True, kw_only=True)
class StreamedLoop:
    """Layers `[first, first + L)` of one kind, whose rows are on the host or, some of them, resident.

    function: one layer.  bucket: how its leaves lie in a row.  prefetch: how many groups ahead rows are fetched.
    gather: a row, or this rank's shard of it -> the row.  cast: parameters -> the parameters that the layer uses.
    finish: gradient [N] -> the gradient that `after_backward` receives.
    """

    function: BlockFunction
    bucket: Bucket
    first: int
    prefetch: int
    gather: Callable[[jax.Array], jax.Array] = lambda row: row
    cast: Callable[[Any], Any] = lambda params: params
    finish: Callable[[jax.Array], jax.Array] = lambda gradient: gradient

    def forward(
        self,
        offloaded: HostRows,
        x: Activation,
        context: RowContext,
        update: Callable[[Rows], Rows] | None = None,
        reads: Sequence[str] = (WEIGHTS,),
        writes: Sequence[str] = (),
    ) -> tuple[Any, Streamed, HostRows]:
        """(x after the last layer, what `backward` needs, arrays on the host).

        Args:
          context: a tree of [M, ...].
          update: changes a layer's rows before the layer is computed, such as the optimizer step with the last
            gradient; the layer uses its result, and the rows of `writes` are written back.
          reads, writes: names of rows, also for resident layers.
        """
        split = self._split(offloaded, x, context)
        count = _count(context)
        room = stacks.filled(split.shapes, (len(offloaded[WEIGHTS]) * group_size(offloaded), count), jnp.zeros(()))

        def first(layer: jax.Array, rows: Rows, carry: tuple[Activation, Saved]) -> tuple[Any, Params, Rows]:
            rows = update(rows) if update else rows
            params = self._params(rows[WEIGHTS])
            return some(layer, params, carry, halves[0]), params, {name: rows[name] for name in writes}

        def second(layer: jax.Array, params: Params, carry: tuple[Activation, Saved], _: Rows) -> tuple[Any, Rows]:
            return some(layer, params, carry, halves[1]), {}

        def some(
            layer: jax.Array, params: Params, carry: tuple[Activation, Saved], pieces: range
        ) -> tuple[Activation, Saved]:
            def piece(at: Index, carry: tuple[Activation, Saved]) -> tuple[Activation, Saved]:
                x, stacked = carry
                y, saved = split.forward(params, _at(x, at), (_at(context, at), self.first + layer))
                return _put(x, at, y), stacks.write(stacked, (layer, at), saved)

            return _each(pieces, piece, carry)

        one, halves = Layer(first=first, second=second, ordered=count > 1), _halves(count)
        transfers = Transfers(reads=reads, writes=writes, prefetch=self.prefetch)
        (x, saved), offloaded = self._pass(offloaded, one, (x, room), transfers)
        return x, Streamed(split=split, context=context, saved=saved), offloaded

    def through(self, offloaded: HostRows, x: Activation, context: RowContext) -> Any:
        """x after the last layer, and nothing else."""

        def first(layer: jax.Array, rows: Rows, x: Activation) -> tuple[Activation, None, Rows]:
            params = self._params(rows[WEIGHTS])

            def piece(at: Index, x: Activation) -> Activation:
                return _put(x, at, self.function(params, _at(x, at), (_at(context, at), self.first + layer)))

            return _each(range(_count(context)), piece, x), None, {}

        one = Layer(first=first, second=lambda _, __, x, ___: (x, {}))
        transfers = Transfers(reads=(WEIGHTS,), writes=(), prefetch=self.prefetch)
        return self._pass(offloaded, one, x, transfers)[0]

    def backward(
        self,
        offloaded: HostRows,
        passed: Streamed,
        error: Activation,
        after_backward: AfterBackward,
        carry: C,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (GRADIENT,),
    ) -> tuple[Any, C, HostRows]:
        """(gradient of the first layer's input, carry from the first layer, arrays on the host).

        Args:
          after_backward: changes a layer's rows once its gradient is known; the rows of `writes` are written back.
          carry: for the last layer.
          reads, writes: names of rows beside the weights, also for resident layers.
        """
        split, context, count = passed.split, passed.context, _count(passed.context)

        def first(layer: jax.Array, rows: Rows, state: tuple[Activation, C]) -> tuple[Any, tuple[Rows, Params], Rows]:
            error, carry = state
            params, zeros = self._params(rows[WEIGHTS]), jnp.zeros(self.bucket.size, jnp.float32)
            error, total = some(layer, params, (error, None if count == 1 else zeros), halves[0])
            return (error, total, carry), (rows, params), {}

        def second(
            layer: jax.Array, between: tuple[Rows, Params], state: tuple[Activation, jax.Array | None, C], late: Rows
        ) -> tuple[tuple[Activation, C], Rows]:
            (rows, params), (error, total, carry) = between, state
            error, total = some(layer, params, (error, total), halves[1])
            assert total is not None
            carry, done = after_backward(rows | late, self.finish(total), carry)
            return (error, carry), done

        def some(
            layer: jax.Array, params: Params, state: tuple[Activation, jax.Array | None], pieces: range
        ) -> tuple[Activation, jax.Array | None]:
            def piece(at: Index, state: tuple[Activation, jax.Array | None]) -> tuple[Activation, jax.Array | None]:
                error, total = state
                inputs = params, (_at(context, at), self.first + layer)
                gradient, down = split.backward(*inputs, stacks.read(passed.saved, (layer, at)), _at(error, at))
                row = self.bucket.packed(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient))
                return _put(error, at, down), row if total is None else total + row

            return _each(pieces, piece, state)

        one, halves = Layer(first=first, second=second, ordered=count > 1), _halves(count)
        transfers = Transfers(
            reads=(WEIGHTS,),
            writes=writes,
            late_reads=reads,
            reverse=True,
            prefetch=self.prefetch,
            write_late=True,
        )
        (error, carry), offloaded = self._pass(offloaded, one, (error, carry), transfers)
        return error, carry, offloaded

    def filled(self, offloaded: HostRows, row: Callable[[jax.Array], jax.Array]) -> HostRows:
        """The arrays on the host with the weights that `row`, layer -> [N], returns."""
        one = Layer(
            first=lambda layer, _, carry: (carry, None, {WEIGHTS: row(layer)}),
            second=lambda _, __, carry, ___: (carry, {}),
        )
        return self._pass(offloaded, one, None, Transfers(reads=(), writes=(WEIGHTS,), prefetch=self.prefetch))[1]

    def _pass(self, offloaded: HostRows, layer: Layer, carry: C, transfers: Transfers) -> tuple[C, HostRows]:
        """One pass over all layers, streamed and resident: (carry, arrays on the host) after it."""
        streamed, resident = apart(offloaded)
        others = group_size(offloaded) - 1
        if not others:
            return over_layers(streamed, layer, carry, transfers)
        (carry, resident), streamed = over_layers(
            streamed, _grouped(layer, others, transfers), (carry, resident), transfers
        )
        return carry, joined(streamed, resident)

    def _params(self, row: jax.Array) -> Any:
        return self.cast(self.bucket.unpacked(self.gather(row)))

    def _split(self, offloaded: HostRows, x: Activation, context: RowContext) -> SplitLayer:
        row = jax.ShapeDtypeStruct(offloaded[WEIGHTS].shape[1:], offloaded[WEIGHTS].dtype)
        first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (x, context))
        return split_layer(self.function, jax.eval_shape(self._params, row), first[0], (first[1], jnp.int32(0)))


def _grouped(layer: Layer, others: int, transfers: Transfers) -> Layer:
    """A streamed layer and the `others` resident layers behind it; their carry is (carry, rows of resident layers)."""
    reads, writes, late_reads, reverse = transfers.reads, transfers.writes, transfers.late_reads, transfers.reverse

    def of_streamed(
        at: jax.Array, rows: Rows, state: tuple[Any, HostRows], late_rows: Rows
    ) -> tuple[tuple[Any, HostRows], Rows]:
        carry, done = layer.whole(at * (others + 1), rows, state[0], late_rows)
        return (carry, state[1]), done

    def of_resident(at: jax.Array, state: tuple[Any, HostRows]) -> tuple[Any, HostRows]:
        def one(place: jax.Array, state: tuple[Any, HostRows]) -> tuple[Any, HostRows]:
            place = others - 1 - place if reverse else place
            carry, resident = state
            index = at * others + place
            rows, late = ({name: resident[name][index] for name in names} for names in (reads, late_reads))
            carry, done = layer.whole(at * (others + 1) + 1 + place, rows, carry, late)
            return carry, resident | {name: resident[name].at[index].set(done[name]) for name in writes}

        return jax.lax.fori_loop(0, others, one, state)

    def forward(at: jax.Array, rows: Rows, state: tuple[Any, HostRows]) -> tuple[Any, None, Rows]:
        state, done = of_streamed(at, rows, state, {})
        return state, None, done

    if reverse:
        return Layer(first=lambda at, rows, state: (of_resident(at, state), rows, {}), second=of_streamed, ordered=True)
    return Layer(first=forward, second=lambda at, _, state, __: (of_resident(at, state), {}), ordered=True)


def _halves(count: int) -> tuple[range, range]:
    """The indices of so many micro-batches in two halves; a single one is in the second."""
    return range(count // 2), range(count // 2, count)


def _each(pieces: range, piece: Callable[[Index, T], T], carry: T) -> T:
    """Calls `piece` for each micro-batch, in a loop if there are several."""
    if len(pieces) < 2:
        return piece(pieces.start, carry) if pieces else carry
    done: T = jax.lax.fori_loop(pieces.start, pieces.stop, piece, carry)
    return done


def _at(tree: Activation | RowContext, index: Index) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _count(context: RowContext) -> int:
    """The number of micro-batches."""
    return len(jax.tree.leaves(context)[0])


def _put(tree: Activation, index: Index, new: Activation) -> Any:
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, new)


def apart(offloaded: Mapping[str, jax.Array]) -> tuple[HostRows, HostRows]:
    """(rows of streamed layers, rows of resident layers), each by its plain name."""
    resident = {name.removeprefix(RESIDENT): rows for name, rows in offloaded.items() if name.startswith(RESIDENT)}
    return {name: rows for name, rows in offloaded.items() if not name.startswith(RESIDENT)}, resident


def joined(streamed: Mapping[str, jax.Array], resident: Mapping[str, jax.Array]) -> HostRows:
    """The inverse of `apart`."""
    return {**streamed, **{RESIDENT + name: rows for name, rows in resident.items()}}


def group_size(offloaded: Mapping[str, jax.Array]) -> int:
    """Layers of a group: one that is streamed, and the resident ones."""
    resident = offloaded.get(RESIDENT + WEIGHTS)
    return 1 if resident is None else 1 + len(resident) // len(offloaded[WEIGHTS])
