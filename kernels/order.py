"""Floats as integers of the same order, so that "the k largest" has one answer whatever the device."""

import jax
import jax.numpy as jnp

INFINITY = 0x7F800000
"""The bits of infinity; larger words are NaN."""


def ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 that compare as the floats do; -0 equals 0, and every NaN is above infinity."""
    word = jax.lax.bitcast_convert_type(x, jnp.int32)
    size = word & 0x7FFFFFFF
    ascending = jnp.where(word < 0, -size, size)
    return jnp.where(size > INFINITY, jnp.iinfo(jnp.int32).max, ascending)
