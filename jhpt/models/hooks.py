"""How a model is cut over the tensor axis.  The runtime injects the functions; the defaults run on a single device."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jhpt.kernels.implementation import Implementation

Settle = Callable[[jax.Array, jax.Array | None], jax.Array]
"""(y, tokens) -> y."""


def whole(x: jax.Array) -> jax.Array:
    """x itself, which is not cut."""
    return x


def same(x: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """x itself, whichever tokens are important."""
    return x


def copied_and_settled(x: jax.Array) -> tuple[jax.Array, Settle]:
    """(x, a `settle` that returns its argument)."""
    return x, same


def all_alike(q: jax.Array, k: jax.Array, lengths: jax.Array | None, residual: jax.Array) -> None:
    """None: no token is more important than another."""


def only_shard() -> int:
    """0, the number of a single shard."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """One shard's view of the model.  Heads, hidden units and vocabulary are divided evenly among the shards.

    shards: the number of shards.
    rows: the number of pieces that the residual stream x[B, S, D] is cut into along the sequence.  Where it is cut,
      `copy_to_tensor_axis` makes x whole and `reduce_over_tensor_axis` returns this shard's piece.
    own_rows: an array [B, S, ...] over the whole sequence -> this shard's piece of it.
    rank: () -> the number of this shard.
    important: (q[B, S, heads, E], k, lengths) of this shard's heads and the residual stream [B, S, D] that they depend
      on -> the positions [B, k] of the tokens that are most important to all shards; None if all-reduces do not
      distinguish tokens.
    copy_to_tensor_axis: (x, important tokens or None) -> x, before it is multiplied with matrices that are split by
      column; its backward pass is an all-reduce.
    copy_before_choice: x -> (x, settle), as `copy_to_tensor_axis`, if the important tokens are chosen only later.
      settle: (y, tokens) -> y for any y that depends on x.
    depend_on: (x, ordering token or None) -> x, available only once the token is.
    reduce_over_tensor_axis: (part, important tokens or None) -> the all-reduce of the shards' parts [..., D].
    join: this shard's part of the last dimension -> the whole dimension.
    total: the sum over the shards.
    largest: the maximum over the shards; no gradient passes.
    alone: one GPU runs the whole model, so that the shortest computation is best.  Elsewhere the compiler is left free
      to order it around communication, which barriers and more products would cost (0.60 instead of 0.88 of the
      all-reduces of gpt-6.7b in chunks of samples are hidden, compiled for h100x8x2).
    kernels: the programs of `jhpt.kernels` that a model alone may use.
    """

    shards: int = 1
    rows: int = 1
    own_rows: Callable[[jax.Array], jax.Array] = whole
    rank: Callable[[], jax.Array | int] = only_shard
    important: Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], jax.Array | None] = all_alike
    copy_to_tensor_axis: Callable[..., jax.Array] = same
    copy_before_choice: Callable[[jax.Array], tuple[jax.Array, Settle]] = copied_and_settled
    depend_on: Callable[[jax.Array, jax.Array | None], jax.Array] = same
    reduce_over_tensor_axis: Callable[..., jax.Array] = same
    join: Callable[[jax.Array], jax.Array] = whole
    total: Callable[[jax.Array], jax.Array] = whole
    largest: Callable[[jax.Array], jax.Array] = whole
    alone: bool = False
    kernels: Implementation = "reference"
