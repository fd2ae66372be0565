"""The definition of gelu_backward."""

import jax
import jax.numpy as jnp

ROOT, CUBE = (2 / jnp.pi) ** 0.5, 0.044715


def backward(x: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `gelu_backward`.  With s(z) = 1 / (1 + exp(-z)) and z = 2 u:

    gelu(x) = x s(z),    gelu'(x) = s(z) + x s(z) (1 - s(z)) dz/dx
    """
    wide = x.astype(jnp.float32)
    z = 2 * ROOT * (wide + CUBE * wide**3)
    s, rest = jax.nn.sigmoid(z), jax.nn.sigmoid(-z)
    slope = s + wide * s * rest * (2 * ROOT * (1 + 3 * CUBE * wide * wide))
    below = error.astype(jnp.float32) * slope
    return (wide * s).astype(x.dtype), below.astype(x.dtype), jnp.sum(below, 0)
