"""Random layers on a random link."""

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.offload.stream import Bucket


def drawn(seed, layers):
    """Layers of which some are large, some slow; a link on which copying them takes about as long as computing does."""
    rng = np.random.default_rng(seed)
    buckets = []
    for _ in range(int(rng.integers(1, layers + 1))):
        weights, seconds = float(rng.choice([1, 2, 3, 8])), float(rng.choice([1, 2, 5]))
        buckets.append(
            Bucket(
                forward=seconds,
                backward=seconds * float(rng.choice([2, 3])),
                weights=weights,
                state=weights * float(rng.choice([1, 2, 4])),
                kept=float(rng.integers(0, 3)),
                working=float(rng.integers(0, 3)),
            )
        )
    return buckets, Link(bandwidth=float(rng.choice([0.5, 1, 3, 10])), latency=float(rng.choice([0, 0.1])))
