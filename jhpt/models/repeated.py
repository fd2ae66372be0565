"""Parameters that many tokens read: rows of tables, biases, positions.  Their gradients are added up in float32.

Left to autodiff the sum runs in the dtype of the parameter as it is used, also on GPUs.  In bfloat16, with 8 bits, a
running sum stops growing at a few hundred times its summands: 4,096 tokens left BERT's token types 12 % off.
"""

import jax
import jax.numpy as jnp

PIECES = 16
"""Columns of a table are summed in so many pieces: a copy of all of it in float32 would be a step's largest array."""


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
        own = jax.lax.dynamic_slice_in_dim(gradient, piece * width, width, gradient.ndim - 1)
        sums = jnp.zeros((rows, width), jnp.float32).at[ids].add(own.astype(jnp.float32))
        return jax.lax.dynamic_update_slice_in_dim(total, sums.astype(table.dtype), piece * width, 1)

    # All of it is written over.  Zeros the compiler would lay out at once, beside the logits.
    room = jnp.full(table.shape, gradient.ravel()[0].astype(table.dtype))
    return jax.lax.fori_loop(0, pieces, add, room), None


looked_up.defvjp(lambda table, ids: (table[ids], (table, ids)), _looked_up_backward)


@jax.custom_vjp
def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """x[..., *D] + y[*D], both of one dtype."""
    return x + jnp.broadcast_to(y, x.shape)


def _plus_backward(saved: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    dims = tuple(range(gradient.ndim - saved.ndim))
    return gradient, jnp.sum(gradient, dims, jnp.float32).astype(saved.dtype)


plus.defvjp(lambda x, y: (plus(x, y), y), _plus_backward)
