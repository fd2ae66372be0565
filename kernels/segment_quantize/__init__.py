"""Numbers -> packed codes and ranges."""

import jax

from jhpt.core.compression import BLOCK, Bits
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.segment_quantize import reference
from jhpt.kernels.segments import Knee, Quantized, knee_for


def segment_quantize(
    x: jax.Array,
    *,
    bits: Bits = 8,
    group: int = BLOCK,
    knee: Knee | None = None,
    rows: jax.Array | None = None,
    seed: jax.Array | None = None,
    implementation: Implementation,
) -> Quantized:
    """x[R, N] by segmented quantization (`kernels.segments`); no gradient passes.

    Args:
      x: float32 or bfloat16.
      group: how many neighbours in a row share a range.
      knee: None: the fixed one for groups of this size.
      rows: int32 [K]; only these rows, in this order, gathered in the same pass.
      seed: uint32 scalar; rounds up with the probability of the fraction instead of to the nearest (ties to even), so
        that the mean is right.  Draws depend on the seed and on the position in the result.

    Returns:
      Codes [R or K, W] and ranges.  A group with a number that is not finite, or beyond 2^126, decodes to NaN.

    Raises:
      ValueError: codes of other than 4 or 8 bits; a group that is not a positive even number.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: use 4 or 8")
    if group <= 0 or group % 2:
        raise ValueError(f"group={group}: use a positive even number of neighbours")
    knee = knee if knee is not None else knee_for(bits, group)
    if implementation == "mosaic":
        from jhpt.kernels.segment_quantize import mosaic  # imports Pallas, which takes half a second

        return mosaic.quantize(x, bits=bits, group=group, knee=knee, rows=rows, seed=seed)
    return reference.quantize(x, bits=bits, group=group, knee=knee, rows=rows, seed=seed)
