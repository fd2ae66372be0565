"""From token ids into the residual stream and back, over a table of padded rows [V, D]."""

import jax
import jax.numpy as jnp

from jhpt.models.hooks import Hooks


def embed(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """table[tokens]: ids [B, S] -> [B, S, D]."""
    return table[tokens].astype(dtype)


def project_to_vocabulary(x: jax.Array, table: jax.Array, vocab_size: int, dtype: jnp.dtype, hooks: Hooks) -> jax.Array:
    """x table^T in float32, [..., V]; columns of padding rows are -inf, so they take no probability and no gradient."""
    logits = jnp.einsum("...d,vd->...v", x, table.astype(dtype), preferred_element_type=jnp.float32)
    logits = hooks.constrain(logits, (*("batch", "length")[: x.ndim - 1], "vocab"))
    if vocab_size == table.shape[0]:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocab_size, logits, -jnp.inf)
