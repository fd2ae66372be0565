"""The Pallas kernel: 16 bytes an access, where XLA's loops read 8 of two-byte numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.kernels.gelu_backward import reference
from jhpt.kernels.gelu_backward.reference import CUBE, ROOT
from jhpt.kernels.pallas import LANES, PARAMS, WARPS, load, row_per_warp, store

VECTOR = 8
"""Neighbours of two bytes in a thread: the widest access."""

COLUMNS = LANES * VECTOR

ROWS = 128
"""Rows of a program, at most.  On an H200 a call took 231 us with 128, 242 with 64, 260 with 256 and 292 with 512
(32,768 rows of 3,072; XLA's kernel 309): fewer programs have fewer bytes under way."""

LARGEST = 9.0
"""Where s and gelu' are 0 or 1 in float32: beyond it the powers of x would overflow, and below it x s is nothing."""


def backward(x: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `gelu_backward`.  Calls the reference unless x is bfloat16 and has 4 m rows and 256 n columns."""
    (rows, columns), program = x.shape, ROWS
    while program >= WARPS and rows % program:
        program //= 2
    if x.dtype != jnp.bfloat16 or not x.size or columns % COLUMNS or program < WARPS:
        return reference.backward(x, error)
    value, below, totals = plgpu.kernel(
        partial(_body, rows=program),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows // program * WARPS, columns), jnp.float32),
        ),
        grid=(rows // program, columns // COLUMNS),
        grid_names=("rows", "columns"),
        kernel_name="gelu_backward",
        compiler_params=plgpu.CompilerParams(lowering_semantics=PARAMS.lowering_semantics, approx_math=True),
    )(x, error)
    return value, below, jnp.sum(totals, 0)


def _body(x_ref: Any, error_ref: Any, value_ref: Any, below_ref: Any, totals_ref: Any, *, rows: int) -> None:
    """Rows of 256 columns, one to a warp.  Every warp has sums of its own, because a sum over warps would make all of
    them wait."""
    layout, program = row_per_warp(VECTOR), jax.lax.axis_index("rows")
    columns = pl.ds(jax.lax.axis_index("columns") * COLUMNS, COLUMNS)

    def step(index: jax.Array, totals: jax.Array) -> jax.Array:
        here = pl.ds(program * rows + index * WARPS, WARPS), columns
        x = load(x_ref.at[here], layout).astype(jnp.float32)
        error = load(error_ref.at[here], layout).astype(jnp.float32)
        x = jnp.maximum(x, -LARGEST)
        s, slope = _sigmoid_and_slope(jnp.minimum(x, LARGEST))
        below = error * slope
        store(value_ref.at[here], (x * s).astype(jnp.bfloat16))
        store(below_ref.at[here], below.astype(jnp.bfloat16))
        return totals + below

    nothing = plgpu.layout_cast(jnp.zeros((WARPS, COLUMNS), jnp.float32), layout)
    totals = jax.lax.fori_loop(0, rows // WARPS, step, nothing)
    store(totals_ref.at[pl.ds(program * WARPS, WARPS), columns], totals)


def _sigmoid_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s(z), gelu'(x)), from p = exp(z): s = p / (1 + p) and 1 - s = 1 / (1 + p), which the square of a reciprocal
    root gives in fewer instructions than a division."""
    square = x * x
    power = jnp.exp(x * (2 * ROOT + 2 * ROOT * CUBE * square))
    root = jax.lax.rsqrt(1 + power)
    rest = root * root
    s = power * rest
    return s, s + x * s * rest * (2 * ROOT + 6 * ROOT * CUBE * square)
