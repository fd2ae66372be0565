"""Samples in chunks, so that sums over the tensor axis travel beside products (AccTFM; Wang et al. 2024, Domino,
arXiv 2409.15241).

Chunks do not depend on each other: while the sum of one travels, another is computed.  The last chunk's last sum finds
nothing of its own layer left to travel beside.  It is handed to the next layer as it is, in parts, and summed there,
beside that layer's first chunk:

    layer l       sum of the last chunk of layer l - 1;   chunks 0 ... c - 2 whole;   the last one up to its last sum

In the first layer there is nothing to sum: parts of zero.  In the backward pass every sum is one of errors; it travels
beside other chunks and beside the weight gradients, its own chunk's among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.sharding.model_parts import BlockFunction, Halves, ModelParts
from jhpt.sharding.ordering import depend_on, emit


class ChunkedStream(NamedTuple):
    """What one layer hands to the next: x of all chunks but the last, and of that what `Halves.second` left.

    begun: [1], or [0] where x of the last chunk lies in `last.x` and nothing is to be summed.  An array, for a scalar
    would be a constant to the layers that are traced with it, which then keep something else.
    """

    whole: tuple[jax.Array, ...]
    last: Any
    begun: jax.Array


@dataclass(frozen=True)
class UnchunkedSamples:
    """Layers that compute all samples together; what they hand on is x itself."""

    layer: BlockFunction

    def opened(self, params: Any, x: jax.Array, at: tuple[jax.Array, Any]) -> Any:
        """x before the first layer."""
        return x

    def opening_error(self, error: Any) -> jax.Array:
        """The gradient of x, from that of `opened`."""
        return error

    def closed(self, stream: Any, at: tuple[jax.Array, Any]) -> jax.Array:
        """x after the last layer."""
        return stream


@dataclass(frozen=True, kw_only=True)
class ChunkedSamples:
    """Layers whose samples are cut into `chunks`, at most as many as there are samples.

    in_turn: the halves of a layer wait for each other, chunk after chunk.
    """

    halves: Halves
    chunks: int
    in_turn: bool = False

    def opened(self, params: Any, x: jax.Array, at: tuple[jax.Array, Any]) -> ChunkedStream:
        """x[b, ...] before the first layer; params: of a layer, for their shapes."""
        *whole, last = _cut(x, self._sizes(x))
        shapes = jax.eval_shape(self._begun, params, last, (_cut(at[0], self._sizes(x))[-1], at[1]))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _carried(leaf.dtype)), shapes)
        return ChunkedStream(tuple(whole), nothing._replace(x=last), jnp.zeros(1))

    def opening_error(self, error: ChunkedStream) -> jax.Array:
        """The gradient of x, from that of `opened`."""
        return jnp.concatenate([*error.whole, error.last.x])

    def layer(self, params: Any, stream: ChunkedStream, at: tuple[jax.Array, Any]) -> ChunkedStream:
        """One layer, but for the last chunk's last sum."""
        keys, layer = at
        each = [(own, layer) for own in _cut(keys, [*(len(x) for x in stream.whole), len(stream.last.x)])]
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
        params: Any,
        inputs: list[Any],
        each: list[Any],
        ordering_token: jax.Array | None,
    ) -> tuple[list[Any], jax.Array | None]:
        """Half a layer of every chunk, and the last one's ticket."""
        done = []
        for one, at in zip(inputs, each, strict=True):
            parted = half(params, one, at, ordering_token)
            if self.in_turn:
                part, ordering_token = emit(parted.part)
                parted = parted._replace(part=part)
            done.append(parted)
        return done, ordering_token

    def _begun(self, params: Any, x: jax.Array, at: tuple[jax.Array, Any]) -> Any:
        return self.halves.second(params, self.halves.first(params, x, at, None), at, None)

    def closed(self, stream: ChunkedStream, at: tuple[jax.Array, Any]) -> jax.Array:
        """x[b, ...] after the layer before number `at[1]`."""
        keys, layer = at
        last = keys[len(keys) - len(stream.last.x) :]
        return jnp.concatenate([*stream.whole, self._finished(stream, (last, layer))])

    def _finished(self, stream: ChunkedStream, at: tuple[jax.Array, Any]) -> jax.Array:
        """x of the last chunk before layer `at[1]`."""
        keys, layer = at
        return jnp.where(stream.begun[0] > 0, self.halves.finish(stream.last, (keys, layer - 1)), stream.last.x)

    def _sizes(self, x: jax.Array) -> list[int]:
        chunks = min(self.chunks, len(x))
        return [len(x) // chunks + (n < len(x) % chunks) for n in range(chunks)]


def streaming(parts: ModelParts, chunks: int, *, in_turn: bool) -> UnchunkedSamples | ChunkedSamples:
    """How layers hand on the residual stream: whole, or in so many chunks where they have sums that can be put off."""
    if chunks == 1 or parts.halves is None:
        return UnchunkedSamples(parts.block)
    return ChunkedSamples(halves=parts.halves, chunks=chunks, in_turn=in_turn)


def _cut(x: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """Rows of x, so many each."""
    embedding_and_head = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [x[end - size : end] for size, end in zip(sizes, embedding_and_head, strict=True)]


def _carried(dtype: Any) -> Any:
    """Whole numbers, the important tokens' positions, are handed on as floats: those have gradients, of zero."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.integer) else dtype
