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

from jhpt.sharding.buckets import Bucket
from jhpt.sharding.split import SplitLayer, split_layer

DEVICE = jax.memory.Space.Device

Rows = dict[str, jax.Array]
"""Of one layer, on the device, by name."""

Hosted = dict[str, jax.Array]
"""[L, ...] by name, on the host; what lies on the device is read and written there."""

WEIGHTS, GRADIENT = "weights", "gradient"
"""Names that a step knows; an optimizer adds those of its state."""

RESIDENT = "resident "
"""Before the name of what resident layers have, [groups k, N] on the device."""


def over_layers(
    hosted: Mapping[str, jax.Array],
    reads: Sequence[str],
    writes: Sequence[str],
    body: Callable[[jax.Array, Rows, Any], tuple[Any, Rows]],
    carry: Any,
    *,
    reverse: bool = False,
    ahead: int = 1,
    late: bool = False,
) -> tuple[Any, Hosted]:
    """One pass.

    Args:
      reads, writes: names of what every iteration is given, and gives.
      body: (layer, its rows, carry) -> (carry, what is written, `writes` in all).
      ahead: iterations between a fetch and its use; 0: an iteration fetches what it uses itself.
      late: an iteration writes what the one before has computed.

    Returns:
      (carry, what is on the host).
    """
    count = len(next(iter(hosted.values())))

    def layer(step: int | jax.Array) -> jax.Array:
        at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 1)
        return count - 1 - at if reverse else at

    def fetched(hosted: Hosted, step: int | jax.Array) -> Rows:
        rows = {name: jax.lax.dynamic_index_in_dim(hosted[name], layer(step), 0, keepdims=False) for name in reads}
        return {name: jax.device_put(row, DEVICE) for name, row in rows.items()}

    def written(hosted: Hosted, step: int | jax.Array, rows: Rows) -> Hosted:
        def put(name: str) -> jax.Array:
            row = jax.device_put(rows[name], jax.typeof(hosted[name]).memory_space)
            return jax.lax.dynamic_update_index_in_dim(hosted[name], row, layer(step), 0)

        return {**hosted, **{name: put(name) for name in writes}}

    def iteration(step: jax.Array, state: tuple[Any, tuple[Rows, ...], Rows, Hosted]) -> Any:
        carry, ready, before, there = state
        fresh = fetched(there, step + ahead)
        ready = (*ready, fresh)
        carry, now = body(layer(step), ready[0], carry)
        done = dict(before if late else now)
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
        first = fetched(there, 0)
        nothing = lambda name: jnp.zeros(there[name].shape[1:], there[name].dtype)  # noqa: E731
        before = {name: first[name] if name in reads else nothing(name) for name in writes}
    carry, _, done, there = jax.lax.fori_loop(0, count, iteration, (carry, ready, before, there))
    return carry, written(there, count - 1, done) if late else there


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What a forward pass leaves for the backward pass: kept of every layer, stacked."""

    split: SplitLayer
    keys: jax.Array
    kept: Any


@dataclass(frozen=True, kw_only=True)
class StreamedLoop:
    """Layers `[first, first + L)` of one kind, one bucket each.

    function: a layer, (parameters, x, (keys, layer)) -> x.  used: a bucket as it comes from the host, [N] -> as
    `bucket` unpacks it; with ZeRO it gathers the shares.  given: the gradient of that, packed, -> as it is kept; sums
    over ranks.
    """

    function: Callable[[Any, Any, Any], Any]
    bucket: Bucket
    first: int
    ahead: int = 1
    used: Callable[[jax.Array], jax.Array] = lambda row: row
    given: Callable[[jax.Array], jax.Array] = lambda gradient: gradient

    def forward(
        self,
        hosted: Hosted,
        x: Any,
        keys: jax.Array,
        update: Callable[[Rows], Rows] | None = None,
        reads: Sequence[str] = (WEIGHTS,),
        writes: Sequence[str] = (),
    ) -> tuple[Any, Streamed, Hosted]:
        """(x after the last layer, what `backward` needs, what is on the host).

        Args:
          update: what becomes of a layer's rows before it is computed, such as the step that the last gradient asks
            for; what it gives is used, and those of `writes` are written back.
          reads, writes: names; of resident layers as well.
        """
        streamed, stay = apart(hosted)
        groups, size = len(streamed[WEIGHTS]), group_size(hosted)
        split = self._split(hosted, x, keys)

        def one(layer: jax.Array, rows: Rows, x: Any, stacked: Any) -> tuple[Any, Any, Rows]:
            rows = update(rows) if update else rows
            x, kept = split.forward(self._params(rows[WEIGHTS]), x, (keys, self.first + layer))
            return x, jax.tree.map(lambda all_, own: all_.at[layer].set(own), stacked, kept), rows

        def body(at: jax.Array, rows: Rows, carry: tuple[Any, Any, Hosted]) -> tuple[tuple[Any, Any, Hosted], Rows]:
            x, stacked, stay = carry
            x, stacked, done = one(at * size, rows, x, stacked)

            def resident(place: jax.Array, carry: tuple[Any, Any, Hosted]) -> tuple[Any, Any, Hosted]:
                x, stacked, stay = carry
                index = at * (size - 1) + place
                own = {name: stay[name][index] for name in reads}
                x, stacked, own = one(at * size + place + 1, own, x, stacked)
                return x, stacked, stay | {name: stay[name].at[index].set(own[name]) for name in writes}

            carry = x, stacked, stay
            carry = jax.lax.fori_loop(0, size - 1, resident, carry) if size > 1 else carry
            return carry, {name: done[name] for name in writes}

        room = jax.tree.map(lambda leaf: jnp.zeros((groups * size, *leaf.shape), leaf.dtype), split.shapes)
        (x, kept, stay), streamed = over_layers(streamed, reads, writes, body, (x, room, stay), ahead=self.ahead)
        return x, Streamed(split=split, keys=keys, kept=kept), joined(streamed, stay)

    def backward(self, hosted: Hosted, passed: Streamed, error: Any) -> tuple[Any, jax.Array, Hosted]:
        """(error of the first layer's input, sum of the gradients' squares, what is on the host with the gradients)."""
        streamed, stay = apart(hosted)
        size = group_size(hosted)

        def one(layer: jax.Array, row: jax.Array, error: Any) -> tuple[Any, jax.Array, jax.Array]:
            kept = jax.tree.map(lambda leaf: leaf[layer], passed.kept)
            inputs = self._params(row), (passed.keys, self.first + layer)
            gradient, error = passed.split.backward(*inputs, kept, error)
            own = self.given(self.bucket.packed(gradient))
            return error, jnp.sum(jnp.square(own.astype(jnp.float32))), own

        def body(at: jax.Array, rows: Rows, carry: tuple[Any, jax.Array, Hosted]) -> tuple[Any, Rows]:

            def resident(back: jax.Array, carry: tuple[Any, jax.Array, Hosted]) -> tuple[Any, jax.Array, Hosted]:
                error, squares, stay = carry
                place = size - 2 - back
                index = at * (size - 1) + place
                error, square, own = one(at * size + place + 1, stay[WEIGHTS][index], error)
                return error, squares + square, stay | {GRADIENT: stay[GRADIENT].at[index].set(own)}

            error, squares, stay = jax.lax.fori_loop(0, size - 1, resident, carry) if size > 1 else carry
            error, square, own = one(at * size, rows[WEIGHTS], error)
            return (error, squares + square, stay), {GRADIENT: own}

        (error, squares, stay), streamed = over_layers(
            streamed,
            (WEIGHTS,),
            (GRADIENT,),
            body,
            (error, jnp.float32(0), stay),
            reverse=True,
            ahead=self.ahead,
            late=True,
        )
        return error, squares, joined(streamed, stay)

    def _params(self, row: jax.Array) -> Any:
        return self.bucket.unpacked(self.used(row))

    def _split(self, hosted: Hosted, x: Any, keys: jax.Array) -> SplitLayer:
        row = jax.ShapeDtypeStruct(hosted[WEIGHTS].shape[1:], hosted[WEIGHTS].dtype)
        return split_layer(self.function, jax.eval_shape(self._params, row), x, (keys, jnp.int32(0)))


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
