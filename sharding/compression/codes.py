"""Rows of numbers as bytes on the wire and back: codes of segmented quantization, then the ranges of their blocks.

Ranks send each other pieces [t, n, words of a row], one after the other in lines of `core.compression.LINE` bytes:
[t, lines, words of a line].  XLA's CPU backend takes five times as long for one long row instead, because it vectorizes
the rows that it writes only if they are rows that it reads.
"""

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

from jhpt.core.compression import LINE, RANGE_BYTES, Bits
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segments import Quantized


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Pieces [t, n, words of a row] -> [t, lines, words of a line]; zeros fill up each piece's last line.

    A single piece is returned unchanged.
    """
    return parts[0] if len(parts) == 1 else jnp.concatenate([_in_lines(part) for part in parts], 1)


def split(payload: jax.Array, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """The inverse of `joined`.  shapes: (rows, words of a row) of every piece."""
    if len(shapes) == 1:
        return [payload]
    words = payload.shape[2]
    stops = list(accumulate(-(-rows * in_row // words) for rows, in_row in shapes))
    return [
        part.reshape(len(payload), -1)[:, : rows * in_row].reshape(len(payload), rows, in_row)
        for part, (rows, in_row) in zip(jnp.split(payload, stops[:-1], 1), shapes, strict=True)
    ]


def _in_lines(part: jax.Array) -> jax.Array:
    words = LINE // part.dtype.itemsize
    if part.shape[2] % words:
        part = part.reshape(len(part), 1, -1)
        part = jnp.pad(part, ((0, 0), (0, 0), (0, -part.shape[2] % words)))
    return part.reshape(len(part), -1, words)


def in_a_row(piece: jax.Array) -> jax.Array:
    """[t, n, words] of t ranks that have n rows each -> [1, t n, words]."""
    return piece.reshape(1, -1, piece.shape[2])


def pieces(
    x: jax.Array, bits: Bits, implementation: Implementation, numbers: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(codes, ranges) of rows of x[R, D], all or those with the indices `numbers`, int32 [n]: uint8 [n, bytes]."""
    quantized = segment_quantize(x, bits=bits, rows=numbers, implementation=implementation)
    ranges = jax.lax.bitcast_convert_type(quantized.ranges, jnp.uint8)
    return quantized.codes, ranges.reshape(len(ranges), -1)


def sum_of_pieces(
    codes: jax.Array, ranges: jax.Array, columns: int, bits: Bits, implementation: Implementation
) -> jax.Array:
    """Pieces [t, n, bytes] -> the sum over t, float32 [n, columns]."""
    ranges = jax.lax.bitcast_convert_type(ranges.reshape(*ranges.shape[:2], -1, RANGE_BYTES), jnp.bfloat16)
    return dequantize_sum(Quantized(codes, ranges), columns=columns, bits=bits, implementation=implementation)
