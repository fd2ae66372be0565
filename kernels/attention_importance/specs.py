"""Arguments of attention_importance that tests compare and benchmarks time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """q[batch, length, heads, width] and k of kv_heads; padded: whether sequences have lengths."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    causal: bool
    stride: int = 1
    padded: bool = False
    dtype: str = "bfloat16"


TESTED = (
    Spec(2, 128, 2, 2, 64, causal=False),
    Spec(1, 128, 4, 2, 64, causal=True),
    Spec(2, 200, 2, 1, 64, causal=True, stride=8),
    Spec(2, 72, 1, 1, 128, causal=False, padded=True),
    Spec(1, 64, 2, 2, 32, causal=True, dtype="float32"),
)
TIMED = (
    Spec(8, 2048, 4, 4, 128, causal=True),
    Spec(8, 8192, 4, 4, 128, causal=True),
    Spec(64, 4096, 2, 2, 64, causal=False),
)


def arguments(spec: Spec, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(q, k, lengths)."""
    of_q, of_k, of_lengths = jax.random.split(key, 3)
    q = jax.random.normal(of_q, (spec.batch, spec.length, spec.heads, spec.width), jnp.dtype(spec.dtype))
    k = jax.random.normal(of_k, (spec.batch, spec.length, spec.kv_heads, spec.width), jnp.dtype(spec.dtype))
    lengths = jax.random.randint(of_lengths, (spec.batch,), 1, spec.length + 1) if spec.padded else None
    return q, k, lengths
