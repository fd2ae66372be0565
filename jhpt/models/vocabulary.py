"""From token ids into the residual stream and back, over a table of padded rows [V, D].

A shard of the tensor axis holds V / shards neighbouring rows, and so the same columns of the logits.
"""

import jax
import jax.numpy as jnp

from jhpt.models.hooks import Hooks
from jhpt.models.repeated import looked_up


def embed(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype, hooks: Hooks) -> jax.Array:
    """table[tokens]: ids [B, S] -> [B, S, D]; a shard looks up the ids of its rows, and the shards' results are
    added."""
    if hooks.shards == 1:
        return looked_up(table.astype(dtype), tokens)
    rows = table.shape[0]
    local = tokens - hooks.rank() * rows
    in_shard = (local >= 0) & (local < rows)
    values = looked_up(table.astype(dtype), jnp.clip(local, 0, rows - 1))
    return hooks.total(jnp.where(in_shard[..., None], values, jnp.zeros((), dtype)))


def project_to_vocabulary(x: jax.Array, table: jax.Array, vocab_size: int, dtype: jnp.dtype, hooks: Hooks) -> jax.Array:
    """x table^T in float32, [..., V]; columns of padding rows are -inf, so they take no probability and no gradient."""
    logits = _product(hooks.copy_to_tensor_axis(x), table.astype(dtype))
    if vocab_size == table.shape[0] * hooks.shards:
        return logits
    return jnp.where(columns(logits, hooks) < vocab_size, logits, -jnp.inf)


def columns(logits: jax.Array, hooks: Hooks) -> jax.Array:
    """The token id of every entry of this shard's logits[..., V / shards]."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return column if hooks.shards == 1 else column + hooks.rank() * logits.shape[-1]


def token_nll(logits: jax.Array, targets: jax.Array, hooks: Hooks | None = None) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), log Z) per token, each [...], from this shard's float32 logits[..., V / shards].

    The target's logit is selected by comparison, not by a gather, because any shard may have it.
    """
    hooks = hooks or Hooks()
    high = jax.lax.stop_gradient(hooks.largest(jnp.max(logits, axis=-1)))
    log_z = high + jnp.log(hooks.total(jnp.sum(jnp.exp(logits - high[..., None]), axis=-1)))
    chosen = columns(logits, hooks) == targets[..., None]
    return log_z - hooks.total(jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)), log_z


@jax.custom_vjp
def _product(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[..., D] table[V, D]^T -> [..., V], accumulated and returned in float32.

    The backward pass rounds the incoming gradient to the compute dtype first.  With autodiff both of its products would
    run in float32, at half the rate or less, over a float32 copy of the logits' gradient.
    """
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)


def _product_forward(x: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, table), (x, table)


def _product_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    gradient = gradient.astype(x.dtype)
    return jnp.einsum("...v,vd->...d", gradient, table), jnp.einsum("...v,...d->vd", gradient, x)


_product.defvjp(_product_forward, _product_backward)
