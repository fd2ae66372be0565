"""Reading a prompt, and then one token after the other, as generating does.

Rows are ragged: row b holds tokens at positions 0 to n_b - 1, whatever lies behind them is never seen, and its next
token comes to position n_b.  Two readers give the same logits:

    CachedReader       keeps every layer's keys and values [L, B, R, K, E] for R positions, and reads only what is new
    RereadingReader    keeps the tokens [B, R], and reads all of them again

A row's logits depend on no other row (to rounding: products of other shapes may be summed in another order).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jhpt.models.family import Params, TextModel
from jhpt.models.layers import Mix, scan_layers

Memory = Any
"""What a reader keeps of the tokens that it has read: a tree of arrays."""


class Reader(Protocol):
    """How ragged rows are read."""

    def begin(self, params: Params, tokens: jax.Array, lengths: jax.Array, room: int) -> tuple[jax.Array, Memory]:
        """Reads prompts [B, S] of `lengths` [B], 1 to S; returns (logits [B, V] of their next tokens, the memory).

        room: the positions that the memory has, at least S.
        """

    def read(self, params: Params, memory: Memory, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, Memory]:
        """Reads a token [B] at the next position [B] of each row; returns (logits [B, V] of the one after it, the
        memory)."""


@runtime_checkable
class CacheableModel(TextModel, Protocol):
    """A model of transformer blocks whose attention can be replaced."""

    def embed_at(self, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens[B, S] at `positions` [B, S] -> x[B, S, D]."""

    def block_at(self, layer_params: Params, x: jax.Array, positions: jax.Array, mix: Mix) -> jax.Array:
        """One layer on x[B, S, D] at `positions` [B, S], with `mix` as its attention."""


def reader_of(model: TextModel) -> Reader:
    """The reader with a cache, where the model's family can have one."""
    return CachedReader(model=model) if isinstance(model, CacheableModel) else RereadingReader(model=model)


def visible(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    """Whether a token at position `queries` [B, S, 1] sees the one at position `keys` [1, 1, R]: [B, S, R].

    window: it sees so many, the last ones and itself; None: all.
    """
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


class Cache(NamedTuple):
    """Keys and values, in the compute dtype: of all layers [L, B, R, K, E], or of one [B, R, K, E]."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True, kw_only=True)
class CachedReader:
    """Implements `Reader` with a cache of keys and values."""

    model: CacheableModel

    def begin(self, params: Params, tokens: jax.Array, lengths: jax.Array, room: int) -> tuple[jax.Array, Cache]:
        """Keys of what follows a prompt in its row are overwritten by `read` before anything can see them."""
        config = self.model.config
        shape = (config.num_layers, len(tokens), room, config.kv_heads, config.head_dim)
        empty = Cache(jnp.zeros(shape, self.model.dtype), jnp.zeros(shape, self.model.dtype))
        x, cache = self._passed(params, empty, tokens, jnp.zeros_like(lengths))
        return _last_logits(self.model, params, x, lengths), cache

    def read(self, params: Params, memory: Cache, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, Cache]:
        """One pass over one token of each row."""
        x, cache = self._passed(params, memory, tokens[:, None], positions)
        return self.model.logits(params, x)[:, 0], cache

    def _passed(self, params: Params, cache: Cache, tokens: jax.Array, first: jax.Array) -> tuple[jax.Array, Cache]:
        """tokens [B, S] at positions from `first` [B] on, through all blocks: (x[B, S, D], the cache with them)."""
        rows = jnp.arange(len(tokens))[:, None]
        positions = first[:, None] + jnp.arange(tokens.shape[1])[None, :]
        keys = jnp.arange(cache.keys.shape[2])[None, None, :]
        mask = visible(positions[:, :, None], keys, self.model.config.attention_window)[:, None]

        def block(x: jax.Array, layer: tuple[Params, Cache]) -> tuple[jax.Array, Cache]:
            layer_params, before = layer
            new: list[Cache] = []

            def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                new.append(Cache(k, v))
                keys, values = (old.at[rows, positions].set(x) for old, x in zip(before, new[0], strict=True))
                return jax.nn.dot_product_attention(q, keys, values, mask=mask, implementation="xla")

            x = self.model.block_at(layer_params, x, positions, mix)
            return x, new[0]

        # The scan returns the new keys and values alone: with the whole cache, it would copy all of it.
        x, new = jax.lax.scan(block, self.model.embed_at(params, tokens, positions), (params["blocks"], cache))
        return x, Cache(*(old.at[:, rows, positions].set(x) for old, x in zip(cache, new, strict=True)))


@dataclass(frozen=True, kw_only=True)
class RereadingReader:
    """Implements `Reader` for every model that generates.  A token costs as much as R tokens of a prompt."""

    model: TextModel

    def begin(self, params: Params, tokens: jax.Array, lengths: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
        """Reads the prompts."""
        memory = jnp.zeros((len(tokens), room), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
        return self._logits(params, memory, lengths), memory

    def read(
        self, params: Params, memory: jax.Array, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Reads everything again."""
        memory = memory.at[jnp.arange(len(tokens)), positions].set(tokens)
        return self._logits(params, memory, positions + 1), memory

    def _logits(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        def block(layer_params: Params, x: jax.Array, keys: jax.Array | None) -> jax.Array:
            return self.model.finish(self.model.feed(layer_params, self.model.attend(layer_params, x)))

        x = scan_layers(block, params["blocks"], self.model.embed(params, tokens), None)
        return _last_logits(self.model, params, x, lengths)


def _last_logits(model: TextModel, params: Params, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """The logits [B, V] of the last of each row's `lengths` [B] tokens, from x[B, S, D]."""
    return model.logits(params, jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1))[:, 0]
