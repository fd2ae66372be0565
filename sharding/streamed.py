"""Layers whose parameters live on the host: rows of host arrays come and go while other layers are computed.

An array on the host is [L, N], a row for every layer.  One pass over the layers, forward or backward, is one loop; its
iteration for layer l

    fetches     the rows of the layer `ahead` iterations later
    computes    layer l, on rows that an earlier iteration has fetched
    writes      what it computes first, such as an optimizer's update; or, where that comes last, as gradients do, what
                the iteration before has computed (`late`)

So a compiler that copies asynchronously (XLA on GPUs) runs copies in both directions beside the computation.  The
device holds the rows of `ahead + 1` layers and those on their way back, however many layers there are.

The host's arrays are carried through the loop and changed in place.  XLA only does so if every reading of an array
comes before the writing; what is written therefore waits for what is fetched of the same array.  Without that it copies
the whole array, twice an iteration (seen in programs for an H100, jax 0.10.2).  Where a pass reads and writes the same
rows, fetch and write so take turns.

Layers may stay on the device: after each one that is streamed come k that are resident, so that its copies have the
computation of k + 1 layers to run beside.  An iteration is then such a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.sharding import stacks
from jhpt.sharding.buckets import Bucket
from jhpt.sharding.split import SplitLayer, split_layer

DEVICE = jax.memory.Space.Device

Rows = dict[str, jax.Array]
"""Of one layer, on the device, by name."""

Hosted = dict[str, jax.Array]
"""[L, ...] by name, on the host; what lies on the device is read and written there."""

Index = Any
"""Of a leaf's first dims: an int, a traced one, or a tuple of these."""

Layer = Callable[[jax.Array, Rows, Any], tuple[Any, Rows]]
"""(layer, its rows, carry) -> (carry, what is written)."""

Leave = Callable[[Rows, jax.Array, Any], tuple[Any, Rows]]
"""(a layer's rows, its gradient as it is kept, what the layer before told) -> (what it tells, what is written)."""

WEIGHTS, GRADIENT = "weights", "gradient"
"""Names that a step knows; an optimizer adds those of its state."""

RESIDENT = "resident "
"""Before the name of what resident layers have, [groups k, N] on the device."""


