"""Scaled dot-product attention, and the choice of its kernel."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig

Implementation = Literal["cudnn", "xla"]


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
    lengths: jax.Array | None = None,
    window: int | None = None,
    implementation: Implementation = "xla",
) -> jax.Array:
    """softmax(q k^T / sqrt(Dh)) v per head, softmax in float32.

    Args:
      q: [B, S, H, Dh].
      k, v: [B, S, K, Dh] with H a multiple of K: head h reads key/value head h // (H / K).
      causal: position i sees positions <= i only.
      lengths: [B] int32, the tokens of each sequence that are not padding; None: all.
      window: position i sees positions > i - window only; None: all.

    Returns:
      [B, S, H, Dh].
    """
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def choose_attention(model: ModelConfig, platform: str, dtype: jnp.dtype, capability: float | None) -> AttentionChoice:
    """The attention kernel for this model on this device.

    cuDNN flash attention needs an NVIDIA GPU of compute capability 8.0 or newer, 16-bit inputs and a head width that
    is a multiple of 8 and at most 128 (checked against jax 0.10.2 `cudnn.fused_attention_stablehlo`).

    Raises:
      InputError: `model.attention` asks for cuDNN where it cannot run.
    """
    if model.attention == "xla":
        return AttentionChoice(implementation="xla", reason="model.attention=xla")
    obstacle = _cudnn_obstacle(model, platform, dtype, capability)
    if obstacle is None:
        return AttentionChoice(implementation="cudnn", reason="cuDNN flash attention")
    if model.attention == "cudnn":
        raise InputError(f"model.attention=cudnn cannot run: {obstacle}; use model.attention=auto")
    return AttentionChoice(implementation="xla", reason=f"no cuDNN: {obstacle}")


def _cudnn_obstacle(model: ModelConfig, platform: str, dtype: jnp.dtype, capability: float | None) -> str | None:
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
    return None
