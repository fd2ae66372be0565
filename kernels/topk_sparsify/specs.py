"""Arguments of topk_sparsify that tests compare and benchmarks time."""

from typing import NamedTuple

import jax


class Spec(NamedTuple):
    """A bucket of `size` numbers."""

    size: int
    keep: int
    block: int = 1024
    dtype: str = "bfloat16"


TESTED = (
    Spec(1024, 10),
    Spec(3000, 31, dtype="float32"),
    Spec(5, 1, 128, "float32"),
    Spec(2048, 128, 128),
    Spec(4096, 1, 4096, "float32"),
)
TIMED = tuple(Spec(size, 10) for size in (1 << 25, 1 << 27, 1 << 29))  # 64 MiB to 1 GiB in bfloat16


def arguments(spec: Spec, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(gradient, residual)."""
    of_gradient, of_residual = jax.random.split(key)
    gradient = jax.random.t(of_gradient, 5, (spec.size,)).astype(spec.dtype)
    return gradient, jax.random.normal(of_residual, (spec.size,))
