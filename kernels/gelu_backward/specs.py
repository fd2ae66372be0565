"""Arguments of gelu_backward that tests compare and benchmarks time."""

from typing import NamedTuple

import jax


class Spec(NamedTuple):
    """x[rows, columns]."""

    rows: int
    columns: int
    dtype: str = "bfloat16"


TESTED = (Spec(128, 256), Spec(12, 512), Spec(384, 256), Spec(7, 256), Spec(8, 100), Spec(8, 256, "float32"))
TIMED = (Spec(32768, 3072), Spec(8192, 16384))
"""gpt2-124m with 32 sequences of 1,024 tokens, and gpt-6.7b with 8."""


def arguments(spec: Spec, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, error)."""
    of_x, of_error = jax.random.split(key)
    shape = spec.rows, spec.columns
    return (2 * jax.random.normal(of_x, shape)).astype(spec.dtype), jax.random.normal(of_error, shape, spec.dtype)
