"""From token ids into the residual stream and back, over a table of padded rows [V, D]."""

import jax
import jax.numpy as jnp

from jhpt.models.hooks import Hooks


def embed(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """table[tokens]: ids [B, S] -> [B, S, D]."""
    return table[tokens].astype(dtype)


def project_to_vocabulary(x: jax.Array, table: jax.Array, vocab_size: int, dtype: jnp.dtype, hooks: Hooks) -> jax.Array:
    """x table^T in float32, [..., V]; columns of padding rows are -inf, so they take no probability and no gradient."""
    logits = _product(x, table.astype(dtype))
    logits = hooks.constrain(logits, (*("batch", "length")[: x.ndim - 1], "vocab"))
    if vocab_size == table.shape[0]:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocab_size, logits, -jnp.inf)


@jax.custom_vjp
def _product(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[..., D] table[V, D]^T -> [..., V], accumulated and returned in float32.

    Its own backward pass rounds the incoming gradient to the compute dtype first.  Left to autodiff, both products of
    the backward pass would run in float32, at half the rate or less, over a float32 copy of the logits' gradient.
    """
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)


def _product_forward(x: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, table), (x, table)


def _product_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    gradient = gradient.astype(x.dtype)
    return jnp.einsum("...v,vd->...d", gradient, table), jnp.einsum("...v,...d->vd", gradient, x)


_product.defvjp(_product_forward, _product_backward)
