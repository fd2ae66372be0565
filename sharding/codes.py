"""Rows of numbers as bytes on the wire and back: codes of segmented quantization, before the ranges of their blocks."""

import jax
import jax.numpy as jnp

from jhpt.core.compression import RANGE_BYTES, Bits, codes_in_row
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segments import Quantized


def encoded(x: jax.Array, bits: Bits, implementation: Implementation, numbers: jax.Array | None = None) -> jax.Array:
    """Rows of x[R, D], all or those of these numbers, int32 [n]: uint8 [n, bytes of a row]."""
    return jnp.concatenate(pieces(x, bits, implementation, numbers), 1)


def decoded_sum(payload: jax.Array, columns: int, bits: Bits, implementation: Implementation) -> jax.Array:
    """uint8 [t, n, bytes of a row] -> the sum over t, float32 [n, columns]."""
    codes, ranges = jnp.split(payload, [codes_in_row(columns, bits) * bits // 8], 2)
    return sum_of_pieces(codes, ranges, columns, bits, implementation)


def pieces(
    x: jax.Array, bits: Bits, implementation: Implementation, numbers: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The same in two pieces, codes and ranges: uint8 [n, bytes of a row's codes], [n, bytes of its ranges]."""
    quantized = segment_quantize(x, bits=bits, rows=numbers, implementation=implementation)
    ranges = jax.lax.bitcast_convert_type(quantized.ranges, jnp.uint8)
    return quantized.codes, ranges.reshape(len(ranges), -1)


def sum_of_pieces(
    codes: jax.Array, ranges: jax.Array, columns: int, bits: Bits, implementation: Implementation
) -> jax.Array:
    """Pieces [t, n, bytes] -> the sum over t, float32 [n, columns]."""
    ranges = jax.lax.bitcast_convert_type(ranges.reshape(*ranges.shape[:2], -1, RANGE_BYTES), jnp.bfloat16)
    return dequantize_sum(Quantized(codes, ranges), columns=columns, bits=bits, implementation=implementation)
