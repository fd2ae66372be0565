"""The definition of attention_importance."""

import jax
import jax.numpy as jnp

QUERIES = 128
"""Queries in a block: [B, H, QUERIES, S] scores are held at a time."""


def importance(
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool,
    lengths: jax.Array | None,
    stride: int,
) -> jax.Array:
    """See `attention_importance`."""
    batch, length, heads, width = q.shape
    positions = jnp.arange(stride - 1, length, stride)
    seen = jnp.ones((batch, length), bool) if lengths is None else jnp.arange(length)[None] < lengths[:, None]
    k = jnp.repeat(k, heads // k.shape[2], 2).astype(jnp.float32)

    def paid(at: jax.Array, real: jax.Array) -> jax.Array:
        """Attention that the queries at positions `at` pay.  real: false for those that only fill up the block."""
        scores = jnp.einsum("bqhe,bkhe->bhqk", q[:, at].astype(jnp.float32), k) / width**0.5
        visible = jnp.broadcast_to(seen[:, None, None, :], scores.shape)
        if causal:
            visible &= (at[:, None] >= jnp.arange(length)[None])[None, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, -1, where=visible)
        pays = (seen[:, at] & real[None])[:, None, :, None]
        return jnp.sum(jnp.where(pays, weights, 0), (1, 2))

    blocks = -(-len(positions) // QUERIES)
    size = -(-len(positions) // blocks)
    filled = jnp.pad(positions, (0, blocks * size - len(positions)))
    real = (jnp.arange(blocks * size) < len(positions)).reshape(blocks, size)
    start = jnp.zeros((batch, length), jnp.float32)
    total, _ = jax.lax.scan(
        lambda sum_, block: (sum_ + paid(*block), None), start, (filled.reshape(blocks, size), real)
    )
    return total / viewers(seen, positions) if causal else total


def viewers(seen: jax.Array, positions: jax.Array) -> jax.Array:
    """The number of queries at `positions` that see each token of seen[B, S], at least 1."""
    length = seen.shape[1]
    pays = jnp.zeros(seen.shape, jnp.int32).at[:, positions].set(seen[:, positions].astype(jnp.int32))
    behind = jnp.flip(jnp.cumsum(jnp.flip(pays, 1), 1), 1)
    assert behind.shape[1] == length
    return jnp.maximum(behind, 1).astype(jnp.float32)
