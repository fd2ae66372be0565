"""A model and its objective, cut into the parts that the runtime executes (`jhpt.models.family.Model`)."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.compression import by_attention, tokens_of
from jhpt.core.config import Compression, DataConfig
from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.token_topk import token_topk
from jhpt.models.family import Model, Objective
from jhpt.models.hooks import Hooks, Settle, same
from jhpt.models.layers import Parted, fold, layer_keys
from jhpt.models.objective import DROPOUT
from jhpt.sharding import ordering, tensor
from jhpt.sharding.compression.all_reduce import CompressedAllReduce, settle
from jhpt.sharding.compression.token_choice import causal_choice
from jhpt.sharding.model_parts import Halves, Parts
from jhpt.training.data.tokenizer import Tokenizer


def tensor_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """A model's view from one rank of these mesh axes."""
    if shards == 1:
        return Hooks()
    total = partial(tensor.reduce_over_tensor_axis, axes)
    return Hooks(
        shards=shards,
        depend_on=ordering.depend_on,
        rank=lambda: jax.lax.axis_index(axes),
        copy_to_tensor_axis=lambda x, tokens=None: tensor.copy_to_tensor_axis(axes, x),
        enter_before=lambda x: (tensor.copy_to_tensor_axis(axes, x), same),
        reduce_over_tensor_axis=lambda part, tokens=None: total(part),
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
        copy_to_tensor_axis=lambda x, tokens=None: tensor.all_gather_rows(axes, x),
        enter_before=lambda x: (tensor.all_gather_rows(axes, x), same),
        reduce_over_tensor_axis=lambda part, tokens=None: tensor.reduce_scatter_rows(axes, part),
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
    compressed = CompressedAllReduce(axes=axes, ranks=shards, how=how, implementation=implementation)
    hooks = replace(
        tensor_hooks(axes, shards),
        copy_to_tensor_axis=compressed.copy_to_tensor_axis,
        enter_before=lambda x: (compressed.copy_to_tensor_axis(x, None), same),
        reduce_over_tensor_axis=lambda part, tokens=None: compressed.reduce_over_tensor_axis(part, tokens),
    )
    if how.tokens == 1:
        return hooks

    def enter_before(x: jax.Array) -> tuple[jax.Array, Settle]:
        x, ordering_token = compressed.enter_before(x, tokens_of(how, x.shape[1]))
        return x, lambda y, tokens: settle(y, ordering_token, tokens)

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


def with_cut_sequence(embedding_and_head: Parts, blocks: Parts, axes: tuple[str, ...]) -> Parts:
    """Ends on whole sequences, blocks between them on cut ones."""
    return replace(
        embedding_and_head,
        entry=lambda params, rows, keys: tensor.split_rows(axes, embedding_and_head.entry(params, rows, keys)),
        block=blocks.block,
        halves=blocks.halves,
        exit=lambda params, x, rows, keys: embedding_and_head.exit(params, tensor.join_rows(axes, x), rows, keys),
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
        first=lambda params, x, at, ordering_token: model.attend(params, x, ordering_token),
        second=lambda params, parted, at, ordering_token: model.feed(params, parted, own(at), ordering_token),
        finish=finish,
    )

    objective = Objective(z_loss=z_loss, mask_fraction=data.mask_fraction, tokens=tokenizer)
    return Parts(
        entry=lambda params, rows, keys: model.embed(params, model.inputs(rows, keys, objective), keys=noise(keys)),
        block=halves.block,
        halves=halves,
        exit=lambda params, x, rows, keys: model.loss(params, x, rows, keys, objective),
        entry_reads=("embedding",),
        exit_reads=model.head_reads,
    )
