"""The activation of an MLP with its second product, for a GPU that runs a whole model (`Hooks.alone`).

    z = activation(y + b) W        y: the first product, [..., F] or [..., 2, F];  b: its bias;  W [F, D]

Left apart, XLA writes y + b to memory, reads it and writes the activation.  As one function with its own backward pass,
only y + b is saved, and the activation of that very array is a part of the first product: cuBLAS computes GELU from its
float32 sums and writes both.  (`jax.checkpoint` puts a rounding behind a tensor that is saved *and* used, and behind
that XLA does not see the product any more.)  The backward pass computes the activation again, together with its slope.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.kernels.gelu_backward import gelu_backward
from jhpt.kernels.implementation import Implementation
from jhpt.models.activations import gelu
from jhpt.models.products import Product
from jhpt.models.repeated import summed_over_tokens

HIDDEN = "mlp_hidden"
"""The name by which recomputation knows y + b."""


class Kind(NamedTuple):
    """What distinguishes such functions, beside their arrays.  activation: of the MLP, [..., F] -> [..., F]."""

    activation: Callable[[jax.Array], jax.Array]
    product: Product
    kernels: Implementation


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def activated_product(kind: Kind, y: jax.Array, bias: jax.Array | None, kernel: jax.Array) -> jax.Array:
    """z [..., D]."""
    return _forward(kind, y, bias, kernel)[0]


def _forward(kind: Kind, y: jax.Array, bias: jax.Array | None, kernel: jax.Array) -> Any:
    hidden = y if bias is None else y + jnp.broadcast_to(bias, y.shape)
    return kind.product(_activated(kind, hidden), kernel), (checkpoint_name(hidden, HIDDEN), bias, kernel)


def _activated(kind: Kind, hidden: jax.Array) -> jax.Array:
    """The activation; GELU in the one form that XLA makes a part of a product, where numbers have two bytes."""
    if kind.activation is gelu and hidden.dtype.itemsize == 2:
        return jax.nn.gelu(hidden, approximate=True)
    return kind.activation(hidden)


def _backward(kind: Kind, saved: tuple[jax.Array, jax.Array | None, jax.Array], error: jax.Array) -> Any:
    hidden, bias, kernel = saved
    if kind.activation is gelu and kind.kernels == "mosaic":
        below, _ = kind.product.gradients(hidden, kernel, error)  # whatever was multiplied
        pair = hidden.reshape(-1, hidden.shape[-1]), below.reshape(-1, hidden.shape[-1])
        value, below, total = gelu_backward(*pair, implementation=kind.kernels)
        _, gradient = kind.product.gradients(value.reshape(hidden.shape), kernel, error)
        return below.reshape(hidden.shape), None if bias is None else total.astype(bias.dtype), gradient
    value, pull = jax.vjp(kind.activation, hidden)
    below, gradient = kind.product.gradients(value, kernel, error)
    (below,) = pull(below)
    return below, None if bias is None else summed_over_tokens(below, bias), gradient


activated_product.defvjp(_forward, _backward)
