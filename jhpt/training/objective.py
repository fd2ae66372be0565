"""What training minimises: next-token prediction for GPT, masked-language modelling for BERT.

An objective maps one micro-batch to *sums* over predicted tokens, so that micro-batches and devices add up to exactly
the mean over the whole batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.config import DataConfig
from jhpt.models.bert import BERT
from jhpt.models.build import Model
from jhpt.models.gpt import GPT
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.masking import mask_tokens


class Sums(NamedTuple):
    """Sums over predicted tokens.  loss: what is minimised; nll: negative log likelihood in nats; tokens: how many."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array


Objective = Callable[..., Sums]
"""(params, windows [B, *], row weights [B] or None, key, train) -> Sums."""


def token_nll(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), log Z) per token, each [...], from float32 logits[..., V].

    The target's logit is picked by comparison, not by a gather: the vocabulary may be sharded.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return log_z - jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1), log_z


def _sums(logits: jax.Array, targets: jax.Array, weights: jax.Array | None, z_loss: float) -> Sums:
    nll, log_z = token_nll(logits, targets)
    rows = jnp.ones(nll.shape[0], jnp.float32) if weights is None else weights
    weight = jnp.broadcast_to(rows[:, None], nll.shape)
    total = jnp.sum(nll * weight)
    loss = total + z_loss * jnp.sum(jnp.square(log_z) * weight) if z_loss else total
    return Sums(loss, total, jnp.sum(weight))


def make_objective(model: Model, data: DataConfig, tokenizer: Tokenizer, z_loss: float) -> Objective:
    """The objective of a model's family.

    loss = sum(nll) + z_loss sum(log(Z)^2)   (z-loss: Chowdhery et al. 2022, arXiv 2204.02311, section 5)
    """

    def next_token(params: Any, windows: jax.Array, weights: jax.Array | None, key: jax.Array, train: bool) -> Sums:
        assert isinstance(model, GPT)
        logits = model.apply(params, windows[:, :-1], key=key if train and model.config.dropout else None)
        return _sums(logits, windows[:, 1:], weights, z_loss)

    def masked_lm(params: Any, windows: jax.Array, weights: jax.Array | None, key: jax.Array, train: bool) -> Sums:
        assert isinstance(model, BERT)
        mask_key, dropout_key = jax.random.split(key)
        masked = mask_tokens(mask_key, windows, data.mask_fraction, tokenizer)
        x = model.encode(params, masked.tokens, key=dropout_key if train and model.config.dropout else None)
        predicted = jnp.take_along_axis(x, masked.positions[..., None], axis=1)
        return _sums(model.logits(params, predicted), masked.targets, weights, z_loss)

    return next_token if isinstance(model, GPT) else masked_lm
