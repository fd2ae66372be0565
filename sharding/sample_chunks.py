"""Samples in chunks, so that all-reduces over the tensor axis run beside matrix products (AccTFM; Wang et al. 2024,
Domino, arXiv 2409.15241).

Chunks do not depend on each other: while the all-reduce of one is under way, another is computed.  For the last
all-reduce of the last chunk nothing is left to compute in its own layer.  So it is passed to the next layer unreduced,
{U_tp}, and all-reduced there, beside that layer's first chunk:

    layer l    all-reduce of the last chunk of layer l - 1;    chunks 0 ... c - 2;    the last chunk up to its last
               all-reduce

The first layer has nothing to all-reduce: it gets zeros.  In the backward pass every all-reduce is one of gradients; it
runs beside other chunks and beside weight gradients, those of its own chunk among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jhpt.sharding.model_parts import BlockFunction, Halves, ModelParts
from jhpt.sharding.ordering import depend_on, emit
from jhpt.sharding.types import Activation, LayerContext, Params, RowContext

T = TypeVar("T")


class ChunkedStream(NamedTuple):
    """The activations that one layer passes to the next.

    whole: x of all chunks but the last.  last: the result of `Halves.second` for the last chunk.
    begun: [1], or [0] before the first layer, where x of the last chunk is `last.x` and nothing is to be all-reduced.
      It is an array, because a scalar would be traced as a constant, and other activations would be saved.
    """

    whole: tuple[jax.Array, ...]
    last: Any
    begun: jax.Array


@dataclass(frozen=True)
class UnchunkedSamples:
    """Layers that do not cut their samples into chunks and pass on x itself."""

    layer: BlockFunction

    def opened(self, params: Params, x: jax.Array, at: LayerContext) -> jax.Array:
        """x before the first layer."""
        return x

    def opening_error(self, error: Activation) -> jax.Array:
        """The gradient of x, from that of `opened`."""
        assert not isinstance(error, tuple)
        return error

    def closed(self, stream: Activation, at: LayerContext) -> jax.Array:
        """x after the last layer."""
        assert not isinstance(stream, tuple)
        return stream


@dataclass(frozen=True, kw_only=True)
class ChunkedSamples:
    """Layers whose samples are cut into `chunks`, at most as many as there are samples.

    in_turn: each half of a layer waits for the one before, chunk after chunk.
    """

    halves: Halves
    chunks: int
    in_turn: bool = False

    def opened(self, params: Params, x: jax.Array, at: LayerContext) -> ChunkedStream:
        """x[b, ...] before the first layer; params: of a layer, for their shapes."""
        *whole, last = _cut(x, self._sizes(x))
        shapes = jax.eval_shape(self._begun, params, last, (_last(at[0], last), at[1]))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _carried(leaf.dtype)), shapes)
        return ChunkedStream(tuple(whole), zeros._replace(x=last), jnp.zeros(1))

    def opening_error(self, error: Activation) -> jax.Array:
        """The gradient of x, from that of `opened`."""
        assert isinstance(error, ChunkedStream)
        return jnp.concatenate([*error.whole, error.last.x])

    def layer(self, params: Params, stream: Activation, at: LayerContext) -> ChunkedStream:
        """One layer, except for the last chunk's last all-reduce."""
        assert isinstance(stream, ChunkedStream)
        context, layer = at
        sizes = [*map(len, stream.whole), len(stream.last.x)]
        each = [(of_chunk, layer) for of_chunk in _cut(context, sizes)]
        xs = [*stream.whole, self._finished(stream, each[-1])]
        parted, ordering_token = self._half(self.halves.first, params, xs, each, None)
        parted, ordering_token = self._half(self.halves.second, params, parted, each, ordering_token)
        whole = tuple(
            depend_on(self.halves.finish(*one), ordering_token) for one in zip(parted[:-1], each[:-1], strict=True)
        )
        return ChunkedStream(
            whole, jax.tree.map(lambda leaf: leaf.astype(_carried(leaf.dtype)), parted[-1]), jnp.ones(1)
        )

    def _half(
        self,
        half: Callable[..., Any],
        params: Params,
        inputs: Sequence[object],
        each: list[LayerContext],
        ordering_token: jax.Array | None,
    ) -> tuple[list[Any], jax.Array | None]:
        """(half a layer of every chunk, ordering token of the last one)."""
        done = []
        for one, at in zip(inputs, each, strict=True):
            parted = half(params, one, at, ordering_token)
            if self.in_turn:
                part, ordering_token = emit(parted.part)
                parted = parted._replace(part=part)
            done.append(parted)
        return done, ordering_token

    def _begun(self, params: Params, x: jax.Array, at: LayerContext) -> Any:
        return self.halves.second(params, self.halves.first(params, x, at, None), at, None)

    def closed(self, stream: Activation, at: LayerContext) -> jax.Array:
        """x[b, ...] after the layer before number `at[1]`."""
        assert isinstance(stream, ChunkedStream)
        context, layer = at
        return jnp.concatenate([*stream.whole, self._finished(stream, (_last(context, stream.last.x), layer))])

    def _finished(self, stream: ChunkedStream, at: LayerContext) -> jax.Array:
        """x of the last chunk before layer `at[1]`."""
        context, layer = at
        return jnp.where(stream.begun[0] > 0, self.halves.finish(stream.last, (context, layer - 1)), stream.last.x)

    def _sizes(self, x: jax.Array) -> list[int]:
        chunks = min(self.chunks, len(x))
        return [len(x) // chunks + (n < len(x) % chunks) for n in range(chunks)]


def streaming(parts: ModelParts, chunks: int, *, in_turn: bool) -> UnchunkedSamples | ChunkedSamples:
    """How layers pass on activations: x itself, or in chunks where layers have halves (`ModelParts.halves`)."""
    if chunks == 1 or parts.halves is None:
        return UnchunkedSamples(parts.block)
    return ChunkedSamples(halves=parts.halves, chunks=chunks, in_turn=in_turn)


def _cut(rows: T, sizes: list[int]) -> list[T]:
    """Rows of a tree in pieces of these sizes."""
    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [
        jax.tree.map(lambda leaf, size=size, stop=stop: leaf[stop - size : stop], rows)
        for size, stop in zip(sizes, stops, strict=True)
    ]


def _last(context: RowContext, x: jax.Array) -> RowContext:
    """The context of the last chunk, whose activations are x."""
    last: RowContext = jax.tree.map(lambda leaf: leaf[len(leaf) - len(x) :], context)
    return last


def _carried(dtype: jnp.dtype) -> Any:
    """Integers, the positions of important tokens, are passed on as floats, which have gradients (of zero)."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.integer) else dtype
