"""Activation functions of the MLP, whose backward pass reads their input and the error once.

    gelu        x (1 + tanh u) / 2 = x s(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)      the tanh form, as in GPT-2
    gelu_exact  x (1 + erf(x / sqrt 2)) / 2
    swiglu      a s(a) b,   a and b beside each other: x[..., 2, F]

with s(z) = 1 / (1 + exp(-z)) = exp(z) / (1 + exp(z)).  They are computed in float32 and rounded once.

A backward pass needs the function, for the gradient of the matrix behind it, and its slope.  The one writes s in the
first form and the other in the second.  If both were written alike, XLA would compute s once, and write it to memory
and read it again: a third of the traffic of GPT-2's MLP.  A tanh would take twice the operations of either form, which
a GPU's memory does not hide.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Elementwise = Callable[[jax.Array], jax.Array]

ROOT, CUBE = (2 / jnp.pi) ** 0.5, 0.044715

LARGEST_EXPONENT = 80.0
"""exp of it is finite in float32, and s of it is 1."""


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or as it is if it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _smooth(function: Elementwise, slope: Elementwise) -> Elementwise:
    """f with the derivative `slope`; both are called with float32."""

    @jax.custom_vjp
    def activation(x: jax.Array) -> jax.Array:
        return function(at_least_float32(x)).astype(x.dtype)

    def backward(x: jax.Array, error: jax.Array) -> tuple[jax.Array]:
        # The last product is of x's dtype: XLA would keep one in float32 for the sum of the bias' gradient.
        return (error * slope(at_least_float32(x)).astype(x.dtype),)

    activation.defvjp(lambda x: (activation(x), x), backward)
    return activation


def _inner(x: jax.Array) -> jax.Array:
    return ROOT * (x + CUBE * x * x * x)


def _second_form(z: jax.Array) -> jax.Array:
    """s(z) = exp(z) / (1 + exp(z)); `jax.nn.sigmoid` is the first form."""
    power = jnp.exp(jnp.minimum(z, LARGEST_EXPONENT))
    return power / (1 + power)


def _gelu_slope(x: jax.Array) -> jax.Array:
    s = _second_form(2 * _inner(x))
    return s + x * s * (1 - s) * (2 * ROOT * (1 + 3 * CUBE * x * x))


def _gelu_exact_slope(x: jax.Array) -> jax.Array:
    normal = jnp.exp(-0.5 * x * x) / (2 * jnp.pi) ** 0.5
    return 0.5 * jax.lax.erfc(-x / 2**0.5) + x * normal


gelu = _smooth(lambda x: x * jax.nn.sigmoid(2 * _inner(x)), _gelu_slope)
gelu_exact = _smooth(lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5)), _gelu_exact_slope)


@jax.custom_vjp
def swiglu(x: jax.Array) -> jax.Array:
    """x[..., 2, F] -> [..., F]."""
    gate, up = map(at_least_float32, _gate_and_up(x))
    return (gate * jax.nn.sigmoid(gate) * up).astype(x.dtype)


def _gate_and_up(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[..., 0, :], x[..., 1, :]


def _swiglu_backward(x: jax.Array, error: jax.Array) -> tuple[jax.Array]:
    gate, up = map(at_least_float32, _gate_and_up(x))
    s = _second_form(gate)
    slopes = up * s * (1 + gate * (1 - s)), gate * s
    return (jnp.stack([error * slope.astype(x.dtype) for slope in slopes], axis=-2),)


swiglu.defvjp(lambda x: (swiglu(x), x), _swiglu_backward)
