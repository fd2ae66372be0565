"""Layers whose parameters live on the host: rows of host arrays come and go while other layers are computed.

An array on the host is [L, N], a row for every layer.  One pass over the layers, forward or backward, is one loop; its
iteration for layer l

    writes      what it computes first, such as an optimizer's update; or, where that comes last, as gradients do, what
                the iteration before has computed (`late`)
    fetches     the rows of the layer `ahead` iterations later
    computes    layer l, on rows that an earlier iteration has fetched

So a compiler that copies asynchronously (XLA on GPUs) runs copies in both directions beside the computation.  The
device holds the rows of `ahead + 1` layers and those on their way back, however many layers there are.

The host's arrays are carried through the loop and changed in place.  XLA only does so if nothing reads an array as it
was before a write; so what is fetched is of the array as it has just been written, and a row is first written and then
another fetched: writes run beside the first half of a layer's computation, fetches beside the second.  XLA finds that
out where it sees the operations of a layer.  Where they are in loops of their own, of micro-batches or of other layers,
it is told what the halves are (`Layer`).

Layers may stay on the device: after each one that is streamed come k that are resident, so that its copies have the
computation of k + 1 layers to run beside.  An iteration is then such a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import SplitLayer, split_layer
from jhpt.sharding.offload.buckets import Bucket

DEVICE = jax.memory.Space.Device

Rows = dict[str, jax.Array]
"""Of one layer, on the device, by name."""

HostRows = dict[str, jax.Array]
"""[L, ...] by name, on the host; what lies on the device is read and written there."""

Index = Any
"""Of a leaf's first dims: an int, a traced one, or a tuple of these."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's computation, in two halves.

    first: (layer, its rows, carry) -> (carry, what the second half needs, what is written at once).
    second: (layer, what it needs, carry, rows of `soon`) -> (carry, what the next iteration writes).
    apart: whether what is fetched is to wait for the first; if not, it may do nothing.
    """

    first: Callable[[jax.Array, Rows, Any], tuple[Any, Any, Rows]]
    second: Callable[[jax.Array, Any, Any, Rows], tuple[Any, Rows]]
    apart: bool = False

    def whole(self, layer: jax.Array, rows: Rows, carry: Any, soon: Rows) -> tuple[Any, Rows]:
        """(carry, all that is written), one half after the other."""
        carry, between, done = self.first(layer, rows, carry)
        carry, late = self.second(layer, between, carry, soon)
        return carry, done | late


Leave = Callable[[Rows, jax.Array, Any], tuple[Any, Rows]]
"""(a layer's rows, its gradient as it is kept, what the layer before told) -> (what it tells, what is written)."""

WEIGHTS, GRADIENT = "weights", "gradient"
"""Names that a step knows; an optimizer adds those of its state."""

RESIDENT = "resident "
"""Before the name of what resident layers have, [groups k, N] on the device."""


def over_layers(
    offloaded: Mapping[str, jax.Array],
    reads: Sequence[str],
    writes: Sequence[str],
    own: Layer,
    carry: Any,
    *,
    reverse: bool = False,
    ahead: int = 1,
    late: bool = False,
    soon: Sequence[str] = (),
) -> tuple[Any, HostRows]:
    """One pass.

    Args:
      reads, writes: names of what every iteration is given, and gives.
      own: what an iteration computes.
      ahead: iterations between a fetch and its use; 0: an iteration fetches what it uses itself.
      late: an iteration writes what the second half of the one before has computed, else what its own first has.
      soon: names of what an iteration fetches itself whatever `ahead` says, and is given for its second half.

    Returns:
      (carry, what is on the host).
    """
    count = len(next(iter(offloaded.values())))

    def layer(step: int | jax.Array) -> jax.Array:
        at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 1)
        return count - 1 - at if reverse else at

    def fetched(offloaded: HostRows, step: int | jax.Array, names: Sequence[str] = reads) -> Rows:
        rows = {name: jax.lax.dynamic_index_in_dim(offloaded[name], layer(step), 0, keepdims=False) for name in names}
        return {name: jax.device_put(row, DEVICE) for name, row in rows.items()}

    def written(offloaded: HostRows, step: int | jax.Array, rows: Rows) -> HostRows:
        def put(name: str) -> jax.Array:
            row = jax.device_put(rows[name], jax.typeof(offloaded[name]).memory_space)
            return jax.lax.dynamic_update_index_in_dim(offloaded[name], row, layer(step), 0)

        return {**offloaded, **{name: put(name) for name in writes}}

    changed = [name for name in writes if name in (*reads, *soon)]

    def iteration(step: jax.Array, state: tuple[Any, tuple[Rows, ...], Rows, HostRows]) -> Any:
        carry, ready, before, there = state
        if late:
            there = written(there, step - 1, before)
        if ahead == 0:
            ready = (fetched(there, step),)
        carry, between, done = own.first(layer(step), ready[0], carry)
        if not late:
            there = written(there, step, done)
        if own.apart and changed:
            held, carry = jax.lax.optimization_barrier(({name: there[name] for name in changed}, carry))
            there = there | held
        if ahead:
            ready = (*ready, fetched(there, step + ahead))
        carry, now = own.second(layer(step), between, carry, fetched(there, step, soon))
        return carry, ready[1:], now, there

    there = dict(offloaded)
    ready = tuple(fetched(there, step) for step in range(ahead))
    before = {}
    if late:
        # Before the first there is nothing to write: what its row holds, or anything where nobody reads it before the
        # second iteration has written it.
        first = fetched(there, 0, [name for name in writes if name in (*reads, *soon)])
        nothing = lambda name: jnp.zeros(there[name].shape[1:], there[name].dtype)  # noqa: E731
        before = {name: first[name] if name in first else nothing(name) for name in writes}
    # A loop that XLA knows to have one iteration is none: its layer would be compiled, and rounded, unlike the others.
    stop = count if count > 1 else jax.lax.optimization_barrier(jnp.int32(count))
    carry, _, done, there = jax.lax.fori_loop(0, stop, iteration, (carry, ready, before, there))
    return carry, written(there, count - 1, done) if late else there


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What a forward pass leaves for the backward pass: kept of every layer and micro-batch, stacked [L, M, ...]."""

    split: SplitLayer
    keys: jax.Array
    saved: Any


@dataclass(frozen=True, kw_only=True)
class StreamedLoop:
    """Layers `[first, first + L)` of one kind, one bucket each.

    x is [M, ...]: all micro-batches of a step go through a layer, one after the other, before the next one's turn.  So
    a layer comes and goes once in a pass, however many they are.

    function: a layer, (parameters, x, (keys, layer)) -> x.  used: a bucket as it comes from the host, [N] -> as
    `bucket` unpacks it; with ZeRO it gathers the shares.  cast: unpacked parameters -> as the function reads them.
    given: the gradient of a bucket, float32 -> as it is kept; sums over ranks.
    """

    function: Callable[[Any, Any, Any], Any]
    bucket: Bucket
    first: int
    ahead: int = 1
    used: Callable[[jax.Array], jax.Array] = lambda row: row
    cast: Callable[[Any], Any] = lambda params: params
    given: Callable[[jax.Array], jax.Array] = lambda gradient: gradient

    def forward(
        self,
        offloaded: HostRows,
        x: Any,
        keys: jax.Array,
        arrive: Callable[[Rows], Rows] | None = None,
        reads: Sequence[str] = (WEIGHTS,),
        writes: Sequence[str] = (),
    ) -> tuple[Any, Streamed, HostRows]:
        """(x after the last layer, what `backward` needs, what is on the host).

        Args:
          keys: [M, ...].
          arrive: what becomes of a layer's rows before it is computed, such as the step that the last gradient asks
            for; what it gives is used, and those of `writes` are written back.
          reads, writes: names; of resident layers as well.
        """
        split = self._split(offloaded, x, keys)
        count = len(offloaded[WEIGHTS]) * group_size(offloaded), len(keys)
        room = stacks.room(split.shapes, count, jnp.zeros(()))

        def first(layer: jax.Array, rows: Rows, carry: tuple[Any, Any]) -> tuple[Any, Any, Rows]:
            rows = arrive(rows) if arrive else rows
            params = self._params(rows[WEIGHTS])
            return some(layer, params, carry, halves[0]), params, {name: rows[name] for name in writes}

        def second(layer: jax.Array, params: Any, carry: tuple[Any, Any], _: Rows) -> tuple[Any, Rows]:
            return some(layer, params, carry, halves[1]), {}

        def some(layer: jax.Array, params: Any, carry: tuple[Any, Any], pieces: range) -> tuple[Any, Any]:
            def piece(at: Index, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                x, stacked = carry
                y, saved = split.forward(params, _at(x, at), (keys[at], self.first + layer))
                return _put(x, at, y), stacks.put(stacked, (layer, at), saved)

            return _each(pieces, piece, carry)

        one, halves = Layer(first=first, second=second, apart=len(keys) > 1), _halves(len(keys))
        (x, saved), offloaded = self._pass(offloaded, one, (x, room), reads, writes)
        return x, Streamed(split=split, keys=keys, saved=saved), offloaded

    def through(self, offloaded: HostRows, x: Any, keys: jax.Array) -> Any:
        """x after the last layer, and nothing else."""

        def first(layer: jax.Array, rows: Rows, x: Any) -> tuple[Any, Any, Rows]:
            params = self._params(rows[WEIGHTS])

            def piece(at: Index, x: Any) -> Any:
                return _put(x, at, self.function(params, _at(x, at), (keys[at], self.first + layer)))

            return _each(range(len(keys)), piece, x), None, {}

        one = Layer(first=first, second=lambda _, __, x, ___: (x, {}))
        return self._pass(offloaded, one, x, (WEIGHTS,), ())[0]

    def backward(
        self,
        offloaded: HostRows,
        passed: Streamed,
        error: Any,
        leave: Leave,
        told: Any,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (GRADIENT,),
    ) -> tuple[Any, Any, HostRows]:
        """(error of the first layer's input, what the last layer told, what is on the host).

        Args:
          leave: what becomes of a layer's rows once its gradient is there; those of `writes` are written back.
          told: to the first layer that leaves.
          reads, writes: names, beside the weights; of resident layers as well.
        """
        split, keys = passed.split, passed.keys

        def first(layer: jax.Array, rows: Rows, carry: tuple[Any, Any]) -> tuple[Any, Any, Rows]:
            error, told = carry
            params, nothing = self._params(rows[WEIGHTS]), jnp.zeros(self.bucket.size, jnp.float32)
            error, total = some(layer, params, (error, None if len(keys) == 1 else nothing), halves[0])
            return (error, total, told), (rows, params), {}

        def second(
            layer: jax.Array, between: tuple[Rows, Any], carry: tuple[Any, Any, Any], soon: Rows
        ) -> tuple[Any, Rows]:
            (rows, params), (error, total, told) = between, carry
            error, total = some(layer, params, (error, total), halves[1])
            told, done = leave(rows | soon, self.given(total), told)
            return (error, told), done

        def some(layer: jax.Array, params: Any, carry: tuple[Any, Any], pieces: range) -> tuple[Any, Any]:
            def piece(at: Index, carry: tuple[Any, jax.Array | None]) -> tuple[Any, jax.Array]:
                error, total = carry
                inputs = params, (keys[at], self.first + layer)
                gradient, down = split.backward(*inputs, stacks.taken(passed.saved, (layer, at)), _at(error, at))
                own = self.bucket.packed(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient))
                return _put(error, at, down), own if total is None else total + own

            return _each(pieces, piece, carry)

        one, halves = Layer(first=first, second=second, apart=len(keys) > 1), _halves(len(keys))
        (error, told), offloaded = self._pass(
            offloaded, one, (error, told), (WEIGHTS,), writes, reverse=True, soon=reads
        )
        return error, told, offloaded

    def filled(self, offloaded: HostRows, row: Callable[[jax.Array], jax.Array]) -> HostRows:
        """What is on the host with these weights, layer -> [N], in the place of its own."""
        one = Layer(
            first=lambda layer, _, carry: (carry, None, {WEIGHTS: row(layer)}),
            second=lambda _, __, carry, ___: (carry, {}),
        )
        return self._pass(offloaded, one, None, (), (WEIGHTS,))[1]

    def _pass(
        self,
        offloaded: HostRows,
        one: Layer,
        carry: Any,
        reads: Sequence[str],
        writes: Sequence[str],
        reverse: bool = False,
        soon: Sequence[str] = (),
    ) -> tuple[Any, HostRows]:
        """(carry, what is on the host) after every layer has had its turn.  Backwards, what is written comes last."""
        streamed, stay = apart(offloaded)
        others = group_size(offloaded) - 1
        over = partial(over_layers, streamed, reads, writes, reverse=reverse, ahead=self.ahead, late=reverse, soon=soon)
        if not others:
            return over(one, carry)

        def comes(at: jax.Array, rows: Rows, state: tuple[Any, HostRows], soon: Rows) -> tuple[Any, Rows]:
            carry, done = one.whole(at * (others + 1), rows, state[0], soon)
            return (carry, state[1]), done

        def stays(at: jax.Array, state: tuple[Any, HostRows]) -> tuple[Any, HostRows]:
            def resident(place: jax.Array, state: tuple[Any, HostRows]) -> tuple[Any, HostRows]:
                place = others - 1 - place if reverse else place
                carry, stay = state
                index = at * others + place
                rows, needed = ({name: stay[name][index] for name in names} for names in (reads, soon))
                carry, done = one.whole(at * (others + 1) + 1 + place, rows, carry, needed)
                return carry, stay | {name: stay[name].at[index].set(done[name]) for name in writes}

            return jax.lax.fori_loop(0, others, resident, state)

        def forward(at: jax.Array, rows: Rows, state: tuple[Any, HostRows]) -> tuple[Any, None, Rows]:
            state, done = comes(at, rows, state, {})
            return state, None, done

        if reverse:
            group = Layer(first=lambda at, rows, state: (stays(at, state), rows, {}), second=comes, apart=True)
        else:
            group = Layer(first=forward, second=lambda at, _, state, __: (stays(at, state), {}), apart=True)
        (carry, stay), streamed = over(group, (carry, stay))
        return carry, joined(streamed, stay)

    def _params(self, row: jax.Array) -> Any:
        return self.cast(self.bucket.unpacked(self.used(row)))

    def _split(self, offloaded: HostRows, x: Any, keys: jax.Array) -> SplitLayer:
        row = jax.ShapeDtypeStruct(offloaded[WEIGHTS].shape[1:], offloaded[WEIGHTS].dtype)
        first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (x, keys))
        return split_layer(self.function, jax.eval_shape(self._params, row), first[0], (first[1], jnp.int32(0)))


def _halves(count: int) -> tuple[range, range]:
    """Of so many micro-batches; one is in the second."""
    return range(count // 2), range(count // 2, count)


def _each(pieces: range, piece: Callable[[Index, Any], Any], carry: Any) -> Any:
    """A loop over micro-batches, where there are several."""
    if len(pieces) < 2:
        return piece(pieces.start, carry) if pieces else carry
    return jax.lax.fori_loop(pieces.start, pieces.stop, piece, carry)


def _at(tree: Any, index: Index) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _put(tree: Any, index: Index, own: Any) -> Any:
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, own)


def apart(offloaded: Mapping[str, jax.Array]) -> tuple[HostRows, HostRows]:
    """(what is streamed, what is resident), each by its plain names."""
    stay = {name.removeprefix(RESIDENT): rows for name, rows in offloaded.items() if name.startswith(RESIDENT)}
    return {name: rows for name, rows in offloaded.items() if not name.startswith(RESIDENT)}, stay


def joined(streamed: Mapping[str, jax.Array], stay: Mapping[str, jax.Array]) -> HostRows:
    """`apart` backwards."""
    return {**streamed, **{RESIDENT + name: rows for name, rows in stay.items()}}


def group_size(offloaded: Mapping[str, jax.Array]) -> int:
    """Layers of a group: one that is streamed, and those that stay."""
    stay = offloaded.get(RESIDENT + WEIGHTS)
    return 1 if stay is None else 1 + len(stay) // len(offloaded[WEIGHTS])
