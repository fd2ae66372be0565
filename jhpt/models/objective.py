"""The loss of training, summed over predicted tokens.

    loss = sum(nll) + z_loss sum(log(Z)^2)      (z-loss: Chowdhery et al. 2022, arXiv 2204.02311, section 5)

Losses are *sums*, so that those of micro-batches and devices add up to exactly the mean over the whole batch.  Every
row draws its masks and its dropout from its own key.
"""

import jax
import jax.numpy as jnp

from jhpt.models.family import Sums
from jhpt.models.hooks import Hooks
from jhpt.models.vocabulary import token_nll

MASKS, DROPOUT = 0, 1
"""Numbers of the uses of a row's key."""


def summed_loss(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    z_loss: float,
    hooks: Hooks,
    predicts: jax.Array | None = None,
) -> Sums:
    """The sums over targets [B, n], from this shard's columns of the logits [B, n, V].

    weights: of rows, [B].  predicts: [B, n], which targets count; None: all.
    """
    nll, log_z = token_nll(logits, targets, hooks)
    rows = jnp.ones(nll.shape[0], jnp.float32) if weights is None else weights
    weight = jnp.broadcast_to(rows[:, None], nll.shape)
    weight = weight if predicts is None else jnp.where(predicts, weight, 0.0)
    total = jnp.sum(nll * weight)
    loss = total + z_loss * jnp.sum(jnp.square(log_z) * weight) if z_loss else total
    return Sums(loss, total, jnp.sum(weight))
