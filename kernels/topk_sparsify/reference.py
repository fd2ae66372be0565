"""The definition of topk_sparsify."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.kernels.order import ordered


class Sparse(NamedTuple):
    """values, positions: [blocks, keep]; residual: [N]."""

    values: jax.Array
    positions: jax.Array
    residual: jax.Array


def sparsify(gradient: jax.Array, residual: jax.Array, *, keep: int, block: int) -> Sparse:
    """See `topk_sparsify`."""
    size = gradient.size
    error = jnp.pad(gradient.astype(jnp.float32) + residual, (0, -size % block)).reshape(-1, block)
    chosen = jnp.sort(_largest(error, keep), -1)
    exact = jnp.take_along_axis(error, chosen, -1)
    # The rounding is an explicit operation: on GPUs, XLA removes a conversion to bfloat16 and back, and the residual
    # would be zero wherever a number is sent.
    sent = jax.lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
    rest = jnp.put_along_axis(error, chosen, exact - sent, -1, inplace=False)
    return Sparse(sent.astype(jnp.bfloat16), chosen.astype(jnp.uint16), rest.reshape(-1)[:size])


def _largest(error: jax.Array, keep: int) -> jax.Array:
    """Positions of the largest magnitudes of each row; NaN comes first, and of equal numbers the first.

    Floats are sorted in this order on CPUs alone, where integers take ten times as long.
    """

    def of_floats(size: jax.Array) -> jax.Array:
        return jax.lax.top_k(size, keep)[1]

    def of_integers(size: jax.Array) -> jax.Array:
        return jax.lax.top_k(ordered(size), keep)[1]

    return jax.lax.platform_dependent(jnp.abs(error), cpu=of_floats, default=of_integers)


def spread(values: jax.Array, positions: jax.Array, block: int) -> jax.Array:
    """The values in their places: float32 [blocks, block]."""
    empty = jnp.zeros((len(values), block), jnp.float32)
    return jnp.put_along_axis(empty, positions.astype(jnp.int32), values.astype(jnp.float32), -1, inplace=False)
