"""GPT: a causal decoder with normalisation before each half block.

    x = tokens + positions;   L times: x += attention(norm(x)); x += mlp(norm(x));   logits = norm(x) E^T

GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023, arXiv 2302.13971) are settings of it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.core.families.gpt import GPTConfig
from jhpt.models.attention import Implementation
from jhpt.models.context import WHOLE, Context, document_positions
from jhpt.models.family import Objective, PartitionRules, Rows, Sums
from jhpt.models.hooks import Hooks
from jhpt.models.layers import (
    INIT_STD,
    AttentionHalf,
    Mix,
    Parted,
    Rotation,
    Stretch,
    apply,
    collected,
    dropout,
    norm,
    rotation_of,
    rotation_table,
    scan_layers,
    transformer_mlp,
)
from jhpt.models.objective import summed_loss
from jhpt.models.repeated import looked_up, plus
from jhpt.models.vocabulary import embed, project_to_vocabulary


def residual_std(config: GPTConfig) -> float:
    """The standard deviation of matrices whose products are added to the residual stream: GPT-2 scales it by
    1 / sqrt(2 L)."""
    return INIT_STD / (2 * config.num_layers) ** 0.5


class GPTEmbedding(nn.Module):
    """Token ids [B, S] -> x[B, S, D].  at: their positions [B, S]; None: 0 to S - 1."""

    config: GPTConfig
    dtype: Any
    hooks: Hooks

    @nn.compact
    def __call__(self, tokens: jax.Array, at: jax.Array | None) -> jax.Array:
        config = self.config
        normal = nn.initializers.normal(INIT_STD)
        table = self.param("tokens", normal, (config.padded_vocab // self.hooks.shards, config.d_model))
        x = embed(table, tokens, self.dtype, self.hooks)
        if config.positions == "learned":
            positions = self.param("positions", normal, (config.max_length, config.d_model))
            if at is None:
                return plus(x, positions[: tokens.shape[1]].astype(self.dtype))
            x = x + looked_up(positions.astype(self.dtype), at)
        return x


class Attention(nn.Module):
    """x, and this shard's part of attention(norm(x))."""

    config: GPTConfig
    dtype: Any
    hooks: Hooks
    implementation: Implementation
    mix: Mix | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, rotation: Rotation | None, context: Context, ordering_token: jax.Array | None
    ) -> Parted:
        x = checkpoint_name(x, "residual_in")
        h = norm(self.config.norm, self.config.norm_eps, self.dtype, "attention_norm", self.hooks)(x)
        std = residual_std(self.config)
        half = AttentionHalf(self.config, self.dtype, self.hooks, self.implementation, std, self.mix, name="attention")
        part, bias, tokens = half(h, x, rotation, context, ordering_token)
        return Parted(x, part, tokens, bias)


class FeedForward(nn.Module):
    """x, and this shard's part of mlp(norm(x))."""

    config: GPTConfig
    dtype: Any
    hooks: Hooks

    @nn.compact
    def __call__(self, x: jax.Array, tokens: jax.Array | None, ordering_token: jax.Array | None) -> Parted:
        h = norm(self.config.norm, self.config.norm_eps, self.dtype, "mlp_norm", self.hooks)(x)
        part, bias = transformer_mlp(self.config, self.dtype, self.hooks, residual_std(self.config))(
            h, tokens, ordering_token
        )
        return Parted(x, part, tokens, bias)


class GPTHead(nn.Module):
    """x[B, S, D] -> logits[B, S, V], of dtype `stored`; `table` is the embedding's where the head is tied."""

    config: GPTConfig
    dtype: Any
    hooks: Hooks
    stored: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array | None) -> jax.Array:
        config = self.config
        x = norm(config.norm, config.norm_eps, self.dtype, "norm", self.hooks)(x)
        if table is None:
            rows = config.padded_vocab // self.hooks.shards
            table = self.param("tokens", nn.initializers.normal(INIT_STD), (rows, config.d_model))
        return project_to_vocabulary(x, table, config.vocab, self.dtype, self.hooks, self.stored)


