"""What dequantize_sum means."""

import jax
import jax.numpy as jnp

from jhpt.core.compression import Bits
from jhpt.kernels.segments import Group, Knee, Quantized, cut, decoding, most


def dequantize_sum(payloads: Quantized, *, columns: int, bits: Bits, group: Group, knee: Knee) -> jax.Array:
    """See `dequantize_sum`."""
    total = decode(Quantized(payloads.codes[0], payloads.ranges[0]), columns, bits, group, knee)
    for codes, ranges in zip(payloads.codes[1:], payloads.ranges[1:], strict=True):
        total = total + decode(Quantized(codes, ranges), columns, bits, group, knee)
    return total


def decode(payload: Quantized, columns: int, bits: Bits, group: Group, knee: Knee) -> jax.Array:
    """The numbers [R, columns] of one payload."""
    centre, inner, outer = decoding(bits, knee)
    codes = unpacked(payload.codes, bits).astype(jnp.float32)
    size = jnp.abs(codes)
    share = cut(jnp.where(size <= knee.codes, size * inner, centre + (size - knee.codes) * outer))
    share = jnp.where(size > most(bits), jnp.nan, jnp.sign(codes) * share)
    ranges = payload.ranges.astype(jnp.float32)
    if isinstance(group, int):
        ranges = jnp.repeat(ranges, group, -1)
    return (share * ranges)[:, :columns]


def unpacked(codes: jax.Array, bits: Bits) -> jax.Array:
    """Bytes -> signed codes, int8."""
    if bits == 8:
        return codes.astype(jnp.int8)
    both = jnp.repeat(codes, 2, -1)
    low = jax.lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 1) % 2 == 0
    return jnp.where(low, both << 4, both).astype(jnp.int8) >> 4
