"""Products of activations and kernels: in the compute dtype, or of 8-bit operands that are scaled by their maximum.

    x w ~ s_x s_w sum_k x8 w8,    x8 = x / s_x rounded,    s_x = 2^e, the power of two just above max|x| / M

M is the largest finite number of the 8-bit format: 448 for e4m3, which holds activations and kernels, and 57344 for
e5m2, which holds errors and has one digit less and a wider exponent (Micikevicius et al. 2022, arXiv 2209.05433,
table 1 and section 3).  A training step makes three products, all of 8-bit operands.  They are accumulated in float32,
in the forward pass with the precision of the tensor cores:

    y = x w    e4m3, e4m3          dx = dy w^T    e5m2, e4m3          dw = x^T dy    e4m3, e5m2

No state is stored from step to step.  Flax's `fp8_ops` takes its scales from the maxima of earlier steps, which are
state beside the parameters, and clips infinities.  The cost here is that every operand is read once more.

Scales are powers of two, so they change no digit: numbers of at least 2^-6 s (2^-14 s for e5m2) are rounded in the same
way whatever other numbers are on the device, and a scale may be applied before or after a sum, in bfloat16 too.

The error of an operand's entry is at most max(u |x|, eta s) with u = 2^-4 and eta = 2^-10 (e5m2: 2^-3 and 2^-17).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.catalogue import FLOAT8_CAPABILITY
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig

Function = Callable[[jax.Array, jax.Array], jax.Array]
"""(x[..., D_in], kernel[D_in, *features]), of one dtype -> [..., *features], of that dtype."""


@dataclass(frozen=True)
class Product:
    """x w, which autodiff can differentiate.  gradients: (x, w, error) -> its gradients, without x w itself."""

    function: Function
    gradients: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return self.function(x, kernel)


OPERANDS, ERRORS = jnp.float8_e4m3fn, jnp.float8_e5m2

SMALLEST_EXPONENT = -126
"""The smallest exponent of a normal float32: smaller scales would be flushed to zero."""


class Scaled(NamedTuple):
    """numbers * scale.  numbers: in 8 bits.  scale: a float32 scalar; NaN if an input was not finite."""

    numbers: jax.Array
    scale: jax.Array


def scaled(x: jax.Array, dtype: Any) -> Scaled:
    """x in 8 bits."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    scale = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, SMALLEST_EXPONENT))
    numbers = (x.astype(jnp.float32) / scale).astype(dtype)
    # Conversions on GPUs may saturate: without the NaN an infinite number would become a finite one.
    return Scaled(numbers, jnp.where(jnp.isfinite(largest), scale, jnp.nan))


def _plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tensordot(x, kernel, axes=1)


def _plain_gradients(x: jax.Array, kernel: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    (down,) = jax.linear_transpose(lambda x: _plain(x, kernel), x)(error)
    (gradient,) = jax.linear_transpose(lambda kernel: _plain(x, kernel), kernel)(error)
    return down, gradient


plain_product = Product(_plain, _plain_gradients)


@jax.custom_vjp
def _in_8_bits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x w with 8-bit operands, in the backward pass too.

    One entry that is not finite makes the whole product NaN.  If the product of the two scales is below 2^-126, the
    result is zero.
    """
    return _forward(x, kernel)[0]


def _operands(x: jax.Array, kernel: jax.Array) -> tuple[Scaled, Scaled]:
    return scaled(x, OPERANDS), scaled(kernel, OPERANDS)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    left, right = _operands(x, kernel)
    return _contracted(left, right, [x.ndim - 1], [0], x.dtype, jax.lax.Precision.DEFAULT), (left, right)


def _backward(saved: tuple[Scaled, Scaled], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    error, rows = scaled(gradient, ERRORS), range(x.numbers.ndim - 1)
    features = range(len(rows), gradient.ndim)
    # Highest precision: otherwise cuBLAS accumulates long sums with fewer bits.
    best = jax.lax.Precision.HIGHEST
    return (
        _contracted(error, kernel, features, range(1, kernel.numbers.ndim), gradient.dtype, best),
        _contracted(x, error, rows, rows, gradient.dtype, best),
    )


_in_8_bits.defvjp(_forward, _backward)

product_in_8_bits = Product(_in_8_bits, lambda x, kernel, error: _backward(_operands(x, kernel), error))


def _contracted(
    left: Scaled, right: Scaled, left_dims: Sequence[int], right_dims: Sequence[int], dtype: Any, precision: Any
) -> jax.Array:
    dims = (tuple(left_dims), tuple(right_dims)), ((), ())
    sums = jax.lax.dot_general(left.numbers, right.numbers, dims, precision=precision, preferred_element_type=dtype)
    return sums * (left.scale * right.scale).astype(dtype)


PRODUCTS: dict[str, Product] = {"same": plain_product, "float8": product_in_8_bits}
"""Products by `model.matmul_dtype`."""


def obstacle_to_8_bits(platform: str, capability: float | None) -> str | None:
    """Why a device cannot multiply 8-bit numbers; None: it can."""
    if platform not in ("gpu", "cuda"):
        return f"the device is a {platform}"
    if capability is None or capability < FLOAT8_CAPABILITY:
        return f"compute capability {capability} is below {FLOAT8_CAPABILITY}"
    return None


def check_products(model: ModelConfig, platform: str, capability: float | None) -> None:
    """Raises InputError if the device cannot do `model.matmul_dtype`."""
    obstacle = obstacle_to_8_bits(platform, capability)
    if model.matmul_dtype == "float8" and obstacle is not None:
        raise InputError(
            f"model.matmul_dtype=float8 needs an NVIDIA GPU of compute capability {FLOAT8_CAPABILITY} or more: "
            f"{obstacle}; use model.matmul_dtype=same"
        )
