"""Which tokens matter, chosen as they come: whether a token is chosen depends on no token after it.

A row's k places are spread evenly over windows of neighbours.  Inside a window the first tokens that stand out among
the scores seen lately take the places, and the last tokens what is left of them:

    taken after position p of a window of m tokens and q places = max(min(C(p), q), q - (m - 1 - p))

where C(p) counts those that stood out up to p.  Both terms grow by 0 or 1 with p, so their maximum does, and it ends
at q: a token is chosen where it grows.
"""

import jax
import jax.numpy as jnp
import numpy as np

WINDOW = 32
"""Tokens that share places, and scores that a token is compared with."""


def causal_choice(scores: jax.Array, k: int, window: int = WINDOW) -> jax.Array:
    """k positions of every row of scores[B, S], ascending: int32 [B, k].

    A token stands out if fewer than k/S of the `window` scores up to its own are larger.

    Raises:
      ValueError: k outside 0 ... S.
    """
    length = scores.shape[1]
    if not 0 <= k <= length:
        raise ValueError(f"k={k} of {length} tokens")
    stops = np.minimum(np.arange(window, length + window, window), length)  # of windows
    sizes = np.diff(stops, prepend=0)
    places = np.diff((2 * k * stops + length) // (2 * length), prepend=0)  # rounded, so that they add up to k
    after = np.repeat(stops, sizes) - 1 - np.arange(length)  # tokens that follow in the same window
    quota = np.repeat(places, sizes)[None]

    found = stands_out(scores, k, window).astype(jnp.int32)
    windows = jnp.pad(found, ((0, 0), (0, -length % window))).reshape(len(scores), -1, window)
    count = jnp.cumsum(windows, 2).reshape(len(scores), -1)[:, :length]
    taken = jnp.maximum(jnp.minimum(count, quota), quota - after[None])
    before = jnp.pad(taken, ((0, 0), (1, 0)))[:, :-1] * (np.arange(length) % window > 0)[None]
    return positions_where(taken > before, k)


def positions_where(holds: jax.Array, count: int) -> jax.Array:
    """Where holds[B, S], which it does `count` times in every row, ascending: int32 [B, count]."""
    rows, length = jnp.arange(len(holds))[:, None], holds.shape[1]
    place = jnp.where(holds, jnp.cumsum(holds, 1, jnp.int32) - 1, count)  # count: outside, and dropped
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), holds.shape)
    return jnp.zeros((len(holds), count), jnp.int32).at[rows, place].set(positions, mode="drop")


def stands_out(scores: jax.Array, k: int, window: int) -> jax.Array:
    """Whether fewer than k/S of the last `window` scores, its own among them, are larger: bool [B, S]."""
    length = scores.shape[1]
    earlier = jnp.arange(length)[:, None] - jnp.arange(min(window, length))[None]
    larger = (scores[:, jnp.maximum(earlier, 0)] > scores[:, :, None]) & (earlier >= 0)[None]
    seen = np.minimum(np.arange(1, length + 1), window)
    return jnp.sum(larger, 2, jnp.int32) * length < (k * seen)[None]
