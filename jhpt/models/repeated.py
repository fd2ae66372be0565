"""Parameters that many tokens read (rows of tables, biases, positions): their gradients are summed in float32.

Autodiff would sum in the dtype in which the parameter is used, also on GPUs.  A bfloat16 has 8 significant bits, so a
running sum stops growing at a few hundred times its summands: with 4,096 tokens BERT's token types were 12 % off.
"""

import jax
import jax.numpy as jnp

PIECES = 16
"""A table's columns are summed in this many pieces, because a float32 copy of the table would be a step's largest
array."""


@jax.custom_vjp
def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids]: table [V, D], ids of any shape."""
    return table[ids]


def _looked_up_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    rows, columns = table.shape
    pieces = PIECES if table.dtype != jnp.float32 and columns % PIECES == 0 else 1
    width = columns // pieces

    def add(piece: jax.Array, total: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(gradient, piece * width, width, gradient.ndim - 1)
        sums = jnp.zeros((rows, width), jnp.float32).at[ids].add(part.astype(jnp.float32))
        return jax.lax.dynamic_update_slice_in_dim(total, sums.astype(table.dtype), piece * width, 1)

    # All of it is overwritten.  The compiler would allocate zeros early, while the logits exist.
    room = jnp.full(table.shape, gradient.ravel()[0].astype(table.dtype))
    return jax.lax.fori_loop(0, pieces, add, room), None


looked_up.defvjp(lambda table, ids: (table[ids], (table, ids)), _looked_up_backward)


@jax.custom_vjp
def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """x[..., *D] + y[*D], both of one dtype."""
    return x + jnp.broadcast_to(y, x.shape)


def summed_over_tokens(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """[..., *D] -> [*D], of the shape and dtype of `like`; the sum is float32."""
    return jnp.sum(gradient, tuple(range(gradient.ndim - like.ndim)), jnp.float32).astype(like.dtype)


plus.defvjp(lambda x, y: (plus(x, y), y), lambda y, gradient: (gradient, summed_over_tokens(gradient, y)))
