"""The operators of tensor parallelism for one rank of mesh axes, by the names of a model's hooks.

    plain        all-reduces of activations (`tensor`), Megatron's f and g
    sequence     all-gathers and reduce-scatters of activations that are cut along the sequence
    compressed   all-reduces in low precision, of important tokens (`compression.all_reduce`)

A model never names a mesh: it receives these callables (`jhpt.models.hooks.Hooks`), whose defaults run on one device.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.compression import by_attention, tokens_of
from jhpt.core.config import Compression
from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.token_topk import token_topk
from jhpt.sharding import ordering, tensor
from jhpt.sharding.compression.all_reduce import CompressedAllReduce, settle
from jhpt.sharding.compression.token_choice import causal_choice
from jhpt.sharding.model_parts import ModelParts

Operators = dict[str, Any]
"""Callables by the name of the hook that they fill."""


def tensor_operators(axes: tuple[str, ...]) -> Operators:
    """The operators of layers whose activations are whole on every rank: x[B, S, D] between products, {U_tp} before
    g."""
    total = partial(tensor.reduce_over_tensor_axis, axes)
    return {
        "depend_on": ordering.depend_on,
        "rank": lambda: jax.lax.axis_index(axes),
        "copy_to_tensor_axis": lambda x, tokens=None: tensor.copy_to_tensor_axis(axes, x),
        "copy_before_choice": lambda x: (tensor.copy_to_tensor_axis(axes, x), _unchanged),
        "reduce_over_tensor_axis": lambda part, tokens=None: total(part),
        "join": partial(tensor.gather_columns, axes),
        "total": total,
        "largest": partial(tensor.max_over_tensor_axis, axes),
    }


def sequence_operators(axes: tuple[str, ...]) -> Operators:
    """The operators of layers whose activations are cut along the sequence: x[B, S/tp, D] between products."""
    return tensor_operators(axes) | {
        "own_rows": partial(tensor.own_rows, axes),
        "copy_to_tensor_axis": lambda x, tokens=None: tensor.all_gather_rows(axes, x),
        "copy_before_choice": lambda x: (tensor.all_gather_rows(axes, x), _unchanged),
        "reduce_over_tensor_axis": lambda part, tokens=None: tensor.reduce_scatter_rows(axes, part),
    }


def compressed_operators(
    axes: tuple[str, ...],
    ranks: int,
    compression: Compression,
    *,
    causal: bool,
    implementation: Implementation = "reference",
) -> Operators:
    """The operators of layers whose all-reduces are compressed; `important_tokens` says which tokens matter."""
    compressed = CompressedAllReduce(axes=axes, ranks=ranks, compression=compression, implementation=implementation)
    operators = tensor_operators(axes) | {
        "copy_to_tensor_axis": compressed.copy_to_tensor_axis,
        "copy_before_choice": lambda x: (compressed.copy_to_tensor_axis(x, None), _unchanged),
        "reduce_over_tensor_axis": lambda part, tokens=None: compressed.reduce_over_tensor_axis(part, tokens),
    }
    if compression.tokens == 1:
        return operators

    def copy_before_choice(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array, jax.Array], jax.Array]]:
        x, choice = compressed.copy_before_choice(x, tokens_of(compression, x.shape[1]))
        return x, lambda y, tokens: settle(y, choice, tokens)

    important = partial(important_tokens, axes, compression, causal, implementation)
    return operators | {"important": important, "copy_before_choice": copy_before_choice}


def important_tokens(
    axes: tuple[str, ...],
    compression: Compression,
    causal: bool,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array | None,
    residual: jax.Array,
) -> jax.Array:
    """Positions [B, k] of the important tokens, ascending and the same on all ranks.

        own         the largest |row of the residual stream|, chosen causally (`compression.token_choice`)
        attention   the largest sums over heads and queries of the attention that they receive

    The first does not depend on later tokens, and needs no communication; attention in a causal model looks ahead.

    Args:
      q, k: [B, S, heads, E] of this rank's heads.  lengths: of the samples.  residual: the residual stream [B, S, D].
    """
    count = tokens_of(compression, q.shape[1])
    if not by_attention(compression, causal):
        size = jnp.sum(jnp.square(jax.lax.stop_gradient(residual).astype(jnp.float32)), 2)
        return causal_choice(size, count)
    of_heads = attention_importance(q, k, causal=causal, lengths=lengths, implementation=implementation)
    scores = jax.lax.psum(of_heads, axes)  # ranks have different heads, and all must choose the same tokens
    return token_topk(scores, count, implementation=implementation)


def with_cut_sequence(outer: ModelParts, blocks: ModelParts, axes: tuple[str, ...]) -> ModelParts:
    """The embedding and the head of `outer` on whole sequences, `blocks` between them on cut ones."""
    return replace(
        outer,
        embed=lambda params, batch, context: tensor.split_rows(axes, outer.embed(params, batch, context)),
        block=blocks.block,
        halves=blocks.halves,
        head_loss=lambda params, x, batch, context: outer.head_loss(params, tensor.join_rows(axes, x), batch, context),
    )


def _unchanged(y: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """y itself, whichever tokens matter."""
    return y
