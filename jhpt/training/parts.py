"""A model and what training minimises, cut into the parts that the runtime executes.

Next-token prediction for GPT, masked-language modelling for BERT:

    loss = sum(nll) + z_loss sum(log(Z)^2)      (z-loss: Chowdhery et al. 2022, arXiv 2204.02311, section 5)

Losses are *sums* over predicted tokens, so that micro-batches and devices add up to exactly the mean over the whole
batch.  Every row draws its masks and its dropout from its own key.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.compression import by_attention, tokens_of
from jhpt.core.config import Compression, DataConfig
from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.token_topk import token_topk
from jhpt.models.bert import BERT
from jhpt.models.build import Model
from jhpt.models.gpt import GPT
from jhpt.models.hooks import Hooks, Settle, same
from jhpt.models.layers import Parted, fold, layer_keys
from jhpt.models.vocabulary import token_nll
from jhpt.sharding import order, tensor
from jhpt.sharding.choice import causal_choice
from jhpt.sharding.compressed import Wire, settle
from jhpt.sharding.parts import Halves, Parts
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
    if shards == 1:
        return Hooks()
    total = partial(tensor.sum_parts, axes)
    return Hooks(
        shards=shards,
        wait=order.wait,
        rank=lambda: jax.lax.axis_index(axes),
        enter=lambda x, tokens=None: tensor.enter(axes, x),
        enter_before=lambda x: (tensor.enter(axes, x), same),
        collect=lambda part, tokens=None: total(part),
        join=partial(tensor.join, axes),
        total=total,
        largest=partial(tensor.largest, axes),
    )


def sequence_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """The same for blocks whose residual stream is cut along the sequence."""
    if shards == 1:
        return Hooks()
    return replace(
        tensor_hooks(axes, shards),
        rows=shards,
        own_rows=partial(tensor.own_rows, axes),
        enter=lambda x, tokens=None: tensor.enter_rows(axes, x),
        enter_before=lambda x: (tensor.enter_rows(axes, x), same),
        collect=lambda part, tokens=None: tensor.sum_rows(axes, part),
    )


def compressed_hooks(
    axes: tuple[str, ...],
    shards: int,
    how: Compression,
    *,
    causal: bool,
    implementation: Implementation = "reference",
) -> Hooks:
    """The same for blocks whose sums are compressed; `important_tokens` says which tokens matter."""
    if shards == 1:
        return Hooks()
    wire = Wire(axes=axes, ranks=shards, how=how, implementation=implementation)
    hooks = replace(
        tensor_hooks(axes, shards),
        enter=wire.enter,
        enter_before=lambda x: (wire.enter(x, None), same),
        collect=lambda part, tokens=None: wire.sum_parts(part, tokens),
    )
    if how.tokens == 1:
        return hooks

    def enter_before(x: jax.Array) -> tuple[jax.Array, Settle]:
        x, ticket = wire.enter_before(x, tokens_of(how, x.shape[1]))
        return x, lambda y, tokens: settle(y, ticket, tokens)

    return replace(
        hooks, important=partial(important_tokens, axes, how, causal, implementation), enter_before=enter_before
    )


def important_tokens(
    axes: tuple[str, ...],
    how: Compression,
    causal: bool,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array | None,
    residual: jax.Array,
) -> jax.Array:
    """Positions [B, k], ascending and the same on all ranks: see `Hooks.important`.

        own         the largest |residual row|, as the tokens come (`sharding.choice`)
        attention   the largest sums over heads and queries of the attention they receive

    The first knows no later token, and all ranks have it already; attention in a causal model looks ahead.
    """
    count = tokens_of(how, q.shape[1])
    if not by_attention(how, causal):
        size = jnp.sum(jnp.square(jax.lax.stop_gradient(residual).astype(jnp.float32)), 2)
        return causal_choice(size, count)
    own = attention_importance(q, k, causal=causal, lengths=lengths, implementation=implementation)
    scores = jax.lax.psum(own, axes)  # ranks own different heads, and have to agree
    return token_topk(scores, count, implementation=implementation)


def with_cut_sequence(ends: Parts, blocks: Parts, axes: tuple[str, ...]) -> Parts:
    """Ends on whole sequences, blocks between them on cut ones."""
    return replace(
        ends,
        entry=lambda params, rows, keys: tensor.cut_rows(axes, ends.entry(params, rows, keys)),
        block=blocks.block,
        halves=blocks.halves,
        exit=lambda params, x, rows, keys: ends.exit(params, tensor.join_rows(axes, x), rows, keys),
    )


def make_parts(model: Model, data: DataConfig, tokenizer: Tokenizer, z_loss: float, *, train: bool) -> Parts:
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
        first=lambda params, x, at, ticket: model.attend(params, x, ticket),
        second=lambda params, parted, at, ticket: model.feed(params, parted, own(at), ticket),
        finish=finish,
    )

    def whole(entry: Any, exit_: Any, reads: tuple[str, ...]) -> Parts:
        return Parts(
            entry=entry,
            block=halves.block,
            halves=halves,
            exit=exit_,
            entry_reads=("embedding",),
            exit_reads=reads,
        )

    if isinstance(model, GPT):

        def entry(ends: Any, rows: Rows, keys: jax.Array) -> jax.Array:
            return model.embed(ends, rows.windows[:, :-1], noise(keys))

        def exit_(ends: Any, x: jax.Array, rows: Rows, keys: jax.Array) -> Sums:
            return _sums(model.logits(ends, x), rows.windows[:, 1:], rows.weights, z_loss, model.hooks)

        reads = ("head", *(("embedding/tokens",) if model.config.tied else ()))
        return whole(entry, exit_, reads)

    def masked(rows: Rows, keys: jax.Array) -> Masked:
        return mask_tokens(fold(keys, MASKS), rows.windows, data.mask_fraction, tokenizer)

    def encoder_entry(ends: Any, rows: Rows, keys: jax.Array) -> jax.Array:
        return model.embed(ends, masked(rows, keys).tokens, keys=noise(keys))

    def encoder_exit(ends: Any, x: jax.Array, rows: Rows, keys: jax.Array) -> Sums:
        wanted = masked(rows, keys)
        predicted = jnp.take_along_axis(x, wanted.positions[..., None], axis=1)
        return _sums(model.logits(ends, predicted), wanted.targets, rows.weights, z_loss, model.hooks)

    assert isinstance(model, BERT)
    return whole(encoder_entry, encoder_exit, ("head", "embedding/tokens"))


def _sums(logits: jax.Array, targets: jax.Array, weights: jax.Array | None, z_loss: float, hooks: Hooks) -> Sums:
    nll, log_z = token_nll(logits, targets, hooks)
    rows = jnp.ones(nll.shape[0], jnp.float32) if weights is None else weights
    weight = jnp.broadcast_to(rows[:, None], nll.shape)
    total = jnp.sum(nll * weight)
    loss = total + z_loss * jnp.sum(jnp.square(log_z) * weight) if z_loss else total
    return Sums(loss, total, jnp.sum(weight))
