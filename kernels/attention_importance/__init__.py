"""How much attention every token receives."""

import jax

from jhpt.kernels.attention_importance import reference
from jhpt.kernels.implementation import Implementation


def attention_importance(
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool,
    lengths: jax.Array | None = None,
    stride: int = 1,
    implementation: Implementation,
) -> jax.Array:
    """sig(j) = sum over heads h and queries i of A_h[i, j], A = softmax(q k^T / sqrt(E)): float32 [B, S].

    (PoWER-BERT, Goyal et al. 2020, arXiv 2001.08950, eq. 1.)  With `causal`, only queries i >= j see position j, and
    its sum is divided by their number.  No matrix [S, S] is stored, because queries are processed in blocks.  No
    gradient passes.

    Args:
      q: [B, S, H, E].  k: [B, S, K, E], H a multiple of K.
      lengths: int32 [B], tokens that are not padding; padding neither pays nor receives attention.

      stride: only the queries stride - 1, 2 stride - 1, ... pay attention: 1 / stride of the work, an estimate of the
        same order.  The last query is among them if stride divides S; causal tokens that none of them sees have
        importance 0.
    """
    if not 1 <= stride <= q.shape[1]:
        raise ValueError(f"stride={stride} of {q.shape[1]} queries")
    stop = jax.lax.stop_gradient
    if implementation == "mosaic":
        from jhpt.kernels.attention_importance import mosaic  # imports Pallas, which takes half a second

        return mosaic.importance(stop(q), stop(k), causal=causal, lengths=lengths, stride=stride)
    return reference.importance(stop(q), stop(k), causal=causal, lengths=lengths, stride=stride)
