"""Scaled dot-product attention, and the choice of its kernel."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig
from jhpt.core.families.text import TextConfig
from jhpt.models.context import WHOLE, Context, same_document

Implementation = Literal["cudnn", "xla"]

STREAM = DataConfig()
"""Data whose documents are not kept apart."""


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The kernel in use and the reason, printed once at the start of a run."""

    implementation: Implementation
    reason: str


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    context: Context = WHOLE,
    window: int | None = None,
    implementation: Implementation = "xla",
) -> jax.Array:
    """softmax(q k^T / sqrt(Dh)) v per head, softmax in float32.

    Args:
      q: [B, S, H, Dh].
      k, v: [B, S, K, Dh] with H a multiple of K: head h reads key/value head h // (H / K).
      causal: position i sees positions <= i only.
      context: a position sees those of its own document, and no padding.
      window: position i sees positions > i - window only; None: all.

    Returns:
      [B, S, H, Dh].
    """
    mask = None if context.documents is None else same_document(context.documents)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=causal,
        key_value_seq_lengths=context.lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def choose_attention(
    model: ModelConfig,
    platform: str,
    dtype: jnp.dtype,
    capability: float | None,
    data: DataConfig = STREAM,
) -> AttentionChoice:
    """The attention kernel for this model and data on this device.

    cuDNN flash attention needs an NVIDIA GPU of compute capability 8.0 or newer, 16-bit inputs and a head width that
    is a multiple of 8 and at most 128 (checked against jax 0.10.2 `cudnn.fused_attention_stablehlo`).  Where documents
    are kept apart it reads their mask as a bias of 16 bits, [b, 1, s, s], which it takes for even s.

    Raises:
      InputError: `model.attention` asks for cuDNN where it cannot run.
    """
    if not isinstance(model, TextConfig):
        return AttentionChoice(implementation="xla", reason="the model has no attention")
    if model.attention == "xla":
        return AttentionChoice(implementation="xla", reason="model.attention=xla")
    obstacle = _cudnn_obstacle(model, platform, dtype, capability, data)
    if obstacle is None:
        apart = ", documents apart by a mask" if data.packing == "documents" else ""
        return AttentionChoice(implementation="cudnn", reason=f"cuDNN flash attention{apart}")
    if model.attention == "cudnn":
        raise InputError(f"model.attention=cudnn cannot run: {obstacle}; use model.attention=auto")
    return AttentionChoice(implementation="xla", reason=f"no cuDNN: {obstacle}")


def _cudnn_obstacle(
    model: TextConfig, platform: str, dtype: jnp.dtype, capability: float | None, data: DataConfig
) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"the device is a {platform}"
    if capability is None or capability < 8.0:
        return f"compute capability {capability} is below 8.0"
    if jnp.dtype(dtype).itemsize != 2:
        return f"it computes in 16 bits and the model in {jnp.dtype(dtype).name}"
    if model.head_dim is None:
        return "the model has no attention"
    if model.head_dim % 8 or model.head_dim > 128:
        return f"head width {model.head_dim} is not a multiple of 8 up to 128"
    if data.packing == "documents" and data.sequence_length % 2:
        return f"data.packing=documents with data.sequence_length={data.sequence_length}, which is odd"
    return None
