"""What segment_quantize means."""

import jax
import jax.numpy as jnp

from jhpt.core.compression import Bits, codes_in_row
from jhpt.kernels.segments import Group, Knee, Quantized, grouped, most


def quantize(
    x: jax.Array, *, bits: Bits, group: Group, knee: Knee, rows: jax.Array | None, seed: jax.Array | None
) -> Quantized:
    """See `segment_quantize`."""
    x = x if rows is None else x[rows]
    wide, padding = grouped(x, group)
    finite = jnp.isfinite(wide)
    ranges = rounded_up(jnp.max(jnp.where(finite, jnp.abs(wide), 0), -1, keepdims=True, initial=0))
    noise = None if seed is None else uniform(seed, x.shape[0], codes_in_row(x.shape[1], bits, group))
    if noise is not None:
        noise = noise[:, : x.shape[1]].reshape(wide.shape) if group in ("row", "tensor") else noise.reshape(wide.shape)
    codes = jnp.where(finite, encode(wide, ranges.astype(jnp.float32), bits, knee, noise), -most(bits) - 1)
    columns = x.shape[1] + padding
    codes = codes.astype(jnp.int8).reshape(x.shape[0], columns)
    codes = jnp.pad(codes, ((0, 0), (0, codes_in_row(x.shape[1], bits, group) - columns)))
    return Quantized(packed(codes, bits), ranges[..., 0])


def encode(x: jax.Array, ranges: jax.Array, bits: Bits, knee: Knee, noise: jax.Array | None) -> jax.Array:
    """Signed codes as float32.

    The two segments are rounded apart: no product meets a sum before it is rounded, so whether a compiler fuses them
    cannot change a code.
    """
    top = most(bits)
    tiny = jnp.finfo(jnp.float32).tiny  # what is smaller may count as zero on some devices, and has no reciprocal
    share = jnp.abs(x) * jnp.where(ranges >= tiny, 1 / jnp.maximum(ranges, tiny), 0)
    inner = jnp.minimum(share, knee.centre) * (knee.codes / knee.centre)
    outer = (jnp.maximum(share, knee.centre) - knee.centre) * ((top - knee.codes) / (1 - knee.centre))
    if noise is None:
        code = jnp.round(inner) + jnp.round(outer)
    else:  # the bounds hold anyhow: they stand between product and sum
        inner, outer = jnp.minimum(inner, knee.codes), jnp.minimum(outer, top - knee.codes)
        code = jnp.where(share >= knee.centre, knee.codes + whole(outer + noise), whole(inner + noise))
    return jnp.sign(x) * jnp.minimum(code, top)


def whole(x: jax.Array) -> jax.Array:
    """The integer part of what is not negative; GPU kernels have no floor."""
    return x.astype(jnp.int32).astype(jnp.float32)


def packed(codes: jax.Array, bits: Bits) -> jax.Array:
    """int8 codes [..., W] -> bytes [..., W bits / 8].

    Two codes are a word, whose low byte is the first: strided slices take XLA's CPU backend three times as long.
    """
    if bits == 8:
        return codes.astype(jnp.uint8)
    word = jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint16)
    return ((word & 0xF) | ((word >> 4) & 0xF0)).astype(jnp.uint8)


def rounded_up(x: jax.Array) -> jax.Array:
    """float32, not negative -> the next bfloat16 that is not less."""
    word = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    word = (word + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(word, jnp.float32).astype(jnp.bfloat16)


def uniform(seed: jax.Array, rows: int, columns: int) -> jax.Array:
    """Numbers in [0, 1), [rows, columns], each a hash of the seed and its position: the same in any kernel.

    The finalizer of MurmurHash3 (Appleby, public domain), twice, of 24 bits.
    """
    position = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 0) * jnp.uint32(columns)
    position += jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    word = mixed(mixed(position) ^ seed.astype(jnp.uint32))
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def mixed(word: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every bit of the result depends on every bit of the word."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)
