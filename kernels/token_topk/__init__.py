"""The most important tokens of every sample."""

import jax

from jhpt.kernels.implementation import Implementation
from jhpt.kernels.token_topk import reference


def token_topk(scores: jax.Array, k: int, *, implementation: Implementation) -> jax.Array:
    """Positions of the k largest of scores[B, S] in every row, ascending: int32 [B, k].

    Exact; of equal scores the one at the lower position is taken.  NaN counts as the largest: a token whose importance
    is not known is not dropped.

    Raises:
      ValueError: k outside 0 ... S, scores that are not float32.
    """
    if scores.dtype != "float32":
        raise ValueError(f"scores are {scores.dtype}: importance is compared in float32")
    if not 0 <= k <= scores.shape[1]:
        raise ValueError(f"k={k} of {scores.shape[1]} tokens")
    if implementation == "mosaic":
        from jhpt.kernels.token_topk import mosaic  # imports Pallas, which takes half a second

        return mosaic.topk(scores, k)
    return reference.topk(scores, k)
