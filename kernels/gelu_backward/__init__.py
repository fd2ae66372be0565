"""GELU once more, its error, and the gradient of the bias before it, in one pass over memory."""

from typing import NamedTuple

import jax

from jhpt.kernels.gelu_backward import reference
from jhpt.kernels.implementation import Implementation


class Backward(NamedTuple):
    """value: gelu(x) [N, F].  error: that of x, [N, F].  total: its sum over the rows, float32 [F]."""

    value: jax.Array
    error: jax.Array
    total: jax.Array


def gelu_backward(x: jax.Array, error: jax.Array, *, implementation: Implementation) -> Backward:
    """The backward pass of an MLP between its two matrices, which saved the activation's input.

        value = gelu(x) = x (1 + tanh u) / 2,    u = sqrt(2 / pi) (x + 0.044715 x^3)
        error' = error gelu'(x)                  total = sum over rows of error'

    The gradient of the second matrix needs the value, those of the first matrix and of its input the error, and that of
    the bias the total.  Computed in float32 and rounded once.

    Args:
      x: [N, F], the activation's input, its bias included.  error: [N, F], of the activation's result.

    Raises:
      ValueError: the two differ in shape or dtype.
    """
    if x.ndim != 2 or (x.shape, x.dtype) != (error.shape, error.dtype):
        raise ValueError(f"x {x.dtype}{list(x.shape)} and error {error.dtype}{list(error.shape)} must be alike, [N, F]")
    if implementation == "mosaic":
        from jhpt.kernels.gelu_backward import mosaic  # imports Pallas, which takes half a second

        return Backward(*mosaic.backward(x, error))
    return Backward(*reference.backward(x, error))
