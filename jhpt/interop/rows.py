"""The rows of a batch on the device: a pass over their prompts, then a token of every row, again and again.

Lengths are rounded up to a few sizes, so that few programs are compiled.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.models.decoding import Memory, Reader
from jhpt.models.drawing import Drawing, drawn
from jhpt.models.family import Params

BATCH = 8
"""Rows that are computed at once by default."""

SHORTEST = 16
"""Lengths are rounded up to this, or to it times a power of two."""

NOTHING = -1
"""The token of a row that has ended."""


def padded(length: int, longest: int) -> int:
    """`length` rounded up to `SHORTEST` times a power of two, at most to `longest`."""
    size = SHORTEST
    while size < length:
        size *= 2
    return min(size, longest)


class State(NamedTuple):
    """The rows of a batch between two tokens.

    tokens: the newest of each row, which has not been read.  positions: where they are.  left: how many may follow.
    keys: one for each row.
    """

    memory: Memory
    tokens: jax.Array
    positions: jax.Array
    left: jax.Array
    keys: jax.Array


@partial(jax.jit, static_argnames=("reader", "drawing", "room"))
def begun(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    keys: jax.Array,
    stops: jax.Array,
    *,
    reader: Reader,
    drawing: Drawing,
    room: int,
) -> State:
    """Reads the prompts [B, S] and draws the first token of each row; those of rows with limit 0 do not count."""
    logits, memory = reader.begin(params, prompts, lengths, room)
    tokens = drawn(_fold_each(keys, lengths), logits, drawing)
    left = jnp.where(_among(tokens, stops), 0, jnp.maximum(limits - 1, 0))
    return State(memory, tokens, lengths, left, keys)


@partial(jax.jit, static_argnames=("reader", "drawing", "count"), donate_argnames="state")
def advanced(
    params: Params, state: State, stops: jax.Array, *, reader: Reader, drawing: Drawing, count: int
) -> tuple[State, jax.Array]:
    """Up to `count` more tokens of every row: (the state, tokens [B, count], `NOTHING` after the end of a row)."""

    def unfinished(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        return (carry[0] < count) & jnp.any(carry[1].left > 0)

    def one_more(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
        index, (memory, tokens, positions, left, keys), out = carry
        going = left > 0
        logits, memory = reader.read(params, memory, tokens, positions)
        positions = positions + going
        tokens = jnp.where(going, drawn(_fold_each(keys, positions), logits, drawing), tokens)
        out = out.at[:, index].set(jnp.where(going, tokens, NOTHING))
        left = jnp.where(going & ~_among(tokens, stops), left - 1, 0)
        return index + 1, State(memory, tokens, positions, left, keys), out

    nothing = jnp.full((len(state.tokens), count), NOTHING, jnp.int32)
    _, state, out = jax.lax.while_loop(unfinished, one_more, (jnp.int32(0), state, nothing))
    return state, out


def _fold_each(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Every row's key [B] for the use of its own number [B]."""
    return jax.vmap(jax.random.fold_in)(keys, numbers)


def _among(tokens: jax.Array, stops: jax.Array) -> jax.Array:
    """Whether tokens [B] are among stops [n]."""
    return jnp.any(tokens[:, None] == stops[None, :], axis=1)
