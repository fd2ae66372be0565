"""Arguments of segment_quantize that tests compare and benchmarks time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.compression import BLOCK, Bits


class Spec(NamedTuple):
    """x[rows, columns].  chosen: how many rows are gathered; 0: all, without a gather.  stochastic: rounded at
    random."""

    rows: int
    columns: int
    bits: Bits
    group: int = BLOCK
    dtype: str = "bfloat16"
    chosen: int = 0
    stochastic: bool = False


TESTED: tuple[Spec, ...] = (
    Spec(4, 256, 8, 128, "float32"),
    Spec(3, 384, 8, 128, "bfloat16", stochastic=True),
    Spec(5, 200, 8, 128, "float32", chosen=2),
    Spec(6, 512, 8, 512, "bfloat16", chosen=3, stochastic=True),
    Spec(1, 33, 8, 34, "float32"),
)
TESTED += tuple(spec._replace(bits=4) for spec in TESTED)
TIMED = tuple(
    Spec(rows, 4096, bits, chosen=chosen)
    for bits in (8, 4)
    for rows, chosen in ((8192, 0), (32768, 0), (131072, 0), (32768, 9830))  # 64 MiB, 256 MiB, 1 GiB; 30 % of the rows
)


class Arguments(NamedTuple):
    """See `segment_quantize`."""

    x: jax.Array
    rows: jax.Array | None
    seed: jax.Array | None


def arguments(spec: Spec, key: jax.Array) -> Arguments:
    """Student-t(5) numbers, heavier in the tails than a Gaussian's."""
    of_x, of_rows = jax.random.split(key)
    x = jax.random.t(of_x, 5, (spec.rows, spec.columns)).astype(spec.dtype)
    rows = jnp.sort(jax.random.permutation(of_rows, spec.rows)[: spec.chosen]) if spec.chosen else None
    return Arguments(x, rows, jnp.uint32(7) if spec.stochastic else None)
