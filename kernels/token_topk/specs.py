"""Arguments of token_topk that tests compare and benchmarks time."""

from typing import NamedTuple

import jax


class Spec(NamedTuple):
    """scores[batch, length], of which k are chosen.  levels: the number of different values; 0: any."""

    batch: int
    length: int
    k: int
    levels: int = 0


TESTED = (
    Spec(1, 1, 1),
    Spec(2, 7, 3),
    Spec(3, 130, 39),
    Spec(2, 256, 0),
    Spec(2, 256, 256),
    Spec(4, 384, 100, levels=3),
)
TIMED = (Spec(8, 2048, 614), Spec(8, 8192, 2457), Spec(64, 4096, 1228))


def arguments(spec: Spec, key: jax.Array) -> tuple[jax.Array, int]:
    """(scores, k)."""
    scores = jax.random.uniform(key, (spec.batch, spec.length))
    return jax.numpy.floor(scores * spec.levels) if spec.levels else scores, spec.k