@dataclass(frozen=True, kw_only=True)
class GPT:
    """The model as pure functions over `{"embedding": ..., "blocks": [L, ...], "head": ...}`."""

    config: GPTConfig
    dtype: Any = jnp.float32
    implementation: Implementation = "xla"
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def _embedding(self) -> GPTEmbedding:
        return GPTEmbedding(self.config, self.dtype, self.hooks)

    @property
    def _attention(self) -> Attention:
        return Attention(self.config, self.dtype, self.hooks, self.implementation)

    @property
    def _feed_forward(self) -> FeedForward:
        return FeedForward(self.config, self.dtype, self.hooks)

    @property
    def _head(self) -> GPTHead:
        return GPTHead(self.config, self.dtype, self.hooks)

    def _rotation(self, length: int, context: Context) -> Rotation | None:
        config = self.config
        if config.positions == "learned":
            return None
        stretch = Stretch(config.rope_factor, config.rope_stretched, config.rope_kept, config.rope_length)
        stretched = stretch if config.rope_factor > 1 else None
        return rotation_of(rotation_table(length, config.head_dim, config.rope_theta, stretched), context)

    def _table(self, params: Any) -> jax.Array | None:
        return params["embedding"]["tokens"] if self.config.tied else None

    @property
    def head_reads(self) -> tuple[str, ...]:
        """The head's parameters, and the embedding's table where it is tied."""
        return ("head", *(("embedding/tokens",) if self.config.tied else ()))

    @property
    def partition_rules(self) -> PartitionRules:
        """Empty, because all parameters are those of shared layers."""
        return ()

    def inputs(self, rows: Rows, keys: jax.Array, objective: Objective) -> jax.Array:
        """All but the last token of every window."""
        return rows.windows[:, :-1]

    def loss(self, params: Any, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Sums:
        """Next-token prediction: every position predicts the token after it, the last one of a document nothing, nor
        does padding, which repeats it."""
        last = objective.padded_after if objective.end is None else objective.end
        predicts = None if last is None else rows.windows[:, :-1] != last
        head = self._head if self.config.logits_dtype == "float32" else self._head.clone(stored=self.dtype)
        logits = apply(head, params["head"], x, self._table(params))
        return summed_loss(logits, rows.windows[:, 1:], rows.weights, objective.z_loss, self.hooks, predicts)

    def init(self, key: jax.Array) -> Any:
        """Fresh float32 parameters."""
        blocks = jax.vmap(partial(self.init_block, key))(jnp.arange(self.config.num_layers))
        return {**self.init_embedding_and_head(key), "blocks": blocks}

    def init_embedding_and_head(self, key: jax.Array) -> Any:
        """The parameters of embedding and head."""
        first, _, last = jax.random.split(key, 3)
        embedding = self._embedding.init(first, jnp.zeros((1, 1), jnp.int32), None)["params"]
        head = self._head.init(last, self._one_token, self._table({"embedding": embedding}))["params"]
        return {"embedding": embedding, "head": head}

    def init_block(self, key: jax.Array, layer: Any) -> Any:
        """The parameters of one block."""
        block_key = jax.random.split(jax.random.split(key, 3)[1], self.config.num_layers)[layer]
        attention = self._attention.init(block_key, self._one_token, self._rotation(1, WHOLE), WHOLE, None)["params"]
        return attention | self._feed_forward.init(block_key, self._one_token, None, None)["params"]

    @property
    def _one_token(self) -> jax.Array:
        return jnp.zeros((1, 1, self.config.d_model), self.dtype)

    def embed(
        self, params: Any, tokens: jax.Array, keys: jax.Array | None = None, context: Context = WHOLE
    ) -> jax.Array:
        """tokens[B, S] -> x[B, S, D]; positions restart with each document."""
        at = None if context.documents is None else document_positions(context.documents)
        x = apply(self._embedding, params["embedding"], tokens, at)
        return dropout(x, self.config.dropout, keys, 0, self.hooks)

    def embed_at(self, params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens[B, S] at `positions` [B, S] -> x[B, S, D]."""
        return apply(self._embedding, params["embedding"], tokens, positions)

    def block_at(self, layer_params: Any, x: jax.Array, positions: jax.Array, mix: Mix) -> jax.Array:
        """One layer on x[B, S, D] at `positions` [B, S], with `mix` as its attention (`jhpt.models.decoding`)."""
        whole = self._rotation(self.config.max_length, WHOLE)
        rotation = None if whole is None else (whole[0][positions], whole[1][positions])
        attention = self._attention.clone(mix=mix)
        return self.finish(self.feed(layer_params, apply(attention, layer_params, x, rotation, WHOLE, None)))

    def block(
        self, layer_params: Any, x: jax.Array, keys: jax.Array | None = None, context: Context = WHOLE
    ) -> jax.Array:
        """One layer: x[B, S, D] -> x[B, S, D]."""
        return self.finish(self.feed(layer_params, self.attend(layer_params, x, context), keys), keys)

    # A block, cut before each of its all-reduces over the tensor axis (`jhpt.models.family.Model`).

    def attend(
        self, layer_params: Any, x: jax.Array, context: Context = WHOLE, ordering_token: jax.Array | None = None
    ) -> Parted:
        """Up to the first all-reduce."""
        rotation = self._rotation(x.shape[1] * self.hooks.rows, context)
        return apply(self._attention, layer_params, x, rotation, context, ordering_token)

    def feed(
        self, layer_params: Any, parted: Parted, keys: jax.Array | None = None, ordering_token: jax.Array | None = None
    ) -> Parted:
        """From the first all-reduce up to the second."""
        x = collected(parted, self.config.dropout, keys, 0, self.hooks, "projection_out")
        return apply(self._feed_forward, layer_params, x, parted.tokens, ordering_token)

    def finish(self, parted: Parted, keys: jax.Array | None = None) -> jax.Array:
        """The rest of the block."""
        return collected(parted, self.config.dropout, keys, 1, self.hooks, "mlp_out")

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        """x[B, S, D] -> logits[B, S, V], float32; columns beyond the vocabulary are -inf."""
        return apply(self._head, params["head"], x, self._table(params))

    def apply(
        self, params: Any, tokens: jax.Array, *, keys: jax.Array | None = None, context: Context = WHOLE
    ) -> jax.Array:
        """tokens[B, S] -> logits[B, S, V]; a key for every row switches dropout on."""
        x = self.embed(params, tokens, keys, context)
        return self.logits(params, scan_layers(partial(self.block, context=context), params["blocks"], x, keys))


MODEL = GPT
"""The functions of the family, which `jhpt.models.family.build` registers."""
