"""The largest entries of every block of a gradient, and the residual for the next step."""

import jax

from jhpt.kernels.implementation import Implementation
from jhpt.kernels.topk_sparsify import reference
from jhpt.kernels.topk_sparsify.reference import Sparse


def topk_sparsify(
    gradient: jax.Array, residual: jax.Array, *, keep: int, block: int = 1024, implementation: Implementation
) -> Sparse:
    """Top-k with error feedback (Stich et al. 2018, arXiv 1809.07599, algorithm 1), block by block.

        e = gradient + residual
        sent = the `keep` entries of largest |e| in every block, as bfloat16
        residual' = e - sent

    Nothing is lost: sent + residual' = e up to the rounding of float32, since residual' includes what bfloat16 rounds
    off.

    Args:
      gradient: [N], float32 or bfloat16.  residual: float32 [N].
      block: N need not be a multiple: the last block is filled with zeros, which are sent last.

    Returns:
      values bfloat16 [blocks, keep], positions uint16 in the block [blocks, keep], ascending; residual float32 [N].  Of
      equal magnitudes the lower position is sent; NaN is sent first, so that it shows in the sum.  It also stays in the
      residual, so a step that is skipped has to restore the residual before it.
    """
    if gradient.ndim != 1 or gradient.shape != residual.shape:
        raise ValueError(f"gradient {gradient.shape} and residual {residual.shape} must have one shape [N]")
    if not 0 < keep <= block <= 1 << 16:
        raise ValueError(f"keep={keep} of block={block}: 1 ... block, and a block has at most 65,536")
    if implementation == "mosaic":
        from jhpt.kernels.topk_sparsify import mosaic  # imports Pallas, which takes half a second

        return mosaic.sparsify(gradient, residual, keep=keep, block=block)
    return reference.sparsify(gradient, residual, keep=keep, block=block)


__all__ = ["Sparse", "topk_sparsify"]
