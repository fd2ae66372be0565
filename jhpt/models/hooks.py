"""How a model is cut over the tensor axis; the runtime injects it, and the defaults run on a single device."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

Settle = Callable[[jax.Array, jax.Array | None], jax.Array]
"""(y, tokens) -> y."""


def whole(x: jax.Array) -> jax.Array:
    """x itself: nothing is cut."""
    return x


def same(x: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """x itself, whichever tokens matter."""
    return x


def enter_at_once(x: jax.Array) -> tuple[jax.Array, Settle]:
    """(x, what leaves everything as it is)."""
    return x, same


def all_alike(q: jax.Array, k: jax.Array, lengths: jax.Array | None, residual: jax.Array) -> None:
    """No token matters more than others."""


def only_shard() -> int:
    """0: the number of the only shard."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """One shard's view.  Heads, hidden units and vocabulary are divided evenly.

    shards: how many there are.
    rows: into how many pieces the residual stream x[B, S, D] is cut along the sequence; `copy_to_tensor_axis` makes it
      whole, and
      `reduce_over_tensor_axis` leaves a shard's piece.
    own_rows: what the whole sequence has [B, S, ...] -> this shard's piece of it.
    rank: () -> the number of this one.
    important: (q[B, S, heads, E], k, lengths) of this shard's heads and the residual stream [B, S, D] that they come
      from -> tokens, the positions [B, k] that matter most to all shards; None: sums need not know.
    copy_to_tensor_axis: (x, whole, tokens or nothing) -> x, before it meets matrices of which each shard has some
      columns.
    enter_before: x -> (x, settle) where tokens are chosen from what follows; settle: (y, tokens) -> y, of any y that
      depends on x.
    depend_on: (x, ordering token or None) -> x, not before the token is there.
    reduce_over_tensor_axis: (part, tokens or nothing) -> the sum of all shards' parts [..., D] of a product.
    join: what every shard has of the last dimension -> the whole.
    total: sum over the shards.
    largest: maximum over the shards; no gradient passes.
    """

    shards: int = 1
    rows: int = 1
    own_rows: Callable[[jax.Array], jax.Array] = whole
    rank: Callable[[], jax.Array | int] = only_shard
    important: Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], jax.Array | None] = all_alike
    copy_to_tensor_axis: Callable[..., jax.Array] = same
    enter_before: Callable[[jax.Array], tuple[jax.Array, Settle]] = enter_at_once
    depend_on: Callable[[jax.Array, jax.Array | None], jax.Array] = same
    reduce_over_tensor_axis: Callable[..., jax.Array] = same
    join: Callable[[jax.Array], jax.Array] = whole
    total: Callable[[jax.Array], jax.Array] = whole
    largest: Callable[[jax.Array], jax.Array] = whole
