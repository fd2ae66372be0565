"""The definition of topk_sparsify."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sparse(NamedTuple):
    """values, positions: [blocks, keep]; residual: [N]."""

    values: jax.Array
    positions: jax.Array
    residual: jax.Array


def sparsify(gradient: jax.Array, residual: jax.Array, *, keep: int, block: int) -> Sparse:
    """See `topk_sparsify`."""
    size = gradient.size
    error = jnp.pad(gradient.astype(jnp.float32) + residual, (0, -size % block)).reshape(-1, block)
    # NaN comes first, and of equal numbers the first, as with `ordered`, whose integers take a CPU ten times as long.
    chosen = jnp.sort(jax.lax.top_k(jnp.abs(error), keep)[1], -1)
    values = jnp.take_along_axis(error, chosen, -1).astype(jnp.bfloat16)
    rest = jnp.put_along_axis(
        error, chosen, jnp.take_along_axis(error, chosen, -1) - values.astype(jnp.float32), -1, inplace=False
    )
    return Sparse(values, chosen.astype(jnp.uint16), rest.reshape(-1)[:size])


def spread(values: jax.Array, positions: jax.Array, block: int) -> jax.Array:
    """The values in their places: float32 [blocks, block]."""
    empty = jnp.zeros((len(values), block), jnp.float32)
    return jnp.put_along_axis(empty, positions.astype(jnp.int32), values.astype(jnp.float32), -1, inplace=False)
