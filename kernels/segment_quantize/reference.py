"""The definition of segment_quantize."""

import jax
import jax.numpy as jnp

from jhpt.core.compression import Bits, codes_in_row
from jhpt.kernels.segments import Knee, Quantized, most

SHIFT = 1.5 * 2**23
"""Adding it to a float32 integer of up to 22 bits puts the integer into the low bits of the word."""

LARGEST = 2.0**126
"""On some devices the reciprocals of larger numbers count as zero."""


def quantize(
    x: jax.Array, *, bits: Bits, group: int, knee: Knee, rows: jax.Array | None, seed: jax.Array | None
) -> Quantized:
    """See `segment_quantize`."""
    width = codes_in_row(x.shape[1], group)
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, width - x.shape[1])))
    ranges = rounded_up(largest(x.reshape(len(x) * width // group, group)))
    ranges = ranges.reshape(len(x), width // group)
    if rows is not None:
        x, ranges = x[rows], ranges[rows]
    noise = None if seed is None else uniform(seed, len(x), width).reshape(-1, group)
    codes = encode(x.reshape(-1, group), ranges.reshape(-1, 1).astype(jnp.float32), bits, knee, noise)
    return Quantized(packed(codes.astype(jnp.int8), bits).reshape(len(x), width * bits // 8), ranges)


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude along the last dimension; infinite where a number is NaN or beyond `LARGEST`.

    It reduces x, not |x|, for which XLA's CPU backend would compute x a second time.  Maxima there may lose a NaN and
    the numbers before it; a sum does not.
    """
    size = jnp.maximum(jnp.max(x, -1, initial=0), -jnp.min(x, -1, initial=0))
    return jnp.where(jnp.isnan(jnp.sum(x, -1)) | (size > LARGEST), jnp.inf, size)


def encode(x: jax.Array, ranges: jax.Array, bits: Bits, knee: Knee, noise: jax.Array | None) -> jax.Array:
    """Signed codes, int32; -N - 1 for numbers that are not finite.

    The two segments are rounded separately, so that no product is added to anything before it is rounded, and a
    compiler's fusion cannot change a code.  Selections and `integer` replace minima and a conversion, which would also
    handle NaN and numbers beyond int8 and take XLA's CPU backend twice as long.
    """
    top = most(bits)
    tiny = jnp.finfo(jnp.float32).tiny  # smaller numbers may count as zero on some devices, and have no reciprocal
    size = jnp.abs(x)
    share = size * jnp.where(ranges >= tiny, 1 / jnp.maximum(ranges, tiny), 0)
    inner = jnp.where(share < knee.centre, share, knee.centre) * (knee.codes / knee.centre)
    outer = (jnp.where(share > knee.centre, share, knee.centre) - knee.centre) * (
        (top - knee.codes) / (1 - knee.centre)
    )
    if noise is None:
        code = jnp.round(inner) + jnp.round(outer)
    else:  # the minima change no value; they separate product and sum
        inner, outer = jnp.minimum(inner, knee.codes), jnp.minimum(outer, top - knee.codes)
        code = jnp.where(share >= knee.centre, knee.codes + whole(outer + noise), whole(inner + noise))
    number = integer(jnp.where(code < top, code, top))
    return jnp.where(size < jnp.inf, jnp.where(x < 0, -number, number), -top - 1)


def integer(x: jax.Array) -> jax.Array:
    """int32 of float32 integers of up to 22 bits."""
    word = jax.lax.bitcast_convert_type(x + jnp.float32(SHIFT), jnp.int32)
    return word - jnp.int32(0x4B400000)  # SHIFT's own word


def whole(x: jax.Array) -> jax.Array:
    """The integer part of numbers that are not negative; GPU kernels have no floor."""
    return x.astype(jnp.int32).astype(jnp.float32)


def packed(codes: jax.Array, bits: Bits) -> jax.Array:
    """int8 codes of groups [..., M] -> bytes [..., M bits / 8]."""
    if bits == 8:
        return codes.astype(jnp.uint8)
    low, high = jnp.split(codes, 2, -1)
    return ((low & 0xF) | (high << 4)).astype(jnp.uint8)


def rounded_up(x: jax.Array) -> jax.Array:
    """float32, not negative -> the smallest bfloat16 that is not less."""
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
