"""Packed codes of several ranks -> the sum of their numbers."""

import jax

from jhpt.core.compression import BLOCK, Bits
from jhpt.kernels.dequantize_sum import reference
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.segments import Knee, Quantized, knee_for


def dequantize_sum(
    payloads: Quantized,
    *,
    columns: int,
    bits: Bits = 8,
    group: int = BLOCK,
    knee: Knee | None = None,
    implementation: Implementation,
) -> jax.Array:
    """The sum over T of T payloads of [R, columns] numbers each, in float32, in the order of the payloads.

    Args:
      payloads: codes [T, R, W] and ranges [T, ...], from `segment_quantize` of [R, columns].
      knee: the same for all payloads; None: the fixed one.
    """
    knee = knee if knee is not None else knee_for(bits, group)
    if implementation == "mosaic":
        from jhpt.kernels.dequantize_sum import mosaic  # imports Pallas, which takes half a second

        return mosaic.dequantize_sum(payloads, columns=columns, bits=bits, group=group, knee=knee)
    return reference.dequantize_sum(payloads, columns=columns, bits=bits, group=group, knee=knee)
