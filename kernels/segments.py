"""Segmented quantization: a scale of codes with two step sizes, fine around zero and coarse in the tails.

A group of numbers shares one range m, its largest magnitude.  With b bits a magnitude has codes 0 ... N,
N = 2^(b-1) - 1: C of them divide the centre [0, r m] evenly and N - C the tail (r m, m].  An increasing, piecewise
linear function relates code and magnitude,

    t(a) = C min(a, r) / r + (N - C) max(a - r, 0) / (1 - r),    a = |x| / m,    code = sign(x) round(t(a)),

and decoding is its inverse.  C = r N is uniform symmetric quantization.  If numbers are spread evenly inside each step
and a share P of them lies in the centre,

    E[err^2] / m^2 = (P (r / C)^2 + (1 - P) ((1 - r) / (N - C))^2) / 12

(PWLQ, Fang et al., ECCV 2020, arXiv 2002.00104, eq. 5, where both segments have the same number of codes; dividing the
codes freely reduces the error of a Gaussian by a fifth).  The one code that symmetry leaves over, -2^(b-1), stands for
numbers that are not finite and decodes to NaN.  A group with such a number has an infinite range and decodes to NaN as
a whole, so that bad numbers stay visible.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.compression import Bits


class Knee(NamedTuple):
    """Where the step size changes: r, the centre's share of the range, and C, its number of codes.

    They are numbers, or float32 scalars if they were fitted.
    """

    centre: float | jax.Array
    codes: float | jax.Array


LONG_GROUP = 512
"""Groups of at least this many numbers have the knee of long groups."""

LONG_KNEES: dict[Bits, Knee] = {8: Knee(0.44, 88.0), 4: Knee(0.45, 5.0)}
SHORT_KNEES: dict[Bits, Knee] = {8: Knee(0.46, 82.0), 4: Knee(0.5, 5.0)}
"""Fixed knees for groups of about 1,000 and about 100 numbers: on Gaussian, Laplace and Student-t(5) numbers alike
their error is below that of uniform quantization (docs/reports/compression.md).  A range for a whole tensor needs a
fitted knee (`fit_knee`), because tensors differ too much in r."""


class Quantized(NamedTuple):
    """Numbers [..., R, N] on the wire.

    codes: uint8 [..., R, W], W = bits / 8 of N rounded up to whole groups.  At 4 bits byte i of a group of M numbers
      holds the codes i and i + M / 2 in its low and its high half: neighbours stay neighbours.
    ranges: bfloat16 [..., R, groups in a row]; rounded up, so that nothing is cut off.
    """

    codes: jax.Array
    ranges: jax.Array


def most(bits: int) -> int:
    """N: the largest code of a magnitude."""
    return 2 ** (bits - 1) - 1


def knee_for(bits: Bits, group: int) -> Knee:
    """The fixed knee for groups of `group` numbers."""
    return (LONG_KNEES if group >= LONG_GROUP else SHORT_KNEES)[bits]


def fit_knee(x: jax.Array, bits: Bits, group: int) -> Knee:
    """The knee of least E[err^2] for x [R, N]: the best r of 1/32, 2/32, ... 31/32, each with its best C, in one pass.

    For a given r the error is least at C : N - C = (P r^2)^(1/3) : ((1 - P) (1 - r)^2)^(1/3), where its derivative in C
    is zero.  Groups count by the square of their range.
    """
    r = jnp.array([step / 32 for step in range(1, 32)], jnp.float32)
    wide = grouped(x, group)
    size = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    largest = jnp.max(size, -1, keepdims=True)
    weight = jnp.square(largest / jnp.maximum(jnp.max(largest), jnp.finfo(jnp.float32).tiny))
    inside = jnp.stack([jnp.sum(weight * jnp.mean(size <= each * largest, -1, keepdims=True)) for each in r])
    share = inside / jnp.maximum(jnp.sum(weight), jnp.finfo(jnp.float32).tiny)
    return best_knee(share, r, bits)


def best_knee(share: jax.Array, r: jax.Array, bits: Bits) -> Knee:
    """The knee of least error among centres r, in which these shares of the numbers lie."""
    top = most(bits)
    centre, tail = jnp.cbrt(share * r**2), jnp.cbrt((1 - share) * (1 - r) ** 2)
    codes = jnp.clip(jnp.round(top * centre / (centre + tail)), 1, top - 1)
    error = share * (r / codes) ** 2 + (1 - share) * ((1 - r) / (top - codes)) ** 2
    best = jnp.argmin(error)
    return Knee(r[best], codes[best])


def decoding(bits: Bits, knee: Knee) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(r, r / C, (1 - r) / (N - C)), each cut to 16 significant bits; see `cut`."""
    centre, codes = jnp.float32(knee.centre), jnp.float32(knee.codes)
    return cut(centre), cut(centre / codes), cut((1 - centre) / (most(bits) - codes))


def cut(x: jax.Array) -> jax.Array:
    """float32 with its last 8 bits zero.

    The product of such a number with a code, or with a range in bfloat16, is exact in float32.  So it does not matter
    whether a compiler fuses a product with the sum that follows: all programs decode the same bits, and quantize their
    sums to the same codes.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFFF00)
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def grouped(x: jax.Array, group: int) -> jax.Array:
    """x[R, N] as float32 [R, groups, members]; zeros fill the last group of a row."""
    x = x.astype(jnp.float32)
    padding = -x.shape[1] % group
    groups = (x.shape[1] + padding) // group
    return jnp.pad(x, ((0, 0), (0, padding))).reshape(x.shape[0], groups, group)
