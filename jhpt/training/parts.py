"""A model and what training minimises, cut into the parts that the runtime executes.

Next-token prediction for GPT, masked-language modelling for BERT:

    loss = sum(nll) + z_loss sum(log(Z)^2)      (z-loss: Chowdhery et al. 2022, arXiv 2204.02311, section 5)

Losses are *sums* over predicted tokens, so that micro-batches and devices add up to exactly the mean over the whole
batch.  Every row draws its masks and its dropout from its own key.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.config import Compression, DataConfig
from jhpt.kernels.implementation import Implementation
from jhpt.models.bert import BERT
from jhpt.models.build import Model
from jhpt.models.gpt import GPT
from jhpt.models.hooks import Hooks
from jhpt.models.layers import Parted, fold, layer_keys
from jhpt.models.vocabulary import token_nll
from jhpt.sharding import operators
from jhpt.sharding.model_parts import Halves, ModelParts
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.masking import Masked, mask_tokens

MASKS, DROPOUT = 0, 1
"""What a row's key is used for."""


class Sums(NamedTuple):
    """Sums over predicted tokens.  loss: what is minimised; nll: negative log likelihood in nats; tokens: how many."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array


class Rows(NamedTuple):
    """Rows of a batch: windows [B, W] of token ids and, for rows that count less, weights [B]."""

    windows: jax.Array
    weights: jax.Array | None = None


def tensor_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """A model's view from one rank of these mesh axes."""
    return Hooks() if shards == 1 else replace(Hooks(shards=shards), **operators.tensor_operators(axes))


def sequence_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """The same for blocks whose activations are cut along the sequence."""
    if shards == 1:
        return Hooks()
    return replace(Hooks(shards=shards, rows=shards), **operators.sequence_operators(axes))


def compressed_hooks(
    axes: tuple[str, ...],
    shards: int,
    how: Compression,
    *,
    causal: bool,
    implementation: Implementation = "reference",
) -> Hooks:
    """The same for blocks whose all-reduces are compressed."""
    if shards == 1:
        return Hooks()
    compressed = operators.compressed_operators(axes, shards, how, causal=causal, implementation=implementation)
    return replace(Hooks(shards=shards), **compressed)


def make_parts(model: Model, data: DataConfig, tokenizer: Tokenizer, z_loss: float, *, train: bool) -> ModelParts:
    """The parts of a model's family; `train` switches dropout on."""
    dropout = train and model.config.dropout > 0

    def noise(keys: jax.Array) -> jax.Array | None:
        return fold(keys, DROPOUT) if dropout else None

    def own(at: tuple[jax.Array, Any]) -> jax.Array | None:
        return layer_keys(noise(at[0]), at[1])

    def finish(parted: Parted, at: tuple[jax.Array, Any]) -> jax.Array:
        tokens = None if parted.tokens is None else parted.tokens.astype(jnp.int32)
        return model.finish(parted._replace(tokens=tokens), own(at))

    halves = Halves(
        first=lambda params, x, at, ordering_token: model.attend(params, x, ordering_token),
        second=lambda params, parted, at, ordering_token: model.feed(params, parted, own(at), ordering_token),
        finish=finish,
    )

    def whole(embed: Any, head_loss: Any, reads: tuple[str, ...]) -> ModelParts:
        return ModelParts(
            embed=embed,
            block=halves.block,
            halves=halves,
            head_loss=head_loss,
            embed_reads=("embedding",),
            head_reads=reads,
        )

    if isinstance(model, GPT):

        def embed(embedding_and_head: Any, rows: Rows, keys: jax.Array) -> jax.Array:
            return model.embed(embedding_and_head, rows.windows[:, :-1], noise(keys))

        def head_loss(embedding_and_head: Any, x: jax.Array, rows: Rows, keys: jax.Array) -> Sums:
            return _sums(model.logits(embedding_and_head, x), rows.windows[:, 1:], rows.weights, z_loss, model.hooks)

        reads = ("head", *(("embedding/tokens",) if model.config.tied else ()))
        return whole(embed, head_loss, reads)

    def masked(rows: Rows, keys: jax.Array) -> Masked:
        return mask_tokens(fold(keys, MASKS), rows.windows, data.mask_fraction, tokenizer)

    def encoder_embed(embedding_and_head: Any, rows: Rows, keys: jax.Array) -> jax.Array:
        return model.embed(embedding_and_head, masked(rows, keys).tokens, keys=noise(keys))

    def encoder_head_loss(embedding_and_head: Any, x: jax.Array, rows: Rows, keys: jax.Array) -> Sums:
        wanted = masked(rows, keys)
        predicted = jnp.take_along_axis(x, wanted.positions[..., None], axis=1)
        return _sums(model.logits(embedding_and_head, predicted), wanted.targets, rows.weights, z_loss, model.hooks)

    assert isinstance(model, BERT)
    return whole(encoder_embed, encoder_head_loss, ("head", "embedding/tokens"))


def _sums(logits: jax.Array, targets: jax.Array, weights: jax.Array | None, z_loss: float, hooks: Hooks) -> Sums:
    nll, log_z = token_nll(logits, targets, hooks)
    rows = jnp.ones(nll.shape[0], jnp.float32) if weights is None else weights
    weight = jnp.broadcast_to(rows[:, None], nll.shape)
    total = jnp.sum(nll * weight)
    loss = total + z_loss * jnp.sum(jnp.square(log_z) * weight) if z_loss else total
    return Sums(loss, total, jnp.sum(weight))
