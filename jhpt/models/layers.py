"""The layers that families share, as Flax modules used through pure `init` and `apply`.

Shapes: B sequences, S positions, D model width, H query heads, K key/value heads, G = H / K, E head width, F MLP width.
Weights, of any dtype, are cast to `dtype` where they are used.  Tensors that recomputation chooses among carry names
(`jax.ad_checkpoint.checkpoint_name`), listed in the family's `named_tensors`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.core.families.transformer import TransformerConfig
from jhpt.core.layers import ACTIVATIONS, NORMS
from jhpt.models.activated import HIDDEN, Kind, activated_product
from jhpt.models.activations import gelu, gelu_exact, swiglu
from jhpt.models.attention import Implementation, attention
from jhpt.models.context import Context, document_positions
from jhpt.models.heads import AttentionInputs
from jhpt.models.hooks import Hooks
from jhpt.models.norms import Norm
from jhpt.models.products import PRODUCTS, Product, plain_product
from jhpt.models.repeated import plus

CHOICE = "important_tokens"
"""The name of the important tokens: a few bytes, whose recomputation would need communication."""

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2 and BERT released code)."""

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines of rotary positions, [S, E / 2] each, or [B, S, E / 2] where rows differ."""


class Stretch(NamedTuple):
    """Llama 3.1's stretching of rotary positions for long sequences (Dubey et al. 2024, arXiv 2407.21783, section 3.2,
    as Meta's released code computes it).  A pair with frequency f turns n = length f / 2 pi times in the sequences of
    the first training:

        f' = f / factor (1 - u) + f u,   u = (n - low) / (high - low) between 0 and 1
    """

    factor: float
    low: float
    high: float
    length: int

    def __call__(self, frequency: jax.Array) -> jax.Array:
        """f [E / 2] -> f'."""
        turns = self.length * frequency / (2 * jnp.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency / self.factor * (1 - kept) + frequency * kept


Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q[B, S, H, E], k[B, S, K, E], v) -> softmax(q k^T / sqrt(E)) v [B, S, H, E], over the keys that a query may see."""


Activation = Callable[[jax.Array], jax.Array]
"""hidden [..., F] -> [..., F]; of an activation of two matrices [..., 2, F] -> [..., F]."""


_ACTIVATIONS: dict[str, Activation] = {"gelu": gelu, "gelu_exact": gelu_exact, "swiglu": swiglu}

_CENTRED = {"layernorm": True, "rmsnorm": False}
"""The norms of `jhpt.models.norms`."""

_NORMS: dict[str, Callable[..., nn.Module]] = {}
"""Registered ones."""


def register_activation(name: str, function: Activation, *, matrices: int = 1) -> None:
    """Registers an activation of the MLP.  matrices: its input matrices, 2 if it is gated.

    Raises:
      ValueError: the name is taken.
    """
    if name in _ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is registered twice; give one of them another name")
    ACTIVATIONS[name], _ACTIVATIONS[name] = matrices, function


def register_norm(name: str, module: Callable[..., nn.Module], *, parameters: int) -> None:
    """Registers a norm.

    Args:
      module: called with `epsilon`, `dtype`, `use_fast_variance` and `name`.
      parameters: how many it has for every number that is normalised, such as 2 for a scale and a bias.

    Raises:
      ValueError: the name is taken, or there is no parameter: the head may consist of its norm alone.
    """
    if name in NORMS:
        raise ValueError(f"the norm {name!r} is registered twice; give one of them another name")
    if parameters < 1:
        raise ValueError(f"the norm {name!r} has no parameter; give it a scale")
    NORMS[name], _NORMS[name] = parameters, module


def norm(kind: str, eps: float, dtype: Any, name: str, hooks: Hooks | None = None) -> nn.Module:
    """A norm over the last dimension; layernorm and rmsnorm have their statistics in float32."""
    if kind in _CENTRED:
        return Norm(eps, dtype, _CENTRED[kind], hooks is not None and hooks.alone, name=name)
    return _NORMS[kind](epsilon=eps, dtype=dtype, use_fast_variance=False, name=name)


def _weights(
    module: nn.Module, width: int, features: tuple[int, ...], dtype: Any, bias: bool, std: float
) -> tuple[jax.Array, jax.Array | None]:
    kernel = module.param("kernel", nn.initializers.normal(std), (width, *features)).astype(dtype)
    return kernel, module.param("bias", nn.initializers.zeros, features).astype(dtype) if bias else None


class Weights(nn.Module):
    """D_in -> (kernel [D_in, *features], bias [*features] or None), of `dtype`.

    std: standard deviation of the kernel's initial numbers.
    """

    features: tuple[int, ...]
    dtype: Any
    bias: bool
    std: float = INIT_STD

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array | None]:
        return _weights(self, width, self.features, self.dtype, self.bias, self.std)


class Linear(nn.Module):
    """x[..., D_in] -> x W + b [..., *features], with an optional bias."""

    features: tuple[int, ...]
    dtype: Any
    bias: bool = True
    product: Product = plain_product

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = _weights(self, x.shape[-1], self.features, self.dtype, self.bias, INIT_STD)
        y = self.product(x, kernel)
        return y if bias is None else plus(y, bias)


class Parted(NamedTuple):
    """The result of half a block up to the all-reduce over the shards.

    x: the residual stream, to which the sum of the parts is added.  part: this shard's part of a product, [B, S, D].
    tokens: the important ones, or None.  bias, norm: parameters of what follows the all-reduce.
    """

    x: jax.Array
    part: jax.Array
    tokens: jax.Array | None
    bias: jax.Array | None
    norm: Any = None


def collected(parted: Parted, rate: float, keys: jax.Array | None, use: int, hooks: Hooks, name: str) -> jax.Array:
    """x + dropout(sum of the parts + bias); recomputation knows sum + bias as `name`."""
    out = hooks.reduce_over_tensor_axis(parted.part, parted.tokens)
    out = checkpoint_name(out if parted.bias is None else plus(out, parted.bias), name)
    return parted.x + dropout(out, rate, keys, use, hooks)


class AttentionHalf(nn.Module):
    """Multi-head attention on a normalised input; qkv is one matrix [D, K, G + 2, E], grouped by key head, so that a
    tensor axis over K does not separate queries from their keys and values.

    residual: the rows of the residual stream that x depends on.  ordering_token: the half waits for it
    (`hooks.depend_on`).  Returns (part of the result, its bias, the important tokens: `hooks.important`).
    """

    config: TransformerConfig
    dtype: Any
    hooks: Hooks
    implementation: Implementation
    std: float
    """Standard deviation of the projection's initial weights."""
    mix: Mix | None = None
    """Takes the place of attention among the tokens of x, for `jhpt.models.decoding`."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array,
        rotation: Rotation | None,
        context: Context,
        ordering_token: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        config = self.config
        heads, kv_heads = config.num_heads // self.hooks.shards, config.kv_heads // self.hooks.shards
        group, width = heads // kv_heads, config.head_dim
        product = PRODUCTS[config.matmul_dtype]

        x, settle = self.hooks.copy_before_choice(x)
        x = self.hooks.depend_on(x, ordering_token)
        features = kv_heads, group + 2, width
        alone = self.hooks.alone
        q, k, v = AttentionInputs(features, self.dtype, config.qkv_biased, INIT_STD, product, alone, name="qkv")(x)
        q = q.reshape(*x.shape[:2], heads, width)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        tokens = self.hooks.important(q, k, context.lengths, residual)
        tokens = tokens if tokens is None else checkpoint_name(tokens, CHOICE)
        if self.mix is not None:
            mixed = self.mix(q, k, v)
        else:
            mixed = attention(
                q,
                k,
                v,
                causal=config.causal,
                context=context,
                window=config.attention_window,
                implementation=self.implementation,
            )
        mixed = checkpoint_name(mixed.reshape(*x.shape[:2], heads * width), "attention_out")
        mixed = settle(mixed, tokens)
        last = Weights((config.d_model,), self.dtype, config.biased, self.std, name="projection")
        kernel, bias = last(mixed.shape[-1])
        return product(mixed, kernel), bias, tokens


class MLPHalf(nn.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) for swiglu, with gate and up in one matrix [D, 2, F].

    tokens: the important ones.  ordering_token: the half waits for it.  Returns (part of the result, its bias).
    """

    features: int
    hidden: int
    activation: str
    dtype: Any
    hooks: Hooks
    std: float
    bias: bool = True
    matmul_dtype: str = "same"

    @nn.compact
    def __call__(
        self, x: jax.Array, tokens: jax.Array | None, ordering_token: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        product, matrices = PRODUCTS[self.matmul_dtype], ACTIVATIONS[self.activation]
        features = ((matrices,) if matrices > 1 else ()) + (self.hidden // self.hooks.shards,)
        x = self.hooks.depend_on(self.hooks.copy_to_tensor_axis(x, tokens), ordering_token)
        activation = _ACTIVATIONS[self.activation]
        down, after = Weights((self.features,), self.dtype, self.bias, self.std, name="down")(features[-1])
        if self.hooks.alone:
            up, before = Weights(features, self.dtype, self.bias, name="up")(x.shape[-1])
            kind = Kind(activation, product, self.hooks.kernels)
            return activated_product(kind, product(x, up), before, down), after
        hidden = checkpoint_name(Linear(features, self.dtype, self.bias, product, name="up")(x), HIDDEN)
        return product(activation(hidden), down), after


def transformer_mlp(config: TransformerConfig, dtype: Any, hooks: Hooks, std: float) -> MLPHalf:
    """The MLP half of a transformer's block, as its settings describe it."""
    return MLPHalf(
        config.d_model,
        config.ffn_width,
        config.mlp_activation,
        dtype,
        hooks,
        std,
        config.biased,
        config.matmul_dtype,
        name="mlp",
    )


def rotation_table(length: int, width: int, theta: float, stretch: Stretch | None = None) -> Rotation:
    """cos and sin of p theta^(-2i / E) for position p and pair i (Su et al. 2021, arXiv 2104.09864, eq. 34)."""
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    frequency = frequency if stretch is None else stretch(frequency)
    angle = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequency)
    return jnp.cos(angle), jnp.sin(angle)


def rotation_of(rotation: Rotation, context: Context) -> Rotation:
    """A table of positions [S, E / 2] -> of these rows, whose positions restart with each document."""
    if context.documents is None:
        return rotation
    cos, sin = (table[document_positions(context.documents)] for table in rotation)
    return cos, sin


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates the pairs (x[..., i], x[..., i + E/2]) of x[B, S, N, E] by their position's angle, in float32."""
    cos, sin = (table[..., None, :] if table.ndim == 3 else table[None, :, None, :] for table in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def fold(keys: jax.Array, number: int | jax.Array) -> jax.Array:
    """Every row's key [B] for its `number`-th use."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, use: int, hooks: Hooks) -> jax.Array:
    """Zeroes entries of x[B, S, D] with probability `rate` and scales the rest by 1 / (1 - rate); no keys: x itself.

    keys: [B].  Every row has its own key, so its dropout does not depend on other rows of its device or micro-batch.
    use: the number of the dropout in its layer.
    """
    if keys is None or rate == 0:
        return x
    shape = (x.shape[1] * hooks.rows, *x.shape[2:])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(fold(keys, use))
    return jnp.where(hooks.own_rows(keep), x / (1 - rate), 0).astype(x.dtype)


def apply(module: nn.Module, params: Any, *inputs: Any) -> Any:
    """`module` as a pure function of its parameters."""
    return module.apply({"params": params}, *inputs)


BlockFunction = Callable[[Any, jax.Array, jax.Array | None], jax.Array]
"""(parameters of one layer, x[B, S, D], dropout keys [B] or None) -> x[B, S, D]."""


def layer_keys(keys: jax.Array | None, layer: int | jax.Array) -> jax.Array | None:
    """The dropout keys of a layer; the keys with number 0 are the embedding's."""
    return None if keys is None else fold(keys, layer + 1)


def scan_layers(block: BlockFunction, params: Any, x: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Runs the stacked layers one after the other."""

    def body(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        layer_params, index = layer
        return block(layer_params, x, layer_keys(keys, index)), None

    return jax.lax.scan(body, x, (params, jnp.arange(jax.tree.leaves(params)[0].shape[0])))[0]
