"""From token ids into the residual stream and back, over a table of padded rows [V, D].

A shard of the tensor axis holds V / shards neighbouring rows, and so the same columns of the logits.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.models.activations import at_least_float32
from jhpt.models.hooks import Hooks
from jhpt.models.repeated import looked_up

STREAMS = 4
"""Parts of a row of logits that are read beside each other."""

LOWEST = np.finfo(np.float32).min
"""The largest of no logits: minus infinity would make the difference of two such numbers NaN."""


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


def project_to_vocabulary(
    x: jax.Array, table: jax.Array, vocab_size: int, dtype: jnp.dtype, hooks: Hooks, stored: Any = jnp.float32
) -> jax.Array:
    """x table^T [..., V], computed in `dtype`, summed in float32 and rounded to `stored`; columns of padding rows are
    -inf, so they take no probability and no gradient."""
    logits = _product(stored, hooks.copy_to_tensor_axis(x), table.astype(dtype))
    if vocab_size == table.shape[0] * hooks.shards:
        return logits
    return jnp.where(columns(logits, hooks) < vocab_size, logits, -jnp.inf)


def columns(logits: jax.Array, hooks: Hooks) -> jax.Array:
    """The token id of every entry of this shard's logits[..., V / shards]."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return column if hooks.shards == 1 else column + hooks.rank() * logits.shape[-1]


def token_nll(logits: jax.Array, targets: jax.Array, hooks: Hooks | None = None) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), log Z) per token, each [...], in float32, from this shard's logits[..., V / shards].

    The target's logit is selected by comparison, not by a gather, because any shard may have it.
    """
    hooks = hooks or Hooks()
    if hooks.alone:
        return _nll_in_one_pass(logits, targets)
    logits = at_least_float32(logits)
    high = jax.lax.stop_gradient(hooks.largest(jnp.max(logits, axis=-1)))
    log_z = high + jnp.log(hooks.total(jnp.sum(jnp.exp(logits - high[..., None]), axis=-1)))
    chosen = columns(logits, hooks) == targets[..., None]
    return log_z - hooks.total(jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)), log_z


@jax.custom_vjp
def _nll_in_one_pass(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`token_nll` of whole rows, which reads the logits once, and once more in the backward pass."""
    return _nll_forward(logits, targets)[0]


def _nll_forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    high, total = _largest_and_sum(at_least_float32(logits))
    log_z = high + jnp.log(total)
    of_target = at_least_float32(jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])
    return (log_z - of_target, log_z), (logits, targets, log_z)


def _nll_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], errors: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    logits, targets, log_z = saved
    of_nll, of_log_z = errors
    chosen = columns(logits, Hooks()) == targets[..., None]
    gradient = jnp.exp(at_least_float32(logits) - log_z[..., None]) * (of_nll + of_log_z)[..., None]
    return (gradient - jnp.where(chosen, of_nll[..., None], 0.0)).astype(logits.dtype), None


_nll_in_one_pass.defvjp(_nll_forward, _nll_backward)


def _largest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """m = max_v logits[..., v] and sum_v exp(logits[..., v] - m), in one pass over the logits.

    Two such pairs are joined into that of both sets (Milakov and Gimelshein 2018, arXiv 1805.02867, section 3.1):

        (m, s), (m', s')  ->  max(m, m'),  s exp(m - max(m, m')) + s' exp(m' - max(m, m'))

    of which one exponential is exp(-|m - m'|) and the other is 1.  A GPU's processors would take longer for a pair of
    every logit than its memory for the logits, so a pair is first made of one logit from each of `STREAMS` parts.
    """
    streams = STREAMS if logits.shape[-1] % STREAMS == 0 else 1
    parts = jnp.split(logits, streams, axis=-1)
    high = jnp.maximum(reduce(jnp.maximum, parts), LOWEST)
    total = sum(jnp.exp(part - high) for part in parts)
    return jax.lax.reduce((high, total), (LOWEST, jnp.float32(0)), _joined, (logits.ndim - 1,))


def _joined(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (high, total), (other_high, other_total) = one, other
    smaller = jnp.exp(-jnp.abs(high - other_high))
    sums = jnp.where(high > other_high, total + other_total * smaller, total * smaller + other_total)
    return jnp.maximum(high, other_high), sums


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(stored: Any, x: jax.Array, table: jax.Array) -> jax.Array:
    """x[..., D] table[V, D]^T -> [..., V], accumulated in float32.

    The backward pass rounds the incoming gradient to the compute dtype first.  With autodiff both of its products would
    run in float32, at half the rate or less, over a float32 copy of the logits' gradient.
    """
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=stored)


def _product_forward(stored: Any, x: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(stored, x, table), (x, table)


def _product_backward(
    stored: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    gradient = gradient.astype(x.dtype)
    return jnp.einsum("...v,vd->...d", gradient, table), jnp.einsum("...v,...d->vd", gradient, x)


_product.defvjp(_product_forward, _product_backward)
