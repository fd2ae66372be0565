"""BERT: a bidirectional encoder with normalisation after each half block (Devlin et al. 2018, arXiv 1810.04805).

    x = norm(tokens + positions + types);   L times: x = norm(x + attention(x)); x = norm(x + mlp(x))
    masked-LM logits = norm(gelu(x W + b)) E^T + c
    pooled = tanh(x[first] W + b);   logits of classes = dropout(pooled) W + b;   logits of pairs = pooled W + b

Dropout acts on the embedding and on both half blocks, not on attention probabilities: fused kernels do not offer it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.core.families.bert import BERTConfig
from jhpt.models.activations import gelu_exact
from jhpt.models.attention import Implementation
from jhpt.models.context import WHOLE, Context, document_positions, text_lengths
from jhpt.models.family import Objective, PartitionRules, Rows, Sums
from jhpt.models.hooks import Hooks
from jhpt.models.labelled import labelled
from jhpt.models.layers import (
    INIT_STD,
    AttentionHalf,
    Linear,
    Parted,
    apply,
    collected,
    dropout,
    fold,
    layer_keys,
    norm,
    scan_layers,
    transformer_mlp,
)
from jhpt.models.masking import Masked, mask_tokens
from jhpt.models.objective import DROPOUT, MASKS, summed_loss
from jhpt.models.repeated import looked_up, plus
from jhpt.models.vocabulary import embed, project_to_vocabulary


class BERTEmbedding(nn.Module):
    """Token ids [B, S] -> x[B, S, D]."""

    config: BERTConfig
    dtype: Any
    hooks: Hooks

    @nn.compact
    def __call__(self, tokens: jax.Array, context: Context) -> jax.Array:
        config, types = self.config, context.types
        normal = nn.initializers.normal(INIT_STD)
        table = self.param("tokens", normal, (config.padded_vocab // self.hooks.shards, config.d_model))
        x = embed(table, tokens, self.dtype, self.hooks)
        positions = self.param("positions", normal, (config.max_length, config.d_model))
        if context.documents is None:
            x = plus(x, positions[: tokens.shape[1]].astype(self.dtype))
        else:
            x = x + looked_up(positions.astype(self.dtype), document_positions(context.documents))
        table = self.param("types", normal, (config.type_vocab_size, config.d_model))
        x = x + looked_up(table.astype(self.dtype), jnp.zeros_like(tokens) if types is None else types)
        return norm("layernorm", config.norm_eps, self.dtype, "norm", self.hooks)(x)


class NormParameters(nn.Module):
    """The parameters of a LayerNorm over D features: {"scale": [D], "bias": [D]}."""

    features: int

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        return {
            "scale": self.param("scale", ones, (self.features,)),
            "bias": self.param("bias", zeros, (self.features,)),
        }


class Attention(nn.Module):
    """x, this shard's part of attention(x), and the parameters of the norm that follows their sum."""

    config: BERTConfig
    dtype: Any
    hooks: Hooks
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, ordering_token: jax.Array | None) -> Parted:
        x = checkpoint_name(x, "residual_in")
        half = AttentionHalf(self.config, self.dtype, self.hooks, self.implementation, INIT_STD, name="attention")
        part, bias, tokens = half(x, x, None, context, ordering_token)
        return Parted(x, part, tokens, bias, NormParameters(self.config.d_model, name="attention_norm")())


class FeedForward(nn.Module):
    """x, this shard's part of mlp(x), and the parameters of the norm that follows their sum."""

    config: BERTConfig
    dtype: Any
    hooks: Hooks

    @nn.compact
    def __call__(self, x: jax.Array, tokens: jax.Array | None, ordering_token: jax.Array | None) -> Parted:
        part, bias = transformer_mlp(self.config, self.dtype, self.hooks, INIT_STD)(x, tokens, ordering_token)
        return Parted(x, part, tokens, bias, NormParameters(self.config.d_model, name="mlp_norm")())


