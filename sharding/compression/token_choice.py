"""A causal choice of important tokens: whether a token is chosen does not depend on the tokens after it.

The k choices of a row are spread evenly over windows of neighbouring tokens.  In a window, the first tokens whose
scores stand out among recent ones are chosen; the last tokens of the window make up for choices that are left:

    number chosen up to position p, of q choices in a window of m tokens = max(min(C(p), q), q - (m - 1 - p))

where C(p) counts the tokens up to p that stand out.  Both terms grow by 0 or 1 with p, and so does their maximum, which
is q at the end of the window.  A token is chosen where the maximum grows.
"""

import jax
import jax.numpy as jnp
import numpy as np

WINDOW = 32
"""Number of tokens in a window, and of scores that a token is compared with."""


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
    of_windows = np.diff((2 * k * stops + length) // (2 * length), prepend=0)  # rounded, so that they add up to k
    after = np.repeat(stops, sizes) - 1 - np.arange(length)  # tokens that follow in the same window
    quota = np.repeat(of_windows, sizes)[None]

    outstanding = stands_out(scores, k, window).astype(jnp.int32)
    windows = jnp.pad(outstanding, ((0, 0), (0, -length % window))).reshape(len(scores), -1, window)
    count = jnp.cumsum(windows, 2).reshape(len(scores), -1)[:, :length]
    chosen = jnp.maximum(jnp.minimum(count, quota), quota - after[None])
    before = jnp.pad(chosen, ((0, 0), (1, 0)))[:, :-1] * (np.arange(length) % window > 0)[None]
    return positions_where(chosen > before, k)


def positions_where(holds: jax.Array, count: int) -> jax.Array:
    """The positions, ascending, where holds[B, S] is true, which is `count` times in every row: int32 [B, count]."""
    rows, length = jnp.arange(len(holds))[:, None], holds.shape[1]
    place = jnp.where(holds, jnp.cumsum(holds, 1, jnp.int32) - 1, count)  # count: outside, and dropped
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), holds.shape)
    return jnp.zeros((len(holds), count), jnp.int32).at[rows, place].set(positions, mode="drop")


def stands_out(scores: jax.Array, k: int, window: int) -> jax.Array:
    """Whether fewer than k/S of the last `window` scores, the token's included, are larger: bool [B, S]."""
    length = scores.shape[1]
    earlier = jnp.arange(length)[:, None] - jnp.arange(min(window, length))[None]
    larger = (scores[:, jnp.maximum(earlier, 0)] > scores[:, :, None]) & (earlier >= 0)[None]
    seen = np.minimum(np.arange(1, length + 1), window)
    return jnp.sum(larger, 2, jnp.int32) * length < (k * seen)[None]
