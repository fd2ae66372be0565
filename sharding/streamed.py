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
        row = lambda name: jnp.zeros(there[name].shape[1:], there[name].dtype)  # noqa: E731
        before = {name: first[name] if name in reads else row(name) for name in writes}
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
        """
        count = len(hosted[WEIGHTS])
        split = self._split(hosted, x, keys)

        def body(at: jax.Array, rows: Rows, carry: tuple[Any, Any]) -> tuple[tuple[Any, Any], Rows]:
            x, stacked = carry
            rows = update(rows) if update else rows
            x, kept = split.forward(self._params(rows[WEIGHTS]), x, (keys, self.first + at))
            return (x, jax.tree.map(lambda all_, one: all_.at[at].set(one), stacked, kept)), rows

        room = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), split.shapes)
        (x, kept), hosted = over_layers(hosted, reads, writes, body, (x, room), ahead=self.ahead)
        return x, Streamed(split=split, keys=keys, kept=kept), hosted

    def backward(self, hosted: Hosted, passed: Streamed, error: Any) -> tuple[Any, jax.Array, Hosted]:
        """(error of the first layer's input, sum of the gradients' squares, what is on the host with the gradients)."""

        def body(at: jax.Array, rows: Rows, carry: tuple[Any, jax.Array]) -> tuple[tuple[Any, jax.Array], Rows]:
            error, squares = carry
            kept = jax.tree.map(lambda leaf: leaf[at], passed.kept)
            params = self._params(rows[WEIGHTS])
            gradient, error = passed.split.backward(params, (passed.keys, self.first + at), kept, error)
            own = self.given(self.bucket.packed(gradient))
            return (error, squares + jnp.sum(jnp.square(own.astype(jnp.float32)))), {GRADIENT: own}

        start = error, jnp.float32(0)
        (error, squares), hosted = over_layers(
            hosted, (WEIGHTS,), (GRADIENT,), body, start, reverse=True, ahead=self.ahead, late=True
        )
        return error, squares, hosted

    def _params(self, row: jax.Array) -> Any:
        return self.bucket.unpacked(self.used(row))

    def _split(self, hosted: Hosted, x: Any, keys: jax.Array) -> SplitLayer:
        row = jax.ShapeDtypeStruct(hosted[WEIGHTS].shape[1:], hosted[WEIGHTS].dtype)
        return split_layer(self.function, jax.eval_shape(self._params, row), x, (keys, jnp.int32(0)))