class MaskedLMHead(nn.Module):
    """x[..., D] -> logits[..., V] in float32 over the embedding table."""

    config: BERTConfig
    dtype: Any
    hooks: Hooks

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        config = self.config
        x = gelu_exact(Linear((config.d_model,), self.dtype, name="transform")(x))
        x = norm("layernorm", config.norm_eps, self.dtype, "norm", self.hooks)(x)
        bias = self.param("bias", nn.initializers.zeros, (config.padded_vocab // self.hooks.shards,))
        logits = project_to_vocabulary(x, table, config.vocab, self.dtype, self.hooks)
        return logits + jnp.broadcast_to(bias, logits.shape)


@dataclass(frozen=True, kw_only=True)
class BERT:
    """The model as pure functions over `{"embedding": ..., "blocks": [L, ...], "head": ..., "pooler": ...}`.

    The head is that of masked-LM, with `{"pair": ...}` where it predicts pairs too, or `{"classifier": ...}`.
    """

    config: BERTConfig
    dtype: Any = jnp.float32
    implementation: Implementation = "xla"
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def _embedding(self) -> BERTEmbedding:
        return BERTEmbedding(self.config, self.dtype, self.hooks)

    @property
    def _attention(self) -> Attention:
        return Attention(self.config, self.dtype, self.hooks, self.implementation)

    @property
    def _feed_forward(self) -> FeedForward:
        return FeedForward(self.config, self.dtype, self.hooks)

    @property
    def _head(self) -> MaskedLMHead:
        return MaskedLMHead(self.config, self.dtype, self.hooks)

    @property
    def _pooler(self) -> Linear:
        return Linear((self.config.d_model,), self.dtype)

    @property
    def _classifier(self) -> Linear:
        return Linear((self.config.classes,), self.dtype)

    @property
    def _pair(self) -> Linear:
        return Linear((2,), self.dtype)

    @property
    def head_reads(self) -> tuple[str, ...]:
        """The head's parameters, the embedding's table (masked-LM) and the pooler (classes, pairs)."""
        if self.config.classifies:
            return ("head", "pooler")
        return ("head", "embedding/tokens", "pooler") if self.config.pairs else ("head", "embedding/tokens")

    @property
    def partition_rules(self) -> PartitionRules:
        """Empty, because all parameters are those of shared layers."""
        return ()

    def _masked(self, rows: Rows, keys: jax.Array, objective: Objective) -> Masked:
        last, windows, second = objective.padded_after, rows.windows, None
        if self.config.pairs:
            pairs = labelled(windows)
            windows, second = pairs.tokens, pairs.second
        lengths = None if last is None else text_lengths(windows, last)
        fraction, tokens = objective.mask_fraction, objective.tokens
        return mask_tokens(fold(keys, MASKS), windows, fraction, tokens, lengths, objective.continues, second)

    def inputs(self, rows: Rows, keys: jax.Array, objective: Objective) -> jax.Array:
        """The windows, some of whose tokens are masked; of texts with labels the tokens."""
        if self.config.classifies:
            return labelled(rows.windows).tokens
        return self._masked(rows, keys, objective).tokens

    def loss(self, params: Any, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Sums:
        """Masked-language modelling: the masked positions predict their original tokens; or the classes of rows.

        Of pairs, the loss is the mean over predicted tokens plus the mean over rows (Devlin et al. 2018, appendix A.2).
        `Sums` are divided by the number of tokens, so a row counts as often as the n tokens that it predicts, the same
        n for all rows:  (sum(nll of tokens) + n sum(nll of rows)) / (n rows).  `nll` is that of tokens alone.
        """
        if self.config.classifies:
            return self._class_loss(params, x, rows, keys, objective)
        masked = self._masked(rows, keys, objective)
        predicted = jnp.take_along_axis(x, masked.positions[..., None], axis=1)
        logits, z_loss = self.logits(params, predicted), objective.z_loss
        sums = summed_loss(logits, masked.targets, rows.weights, z_loss, self.hooks, masked.predicts)
        if not self.config.pairs:
            return sums
        pairs, each = _row_sums(self.pair_logits(params, x), rows, z_loss), masked.positions.shape[1]
        assert pairs.correct is not None
        return sums._replace(loss=sums.loss + each * pairs.loss, correct=each * pairs.correct)

    def _class_loss(self, params: Any, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Sums:
        noise = layer_keys(fold(keys, DROPOUT), self.config.num_layers) if objective.drops else None
        return _row_sums(self.logits(params, x, noise), rows, objective.z_loss)

    def init(self, key: jax.Array) -> Any:
        """Fresh float32 parameters."""
        blocks = jax.vmap(partial(self.init_block, key))(jnp.arange(self.config.num_layers))
        return {**self.init_embedding_and_head(key), "blocks": blocks}

    def init_embedding_and_head(self, key: jax.Array) -> Any:
        """The parameters of embedding, head and pooler."""
        first, _, last, pooler = jax.random.split(key, 4)
        embedding = self._embedding.init(first, jnp.zeros((1, 1), jnp.int32), WHOLE)["params"]
        if self.config.classifies:
            head = {"classifier": self._classifier.init(last, self._one_token)["params"]}
        else:
            head = self._head.init(last, self._one_token, embedding["tokens"])["params"]
        if self.config.pairs:
            head["pair"] = self._pair.init(jax.random.fold_in(last, 1), self._one_token)["params"]
        return {
            "embedding": embedding,
            "head": head,
            "pooler": self._pooler.init(pooler, self._one_token)["params"],
        }

    def init_block(self, key: jax.Array, layer: Any) -> Any:
        """The parameters of one block."""
        block_key = jax.random.split(jax.random.split(key, 4)[1], self.config.num_layers)[layer]
        attention = self._attention.init(block_key, self._one_token, WHOLE, None)["params"]
        return attention | self._feed_forward.init(block_key, self._one_token, None, None)["params"]

    @property
    def _one_token(self) -> jax.Array:
        return jnp.zeros((1, 1, self.config.d_model), self.dtype)

    def embed(
        self,
        params: Any,
        tokens: jax.Array,
        *,
        keys: jax.Array | None = None,
        context: Context = WHOLE,
    ) -> jax.Array:
        """tokens[B, S] -> x[B, S, D]."""
        x = apply(self._embedding, params["embedding"], tokens, context)
        return dropout(x, self.config.dropout, keys, 0, self.hooks)

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
        return apply(self._attention, layer_params, x, context, ordering_token)

    def feed(
        self, layer_params: Any, parted: Parted, keys: jax.Array | None = None, ordering_token: jax.Array | None = None
    ) -> Parted:
        """From the first all-reduce up to the second."""
        x = collected(parted, self.config.dropout, keys, 0, self.hooks, "projection_out")
        return apply(self._feed_forward, layer_params, self._normed(x, parted), parted.tokens, ordering_token)

    def finish(self, parted: Parted, keys: jax.Array | None = None) -> jax.Array:
        """The rest of the block."""
        return self._normed(collected(parted, self.config.dropout, keys, 1, self.hooks, "mlp_out"), parted)

    def _normed(self, x: jax.Array, parted: Parted) -> jax.Array:
        return apply(norm("layernorm", self.config.norm_eps, self.dtype, "norm", self.hooks), parted.norm, x)

    def encode(
        self,
        params: Any,
        tokens: jax.Array,
        *,
        context: Context = WHOLE,
        keys: jax.Array | None = None,
    ) -> jax.Array:
        """tokens[B, S] -> x[B, S, D] after the last layer; a key for every row switches dropout on."""
        x = self.embed(params, tokens, keys=keys, context=context)
        return scan_layers(partial(self.block, context=context), params["blocks"], x, keys)

    def logits(self, params: Any, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Masked-LM logits of x[..., D] -> [..., V], float32; columns beyond the vocabulary are -inf.  A classifier's
        are x[B, S, D] -> [B, C]; a key for every row switches its dropout on."""
        if self.config.classifies:
            pooled = dropout(self.pool(params, x)[:, None], self.config.dropout, keys, 0, self.hooks)[:, 0]
            return apply(self._classifier, params["head"]["classifier"], pooled).astype(jnp.float32)
        return apply(self._head, params["head"], x, params["embedding"]["tokens"])

    def pool(self, params: Any, x: jax.Array) -> jax.Array:
        """tanh(x[first] W + b): x[B, S, D] -> [B, D], the vector that a classifier reads."""
        return jnp.tanh(apply(self._pooler, params["pooler"], x[:, 0]))

    def pair_logits(self, params: Any, x: jax.Array) -> jax.Array:
        """x[B, S, D] -> [B, 2], float32: the second text of a row follows the first, or it does not."""
        return apply(self._pair, params["head"]["pair"], self.pool(params, x)).astype(jnp.float32)

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        *,
        context: Context = WHOLE,
        keys: jax.Array | None = None,
    ) -> jax.Array:
        """tokens[B, S] -> masked-LM logits[B, S, V], or those of classes [B, C]."""
        return self.logits(params, self.encode(params, tokens, context=context, keys=keys))


def _row_sums(logits: jax.Array, rows: Rows, z_loss: float) -> Sums:
    """The sums over the labels of rows, from logits [B, C]."""
    labels = labelled(rows.windows).labels
    sums = summed_loss(logits[:, None], labels[:, None], rows.weights, z_loss, Hooks())
    weights = jnp.ones(len(labels), jnp.float32) if rows.weights is None else rows.weights
    return sums._replace(correct=jnp.sum(jnp.where(jnp.argmax(logits, -1) == labels, weights, 0.0)))


MODEL = BERT
"""The functions of the family, which `jhpt.models.family.build` registers."""
