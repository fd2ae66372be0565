"""Products of activations and kernels: as they are, or with both operands in 8 bits, scaled by what is in them now.

    x w ~ s_x s_w sum_k x8 w8,    x8 = x / s_x rounded,    s_x = 2^e, the power of two just above max|x| / M

M is the largest finite number of the 8 bits: 448 of e4m3, in which activations and kernels are, and 57344 of e5m2 for
errors, with a digit less and a wider exponent (Micikevicius et al. 2022, arXiv 2209.05433, table 1 and section 3).  A
step makes three products of it, all in 8 bits; sums are float32, forward as far as tensor cores keep them:

    y = x w    e4m3, e4m3          dx = dy w^T    e5m2, e4m3          dw = x^T dy    e4m3, e5m2

Nothing is kept from step to step, unlike in Flax's `fp8_ops`, whose scales come from maxima of earlier steps, as state
beside the parameters, and which clips what is infinite.  The price is one more reading of every operand.

Scales are powers of two, for then they change no digit: numbers of at least 2^-6 s (2^-14 s of e5m2) are rounded alike
whatever else lies on a device, and a scale may be multiplied with before or after a sum, in bfloat16 too.

Error of an operand's entry: at most u |x|, or eta s where that is more; u = 2^-4, eta = 2^-10 (e5m2: 2^-3 and 2^-17).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.catalogue import FLOAT8_CAPABILITY
from jhpt.core.config import ModelConfig
from jhpt.core.errors import InputError

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""(x[..., D_in], kernel[D_in, *features]), of one dtype -> [..., *features], of that dtype."""

OPERANDS, ERRORS = jnp.float8_e4m3fn, jnp.float8_e5m2

SMALLEST_EXPONENT = -126
"""Of a normal float32: below, scales would be flushed to zero."""


class Scaled(NamedTuple):
    """numbers * scale.  numbers: in 8 bits.  scale: one, float32; NaN where what was scaled is not all finite."""

    numbers: jax.Array
    scale: jax.Array


def scaled(x: jax.Array, dtype: Any) -> Scaled:
    """x in 8 bits."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    scale = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, SMALLEST_EXPONENT))
    numbers = (x.astype(jnp.float32) / scale).astype(dtype)
    # Conversions on GPUs may saturate: without this a number that is not finite would become one that is.
    return Scaled(numbers, jnp.where(jnp.isfinite(largest), scale, jnp.nan))


def plain_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x w."""
    return jnp.tensordot(x, kernel, axes=1)


@jax.custom_vjp
def product_in_8_bits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x w of operands in 8 bits, and so is what its gradients are made of.

    One entry that is not finite makes all of a product NaN.  Of operands so small that the product of their scales is
    below 2^-126 the result is zero.
    """
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    left, right = scaled(x, OPERANDS), scaled(kernel, OPERANDS)
    return _contracted(left, right, [x.ndim - 1], [0], x.dtype, jax.lax.Precision.DEFAULT), (left, right)


def _backward(saved: tuple[Scaled, Scaled], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    error, rows = scaled(gradient, ERRORS), range(x.numbers.ndim - 1)
    features = range(len(rows), gradient.ndim)
    # The best precision: cuBLAS adds up long sums with fewer bits unless it is asked for.
    best = jax.lax.Precision.HIGHEST
    return (
        _contracted(error, kernel, features, range(1, kernel.numbers.ndim), gradient.dtype, best),
        _contracted(x, error, rows, rows, gradient.dtype, best),
    )


product_in_8_bits.defvjp(_forward, _backward)


def _contracted(
    left: Scaled, right: Scaled, left_dims: Sequence[int], right_dims: Sequence[int], dtype: Any, precision: Any
) -> jax.Array:
    dims = (tuple(left_dims), tuple(right_dims)), ((), ())
    sums = jax.lax.dot_general(left.numbers, right.numbers, dims, precision=precision, preferred_element_type=dtype)
    return sums * (left.scale * right.scale).astype(dtype)


PRODUCTS: dict[str, Product] = {"same": plain_product, "float8": product_in_8_bits}
"""By `model.matmul_dtype`."""


def obstacle_to_8_bits(platform: str, capability: float | None) -> str | None:
    """Why a device does not multiply in 8 bits; None: it does."""
    if platform not in ("gpu", "cuda"):
        return f"the device is a {platform}"
    if capability is None or capability < FLOAT8_CAPABILITY:
        return f"compute capability {capability} is below {FLOAT8_CAPABILITY}"
    return None


def check_products(model: ModelConfig, platform: str, capability: float | None) -> None:
    """InputError where `model.matmul_dtype` is not for this device."""
    obstacle = obstacle_to_8_bits(platform, capability)
    if model.matmul_dtype == "float8" and obstacle is not None:
        raise InputError(
            f"model.matmul_dtype=float8 needs an NVIDIA GPU of compute capability {FLOAT8_CAPABILITY} or more: "
            f"{obstacle}; use model.matmul_dtype=same"
        )
