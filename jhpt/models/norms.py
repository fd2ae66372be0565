"""LayerNorm and RMSNorm over the last dimension, in float32.

    h = (x - m) r,   y = h g + b         m = mean(x),  r = 1 / sqrt(mean((x - m)^2) + eps)
    u = dy g,        dx = r (u - mean(u) - h mean(u h)),   dg = sum(dy h),   db = sum(dy)   over tokens

RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) has no m, no mean(u) and no b.  Left to itself, XLA computes m and r
again in every kernel of the backward pass that needs them.  Such a kernel cannot sum over tokens as well, so that dy h
is written in float32 and read again.  Where a model runs `alone` (`Hooks`), m and r are computed before all else.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jhpt.models.activations import at_least_float32


class Norm(nn.Module):
    """x[..., D] -> [..., D], of `dtype`.  centred: LayerNorm; otherwise RMSNorm."""

    epsilon: float
    dtype: Any
    centred: bool
    alone: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, width)
        bias = self.param("bias", nn.initializers.zeros, width) if self.centred else None
        return normalised(Kind(self.epsilon, self.dtype, self.centred, self.alone), x, scale, bias)


class Kind(NamedTuple):
    """What distinguishes norms, beside their parameters."""

    epsilon: float
    dtype: Any
    centred: bool
    alone: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalised(kind: Kind, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y, of x[..., D], scale[D] and bias[D]."""
    y = _standard(x, *_statistics(kind, x)) * _rows(scale, x)
    return (y if bias is None else y + _rows(bias, x)).astype(kind.dtype)


def _rows(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """[D] -> [..., D], in float32."""
    return jnp.broadcast_to(at_least_float32(parameter), x.shape)


def _statistics(kind: Kind, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """(m or None, r), each [..., 1]."""
    wide = at_least_float32(x)
    mean = jnp.mean(wide, -1, keepdims=True) if kind.centred else None
    away = wide if mean is None else wide - mean
    return mean, jax.lax.rsqrt(jnp.mean(jnp.square(away), -1, keepdims=True) + kind.epsilon)


def _standard(x: jax.Array, mean: jax.Array | None, inverse: jax.Array) -> jax.Array:
    """h."""
    wide = at_least_float32(x)
    return (wide if mean is None else wide - mean) * inverse


def _forward(kind: Kind, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> Any:
    return normalised(kind, x, scale, bias), (x, scale, bias)


def _backward(kind: Kind, saved: tuple[jax.Array, jax.Array, jax.Array | None], error: jax.Array) -> Any:
    x, scale, bias = saved
    statistics = _statistics(kind, x)
    mean, inverse = jax.lax.optimization_barrier(statistics) if kind.alone else statistics
    h, error = _standard(x, mean, inverse), at_least_float32(error)
    u = error * _rows(scale, x)
    down = u - h * jnp.mean(u * h, -1, keepdims=True)
    down = down - jnp.mean(u, -1, keepdims=True) if kind.centred else down
    tokens = tuple(range(x.ndim - 1))
    return (
        (inverse * down).astype(x.dtype),
        jnp.sum(error * h, tokens).astype(scale.dtype),
        None if bias is None else jnp.sum(error, tokens).astype(bias.dtype),
    )


normalised.defvjp(_forward, _backward)
