"""Behaviour that the runtime injects into a model; the defaults run it on a single device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

BlockFunction = Callable[[Any, jax.Array, jax.Array | None], jax.Array]
"""(parameters of one layer, x[B, S, D], dropout key or None) -> x[B, S, D]."""


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., F] w[F, D] -> [..., D]."""
    return jnp.einsum("...f,fd->...d", x, w)


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a model calls where parallelism may differ.

    constrain: `(x, dims) -> x` states how an activation lies; `dims` names each dimension of x by "batch", "length",
      "width", "heads", "hidden", "vocab" or None.
    contract: `(x[..., F], w[F, D]) -> [..., D]`, the row-parallel contraction that ends attention and MLP.
    block: wraps the function of one layer (recomputation, offload).
    unroll: layers per iteration of the layer loop.
    """

    constrain: Callable[[jax.Array, tuple[str | None, ...]], jax.Array] = lambda x, dims: x
    contract: Callable[[jax.Array, jax.Array], jax.Array] = dense
    block: Callable[[BlockFunction], BlockFunction] = lambda function: function
    unroll: int = 1
