"""The queries, keys and values of attention, from one matrix [D, K, G + 2, E].

K key heads, each with G query heads: q[..., K, G, E], k[..., K, E] and v[..., K, E], all x W + b.  Either they are cut
out of one product's result.  Or (`apart`) they are three products, because attention's kernels read three arrays, and
cutting reads and writes them once more; the backward pass still makes one product of each kind, of the three errors
beside each other, so that the gradient of x is rounded once.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.models.products import Product
from jhpt.models.repeated import plus, summed_over_tokens

Heads = tuple[jax.Array, jax.Array, jax.Array]
"""Queries, keys, values, or their parts of a matrix or bias."""


class AttentionInputs(nn.Module):
    """x[..., D] -> (q, k, v).  features: (K, G + 2, E).  std: standard deviation of the matrix's initial weights.

    Recomputation knows what is saved of them as "qkv".
    """

    features: tuple[int, int, int]
    dtype: Any
    bias: bool
    std: float
    product: Product
    apart: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> Heads:
        kernel = self.param("kernel", nn.initializers.normal(self.std), (x.shape[-1], *self.features))
        kernel = kernel.astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, self.features).astype(self.dtype) if self.bias else None
        if self.apart:
            q, k, v = checkpoint_name(projected(self.product, x, kernel, bias), "qkv")
            return q, k, v
        whole = self.product(x, kernel)
        return _cut(checkpoint_name(whole if bias is None else plus(whole, bias), "qkv"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def projected(product: Product, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Heads:
    """(q, k, v) of x[..., D], kernel[D, K, G + 2, E] and bias[K, G + 2, E]."""
    # Matrices and vectors: cuBLAS then adds the bias, and without the broadcast that XLA would write to memory.
    parts = [product(x, part.reshape(len(kernel), -1)) for part in _cut(kernel)]
    if bias is not None:
        parts = [y + jnp.broadcast_to(part.ravel(), y.shape) for y, part in zip(parts, _cut(bias), strict=True)]
    q, k, v = (y.reshape(*x.shape[:-1], *part.shape[1:]) for y, part in zip(parts, _cut(kernel), strict=True))
    return q, k, v


def _forward(product: Product, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Any:
    return projected(product, x, kernel, bias), (x, kernel, bias)


def _backward(product: Product, saved: tuple[jax.Array, jax.Array, jax.Array | None], errors: Heads) -> Any:
    x, kernel, bias = saved
    # XLA would otherwise make the joining a part of the products, for which it may find no kernel (jax 0.11.2).
    error, beside = jax.lax.optimization_barrier((_beside(errors, x.ndim - 1), _beside(_cut(kernel), 1)))
    down, gradient = product.gradients(x, beside, error)
    if bias is None:
        return down, _whole(gradient, kernel), None
    return down, _whole(gradient, kernel), _whole(summed_over_tokens(error, _beside(_cut(bias), 0)), bias)


def _cut(whole: jax.Array) -> Heads:
    """[..., K, G + 2, E] -> [..., K, G, E], [..., K, E], [..., K, E]."""
    return whole[..., :-2, :], whole[..., -2, :], whole[..., -1, :]


def _beside(parts: Heads, leading: int) -> jax.Array:
    """Parts [*leading, ...] -> [*leading, K (G + 2) E]: long rows, which are copied at a memory's full rate."""
    return jnp.concatenate([part.reshape(*part.shape[:leading], -1) for part in parts], axis=-1)


def _whole(beside: jax.Array, like: jax.Array) -> jax.Array:
    """[*leading, K (G + 2) E] as `_beside` has put them -> [*leading, K, G + 2, E], the shape of `like`."""
    *leading, kv_heads, parts, width = like.shape
    queries, keys = kv_heads * (parts - 2) * width, kv_heads * width
    pieces = jnp.split(beside, [queries, queries + keys], axis=-1)
    return jnp.concatenate([piece.reshape(*leading, kv_heads, -1, width) for piece in pieces], axis=-2)


projected.defvjp(_forward, _backward)
