"""Like layers, one after the other: forward, and backward through what forward kept.

Where parameters have to be fetched from other devices, or gradients given to them, a loop does so beside the
computation of another layer: the iteration of layer l fetches the parameters of layer l + `ahead` and gives away the
gradient that the iteration before has left.  Both are part of one iteration and independent of its computation, so the
compiler can run them at the same time; neither would be, in the iteration that needs them.  The last iterations of the
forward pass fetch what the first ones of the backward pass need.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import SplitLayer, split_layer
from jhpt.sharding.model_parts import Recompute
from jhpt.sharding.recompute import everything
from jhpt.sharding.sample_chunks import ChunkedSamples, UnchunkedSamples

Fetch = Callable[[Any], Any]
"""Parameters of one layer as they are stored -> as the layer uses them."""

Finish = Callable[[Any, Any], Any]
"""(gradient of one layer as it is computed, what earlier micro-batches added up to or None) -> as it is stored.

Where sums are compressed both hold what is left for later steps, too: pairs of gradient and that."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What a forward pass leaves for the backward pass.

    kept: by layer, in a list or stacked.  fetched: all layers' parameters, where they were wanted.  ready: those of the
    last layers, last first, where they were fetched ahead.  close: the backward pass of the stream's end.
    """

    split: SplitLayer
    keys: jax.Array
    saved: Any
    fetched: Any = None
    ready: tuple[Any, ...] = ()
    close: Callable[[jax.Array], tuple[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """Layers `[first, first + count)` of one kind, treated alike.

    stream: how x is handed from layer to layer.
    unroll: in the program instead of in a loop.  A loop copies what layers keep in and out of stacked buffers, unrolled
      layers take time to compile.
    ahead: how many layers a loop fetches ahead.  late: it finishes one layer later.
    keep: forward also returns all layers' fetched parameters.
    """

    stream: UnchunkedSamples | ChunkedSamples
    first: int
    count: int
    unroll: bool
    fetch: Fetch
    finish: Finish
    ahead: int = 0
    late: bool = False
    keep: bool = False
    recompute: Recompute = everything

    def forward(self, params: Any, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, Passed]:
        """params: stacked [count, ...].  Returns (x after the last layer, what `backward` needs)."""
        one, end = jax.eval_shape(self._fetched, params, 0), (keys, jnp.int32(self.first + self.count))
        stream, passed = self._forward(params, self.stream.opened(one, x, (keys, jnp.int32(self.first))), keys)
        x, close = jax.vjp(lambda stream: self.stream.closed(stream, end), stream)
        return x, replace(passed, close=close)

    def backward(self, params: Any, passed: Passed, error: jax.Array, total: Any = None) -> tuple[Any, jax.Array]:
        """(gradients stacked [count, ...], gradient of x); total: gradients that earlier micro-batches added up to."""
        assert passed.close is not None
        gradients, opened = self._backward(params, passed, *passed.close(error), total)
        return gradients, self.stream.opening_error(opened)

    def _forward(self, params: Any, x: Any, keys: jax.Array) -> tuple[Any, Passed]:
        split = split_layer(
            self.recompute(self.stream.layer), jax.eval_shape(self._fetched, params, 0), x, (keys, jnp.int32(0))
        )
        if self.unroll:
            saved, fetched = [], []
            for at in range(self.count):
                own = self._fetched(params, at)
                x, left = split.forward(own, x, (keys, jnp.int32(self.first + at)))
                saved.append(left)
                fetched.append(own)
            return x, Passed(split=split, keys=keys, saved=saved, fetched=_stacked(fetched) if self.keep else None)

        def step(at: jax.Array, carry: tuple[Any, tuple[Any, ...], Any]) -> tuple[Any, Any, Any]:
            x, ready, stacked = carry
            own, ready = self._next(params, at, ready, at + self.ahead)
            x, saved = split.forward(own, x, (keys, self.first + at))
            return x, ready, stacks.put(stacked, (at,), (saved, own if self.keep else None))

        start = tuple(self._fetched(params, self._turned(at)) for at in range(self.ahead))
        own = jax.eval_shape(self._fetched, params, 0) if self.keep else None
        stacked = self._room((split.shapes, own), x)
        x, ready, (saved, fetched) = jax.lax.fori_loop(0, self.count, step, (x, start, stacked))
        return x, Passed(split=split, keys=keys, saved=saved, fetched=fetched, ready=ready)

    def _backward(self, params: Any, passed: Passed, error: Any, total: Any) -> tuple[Any, Any]:
        split, keys = passed.split, passed.keys
        if self.unroll:
            gradients = []
            for at in reversed(range(self.count)):
                inputs = self._fetched(params, at), (keys, jnp.int32(self.first + at))
                own, error = split.backward(*inputs, passed.saved[at], error)
                gradients.append(self.finish(own, _row(total, at)))
            return _stacked(gradients[::-1]), error

        one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self._fetched, params, 0))
        finished = jax.eval_shape(lambda one: self.finish(one, _row(total, 0)), one)
        added = total is not None and _alike(finished, jax.eval_shape(_row, total, 0))

        def put(done: Any, at: int | jax.Array, gradient: Any) -> Any:
            so_far = _row(done if added else total, at)
            return stacks.put(done, (at,), self.finish(gradient, so_far))

        def step(back: jax.Array, carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
            error, ready, pending, done = carry
            at = self.count - 1 - back
            own, ready = self._next(params, at, ready, at - self.ahead)
            gradient, error = split.backward(own, (keys, self.first + at), stacks.taken(passed.saved, (at,)), error)
            if not self.late:
                return error, ready, None, put(done, at, gradient)
            # There is no layer behind the last one, whose gradient is what is dropped.
            behind = jnp.minimum(at + 1, self.count - 1)
            left = self.finish(pending, _row(done if added else total, behind))
            left = jax.tree.map(lambda new, old: jnp.where(back > 0, new, old), left, _row(done, behind))
            return error, ready, gradient, stacks.put(done, (behind,), left)

        done = total if added else self._room(finished, error)
        start = error, passed.ready if self.ahead else (), one if self.late else None, done
        error, _, pending, done = jax.lax.fori_loop(0, self.count, step, start)
        return put(done, 0, pending) if self.late else done, error

    def with_fetched(self) -> "LayerLoop":
        """The same over parameters that have been fetched."""
        return replace(self, fetch=lambda params: params, ahead=0, keep=False)

    def _fetched(self, params: Any, at: int | jax.Array) -> Any:
        return self.fetch(_row(params, at))

    def _next(
        self, params: Any, at: jax.Array, ready: tuple[Any, ...], later: jax.Array
    ) -> tuple[Any, tuple[Any, ...]]:
        """(parameters of layer `at`, those that are ready for the layers after it), while `later` is fetched."""
        if not self.ahead:
            return self._fetched(params, at), ()
        return ready[0], (*ready[1:], self._fetched(params, self._turned(later)))

    def _turned(self, at: int | jax.Array) -> int | jax.Array:
        """Layers behind the last one are the last ones again, on the way back; there are none before the first."""
        return jnp.clip(jnp.where(at < self.count, at, 2 * self.count - 1 - at), 0, self.count - 1)

    def _room(self, one: Any, x: Any) -> Any:
        """Stacks of `count` such layers, to be written before they are read.

        They are filled with a value of x, so that there is no room before there is x: of zeros the compiler would have
        one stack for all micro-batches, keep it all along, and copy it.
        """
        return stacks.room(one, (self.count,), jax.tree.leaves(x)[0].ravel()[0])


def _alike(one: Any, other: Any) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
    return len(leaves) == len(others) and all(map(same, leaves, others))


def _row(stacked: Any, at: int | jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stacked)


def _stacked(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
