"""How a model is cut over the tensor axis; the runtime injects it, and the defaults run on a single device."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def whole(x: jax.Array) -> jax.Array:
    """x itself: nothing is cut."""
    return x


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., F] w[F, D] -> [..., D]."""
    return jnp.einsum("...f,fd->...d", x, w)


def only_shard() -> int:
    """0: the number of the only shard."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """One shard's view.  Heads, hidden units and vocabulary are divided evenly.

    shards: how many there are.
    rows: into how many pieces the residual stream x[B, S, D] is cut along the sequence; `enter` makes it whole, and
      `contract` leaves a shard's piece.
    own_rows: what the whole sequence has [B, S, ...] -> this shard's piece of it.
    rank: () -> the number of this one.
    enter: x, whole -> x, before it meets matrices of which each shard has some columns.
    contract: (x[..., F], w[F, D]), of which each shard has some F -> the whole [..., D].
    join: what every shard has of the last dimension -> the whole.
    total: sum over the shards.
    largest: maximum over the shards; no gradient passes.
    """

    shards: int = 1
    rows: int = 1
    own_rows: Callable[[jax.Array], jax.Array] = whole
    rank: Callable[[], jax.Array | int] = only_shard
    enter: Callable[[jax.Array], jax.Array] = whole
    contract: Callable[[jax.Array, jax.Array], jax.Array] = dense
    join: Callable[[jax.Array], jax.Array] = whole
    total: Callable[[jax.Array], jax.Array] = whole
    largest: Callable[[jax.Array], jax.Array] = whole
