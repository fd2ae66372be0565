"""The definition of dequantize_sum."""

import jax
import jax.numpy as jnp

from jhpt.core.compression import Bits
from jhpt.kernels.segments import Knee, Quantized, cut, decoding, most


def dequantize_sum(payloads: Quantized, *, columns: int, bits: Bits, group: int, knee: Knee) -> jax.Array:
    """See `dequantize_sum`."""
    total = decode(Quantized(payloads.codes[0], payloads.ranges[0]), columns, bits, group, knee)
    for codes, ranges in zip(payloads.codes[1:], payloads.ranges[1:], strict=True):
        total = total + decode(Quantized(codes, ranges), columns, bits, group, knee)
    return total


def decode(payload: Quantized, columns: int, bits: Bits, group: int, knee: Knee) -> jax.Array:
    """The numbers [R, columns] of one payload."""
    centre, inner, outer = decoding(bits, knee)
    rows, width = payload.codes.shape
    group_bytes = group * bits // 8
    codes = unpacked(payload.codes.reshape(rows, width // group_bytes, group_bytes), bits).astype(jnp.float32)
    size = jnp.abs(codes)
    share = cut(jnp.where(size <= knee.codes, size * inner, centre + (size - knee.codes) * outer))
    share = jnp.where(size > most(bits), jnp.nan, jnp.sign(codes) * share)
    return (share * payload.ranges.astype(jnp.float32)[..., None]).reshape(rows, width * 8 // bits)[:, :columns]


def unpacked(codes: jax.Array, bits: Bits) -> jax.Array:
    """Bytes of groups [..., M bits / 8] -> signed codes [..., M], int8."""
    if bits == 8:
        return codes.astype(jnp.int8)
    return jnp.concatenate([codes << 4, codes], -1).astype(jnp.int8) >> 4
