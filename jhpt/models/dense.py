"""Dense layers split by column, and logits for a softmax over classes, of networks that are no transformers.

Every shard of the tensor axis has some columns of a layer's matrix and bias.  The input is whole
(`hooks.copy_to_tensor_axis`), and so is the output if `hooks.join` gathers the shards' columns; logits stay split.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.models.hooks import Hooks


def kernel_and_bias(key: jax.Array, shape: tuple[int, ...], gain: float) -> dict[str, jax.Array]:
    """Normal with variance gain / fan-in, and zeros (He et al. 2015, arXiv 1502.01852: gain 2 before a ReLU)."""
    std = math.sqrt(gain / math.prod(shape[:-1]))
    return {"kernel": std * jax.random.normal(key, shape), "bias": jnp.zeros(shape[-1])}


def columns(params: Any, x: jax.Array, hooks: Hooks, dtype: Any) -> jax.Array:
    """This shard's columns of x[..., D] kernel[D, F] + bias[F]."""
    y = jnp.tensordot(hooks.copy_to_tensor_axis(x), params["kernel"].astype(dtype), axes=1)
    return biased(y, params, dtype)


def biased(y: jax.Array, params: Any, dtype: Any) -> jax.Array:
    """y[..., F] + bias[F]."""
    return y + jnp.broadcast_to(params["bias"].astype(dtype), y.shape)


def class_logits(params: Any, x: jax.Array, hooks: Hooks, dtype: Any) -> jax.Array:
    """This shard's columns of the logits, float32."""
    return columns(params, x, hooks, dtype).astype(jnp.float32)