def over_layers(
    hosted: Mapping[str, jax.Array],
    reads: Sequence[str],
    writes: Sequence[str],
    body: Layer,
    carry: Any,
    *,
    reverse: bool = False,
    ahead: int = 1,
    late: bool = False,
    soon: Sequence[str] = (),
) -> tuple[Any, Hosted]:
    """One pass.

    Args:
      reads, writes: names of what every iteration is given, and gives.
      body: what is written is `writes` in all.
      ahead: iterations between a fetch and its use; 0: an iteration fetches what it uses itself.
      late: an iteration writes what the one before has computed.
      soon: names of what an iteration fetches itself whatever `ahead` says, and is given too: what it needs last.

    Returns:
      (carry, what is on the host).
    """
    count = len(next(iter(hosted.values())))

    def layer(step: int | jax.Array) -> jax.Array:
        at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 1)
        return count - 1 - at if reverse else at

    def fetched(hosted: Hosted, step: int | jax.Array, names: Sequence[str] = reads) -> Rows:
        rows = {name: jax.lax.dynamic_index_in_dim(hosted[name], layer(step), 0, keepdims=False) for name in names}
        return {name: jax.device_put(row, DEVICE) for name, row in rows.items()}

    def written(hosted: Hosted, step: int | jax.Array, rows: Rows) -> Hosted:
        def put(name: str) -> jax.Array:
            row = jax.device_put(rows[name], jax.typeof(hosted[name]).memory_space)
            return jax.lax.dynamic_update_index_in_dim(hosted[name], row, layer(step), 0)

        return {**hosted, **{name: put(name) for name in writes}}

    def iteration(step: jax.Array, state: tuple[Any, tuple[Rows, ...], Rows, Hosted]) -> Any:
        carry, ready, before, there = state
        fresh, own = fetched(there, step + ahead), fetched(there, step, soon)
        before = dict(before)
        for name in soon:
            if name in before:
                before[name], own[name] = jax.lax.optimization_barrier((before[name], own[name]))
        ready = (*ready, fresh)
        carry, now = body(layer(step), ready[0] | own, carry)
        done = before if late else dict(now)
        for name in writes:
            if name in fresh:
                done[name], fresh[name] = jax.lax.optimization_barrier((done[name], fresh[name]))
        there = written(there, step - 1 if late else step, done)
        return carry, ready[1:], {name: now[name] for name in writes} if late else {}, there

    there = dict(hosted)
    ready = tuple(fetched(there, step) for step in range(ahead))
    before = {}
    if late:
        # Before the first there is nothing to write: what its row holds, or anything where nobody reads it before the
        # second iteration has written it.
        first = fetched(there, 0, [name for name in writes if name in (*reads, *soon)])
        nothing = lambda name: jnp.zeros(there[name].shape[1:], there[name].dtype)  # noqa: E731
        before = {name: first[name] if name in first else nothing(name) for name in writes}
    carry, _, done, there = jax.lax.fori_loop(0, count, iteration, (carry, ready, before, there))
    return carry, written(there, count - 1, done) if late else there


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What a forward pass leaves for the backward pass: kept of every layer and micro-batch, stacked [L, M, ...]."""

    split: SplitLayer
    keys: jax.Array
    kept: Any


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
        hosted: Hosted,
        x: Any,
        keys: jax.Array,
        arrive: Callable[[Rows], Rows] | None = None,
        reads: Sequence[str] = (WEIGHTS,),
        writes: Sequence[str] = (),
    ) -> tuple[Any, Streamed, Hosted]:
        """(x after the last layer, what `backward` needs, what is on the host).

        Args:
          keys: [M, ...].
          arrive: what becomes of a layer's rows before it is computed, such as the step that the last gradient asks
            for; what it gives is used, and those of `writes` are written back.
          reads, writes: names; of resident layers as well.
        """
        split = self._split(hosted, x, keys)
        count = len(hosted[WEIGHTS]) * group_size(hosted), len(keys)
        room = stacks.room(split.shapes, count, jnp.zeros(()))

        def one(layer: jax.Array, rows: Rows, carry: tuple[Any, Any]) -> tuple[Any, Rows]:
            rows = arrive(rows) if arrive else rows
            params = self._params(rows[WEIGHTS])

            def piece(at: Index, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                x, stacked = carry
                y, kept = split.forward(params, _at(x, at), (keys[at], self.first + layer))
                return _put(x, at, y), stacks.put(stacked, (layer, at), kept)

            return _each(len(keys), piece, carry), {name: rows[name] for name in writes}

        (x, kept), hosted = self._pass(hosted, one, (x, room), reads, writes)
        return x, Streamed(split=split, keys=keys, kept=kept), hosted

    def through(self, hosted: Hosted, x: Any, keys: jax.Array) -> Any:
        """x after the last layer, and nothing else."""

        def one(layer: jax.Array, rows: Rows, x: Any) -> tuple[Any, Rows]:
            params = self._params(rows[WEIGHTS])

            def piece(at: Index, x: Any) -> Any:
                return _put(x, at, self.function(params, _at(x, at), (keys[at], self.first + layer)))

            return _each(len(keys), piece, x), {}

        return self._pass(hosted, one, x, (WEIGHTS,), ())[0]

    def backward(
        self,
        hosted: Hosted,
        passed: Streamed,
        error: Any,
        leave: Leave,
        told: Any,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (GRADIENT,),
    ) -> tuple[Any, Any, Hosted]:
        """(error of the first layer's input, what the last layer told, what is on the host).

        Args:
          leave: what becomes of a layer's rows once its gradient is there; those of `writes` are written back.
          told: to the first layer that leaves.
          reads, writes: names, beside the weights; of resident layers as well.
        """
        split, keys = passed.split, passed.keys

        def one(layer: jax.Array, rows: Rows, carry: tuple[Any, Any]) -> tuple[Any, Rows]:
            error, told = carry
            params = self._params(rows[WEIGHTS])

            def piece(at: Index, carry: tuple[Any, jax.Array | None]) -> tuple[Any, jax.Array]:
                error, total = carry
                inputs = params, (keys[at], self.first + layer)
                gradient, down = split.backward(*inputs, stacks.taken(passed.kept, (layer, at)), _at(error, at))
                own = self.bucket.packed(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient))
                return _put(error, at, down), own if total is None else total + own

            nothing = None if len(keys) == 1 else jnp.zeros(self.bucket.size, jnp.float32)
            error, total = _each(len(keys), piece, (error, nothing))
            told, done = leave(rows, self.given(total), told)
            return (error, told), done

        (error, told), hosted = self._pass(hosted, one, (error, told), (WEIGHTS,), writes, reverse=True, soon=reads)
        return error, told, hosted

    def filled(self, hosted: Hosted, row: Callable[[jax.Array], jax.Array]) -> Hosted:
        """What is on the host with these weights, layer -> [N], in the place of its own."""
        return self._pass(hosted, lambda layer, _, carry: (carry, {WEIGHTS: row(layer)}), None, (), (WEIGHTS,))[1]

    def _pass(
        self,
        hosted: Hosted,
        one: Layer,
        carry: Any,
        reads: Sequence[str],
        writes: Sequence[str],
        reverse: bool = False,
        soon: Sequence[str] = (),
    ) -> tuple[Any, Hosted]:
        """(carry, what is on the host) after every layer has had its turn.  Backwards, what is written comes last."""
        streamed, stay = apart(hosted)
        others = group_size(hosted) - 1

        def body(at: jax.Array, rows: Rows, state: tuple[Any, Hosted]) -> tuple[tuple[Any, Hosted], Rows]:
            first = at * (others + 1)

            def resident(place: jax.Array, state: tuple[Any, Hosted]) -> tuple[Any, Hosted]:
                place = others - 1 - place if reverse else place
                carry, stay = state
                index = at * others + place
                carry, own = one(first + 1 + place, {name: stay[name][index] for name in (*reads, *soon)}, carry)
                return carry, stay | {name: stay[name].at[index].set(own[name]) for name in writes}

            def others_too(state: tuple[Any, Hosted]) -> tuple[Any, Hosted]:
                return jax.lax.fori_loop(0, others, resident, state) if others else state

            carry, stay = others_too(state) if reverse else state
            carry, done = one(first, rows, carry)
            state = (carry, stay) if reverse else others_too((carry, stay))
            return state, done

        (carry, stay), streamed = over_layers(
            streamed, reads, writes, body, (carry, stay), reverse=reverse, ahead=self.ahead, late=reverse, soon=soon
        )
        return carry, joined(streamed, stay)

    def _params(self, row: jax.Array) -> Any:
        return self.cast(self.bucket.unpacked(self.used(row)))

    def _split(self, hosted: Hosted, x: Any, keys: jax.Array) -> SplitLayer:
        row = jax.ShapeDtypeStruct(hosted[WEIGHTS].shape[1:], hosted[WEIGHTS].dtype)
        first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (x, keys))
        return split_layer(self.function, jax.eval_shape(self._params, row), first[0], (first[1], jnp.int32(0)))


def _each(count: int, piece: Callable[[Index, Any], Any], carry: Any) -> Any:
    """A loop over micro-batches, where there are several."""
    return piece(0, carry) if count == 1 else jax.lax.fori_loop(0, count, piece, carry)


def _at(tree: Any, index: Index) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _put(tree: Any, index: Index, own: Any) -> Any:
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, own)


def apart(hosted: Mapping[str, jax.Array]) -> tuple[Hosted, Hosted]:
    """(what is streamed, what is resident), each by its plain names."""
    stay = {name.removeprefix(RESIDENT): rows for name, rows in hosted.items() if name.startswith(RESIDENT)}
    return {name: rows for name, rows in hosted.items() if not name.startswith(RESIDENT)}, stay


def joined(streamed: Mapping[str, jax.Array], stay: Mapping[str, jax.Array]) -> Hosted:
    """`apart` backwards."""
    return {**streamed, **{RESIDENT + name: rows for name, rows in stay.items()}}


def group_size(hosted: Mapping[str, jax.Array]) -> int:
    """Layers of a group: one that is streamed, and those that stay."""
    stay = hosted.get(RESIDENT + WEIGHTS)
    return 1 if stay is None else 1 + len(stay) // len(hosted[WEIGHTS])
