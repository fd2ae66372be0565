"""A model and its objective, cut into the parts that the runtime executes (`jhpt.models.family.Model`)."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.config import Compression, DataConfig
from jhpt.kernels.implementation import Implementation
from jhpt.models.context import Context, document_starts, text_lengths
from jhpt.models.family import Model, Objective, Rows
from jhpt.models.hooks import Hooks
from jhpt.models.labelled import labelled
from jhpt.models.layers import Parted, fold, layer_keys
from jhpt.models.objective import DROPOUT
from jhpt.sharding import operators
from jhpt.sharding.model_parts import Halves, ModelParts
from jhpt.sharding.types import LayerContext, Params
from jhpt.training.data.tokenizer import Tokenizer


def tensor_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """The hooks of a model on one rank of these mesh axes."""
    return Hooks() if shards == 1 else replace(Hooks(shards=shards), **operators.tensor_operators(axes))


def sequence_hooks(axes: tuple[str, ...], shards: int) -> Hooks:
    """As `tensor_hooks`, for blocks whose activations are cut along the sequence."""
    if shards == 1:
        return Hooks()
    return replace(Hooks(shards=shards, rows=shards), **operators.sequence_operators(axes))


def compressed_hooks(
    axes: tuple[str, ...],
    shards: int,
    compression: Compression,
    *,
    causal: bool,
    implementation: Implementation = "reference",
) -> Hooks:
    """As `tensor_hooks`, for blocks whose all-reduces are compressed."""
    if shards == 1:
        return Hooks()
    compressed = operators.compressed_operators(axes, shards, compression, causal=causal, implementation=implementation)
    return replace(Hooks(shards=shards), **compressed)


class KeyedContext(NamedTuple):
    """What parts of a model may read of rows [b]: their random keys, and what the model itself reads."""

    keys: jax.Array
    model: Context = Context()


def make_parts(model: Model, data: DataConfig, tokenizer: Tokenizer, z_loss: float, *, train: bool) -> ModelParts:
    """The parts of a model's family; `train` switches dropout on."""
    dropout = train and model.config.dropout > 0

    def noise(keys: jax.Array) -> jax.Array | None:
        return fold(keys, DROPOUT) if dropout else None

    def keys_of(at: LayerContext) -> jax.Array | None:
        return layer_keys(noise(at[0].keys), at[1])

    def finish(parted: Parted, at: LayerContext) -> jax.Array:
        tokens = None if parted.tokens is None else parted.tokens.astype(jnp.int32)
        return model.finish(parted._replace(tokens=tokens), keys_of(at))

    halves = Halves(
        first=lambda params, x, at, ordering_token: model.attend(params, x, at[0].model, ordering_token),
        second=lambda params, parted, at, ordering_token: model.feed(params, parted, keys_of(at), ordering_token),
        finish=finish,
    )

    end = tokenizer.end if data.packing == "documents" else None
    last = (tokenizer.separator if model.config.masked else tokenizer.end) if data.packing == "pad" else None
    objective = Objective(
        z_loss=z_loss,
        mask_fraction=data.mask_fraction,
        tokens=tokenizer,
        end=end,
        padded_after=last,
        continues=tokenizer.continues if data.whole_words else None,
        drops=dropout,
    )

    def context(rows: Rows, keys: jax.Array) -> KeyedContext:
        if model.config.classifies:
            return KeyedContext(keys, labelled(rows.windows).context)
        if model.config.pairs:  # their rows are full
            return KeyedContext(keys, labelled(rows.windows).context._replace(lengths=None))
        tokens = rows.windows[:, : data.sequence_length]
        if last is not None:
            return KeyedContext(keys, Context(lengths=text_lengths(tokens, last)))
        return KeyedContext(keys, Context(documents=None if end is None else document_starts(tokens, end)))

    def embed(params: Params, rows: Rows, context: KeyedContext) -> jax.Array:
        tokens = model.inputs(rows, context.keys, objective)
        return model.embed(params, tokens, keys=noise(context.keys), context=context.model)

    return ModelParts(
        context=context,
        embed=embed,
        block=halves.block,
        halves=halves,
        head_loss=lambda params, x, rows, context: model.loss(params, x, rows, context.keys, objective),
        embed_reads=("embedding",),
        head_reads=model.head_reads,
        weighted=lambda rows, weights: rows._replace(weights=weights * (1 if rows.weights is None else rows.weights)),
    )
