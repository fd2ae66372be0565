"""Random layers on a random link, and the best choice of what lives on the host, found by trying all."""

import itertools
from collections.abc import Sequence

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.cost.streaming import Bucket, Home, stream
from jhpt.planner.search.offload_buckets import Budget


def drawn(seed: int, layers: int) -> tuple[list[Bucket], Link]:
    """Up to so many layers, some large, some slow; a link that copies about as fast as they compute."""
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
                saved=float(rng.integers(0, 3)),
                working=float(rng.integers(0, 3)),
            )
        )
    return buckets, Link(bandwidth=float(rng.choice([0.5, 1, 3, 10])), latency=float(rng.choice([0, 0.1])))


def instance(seed: int) -> tuple[list[Bucket], Link, Budget]:
    """Budgets between what all on the host needs and what nothing does, now and then too small; every other host is."""
    buckets, link = drawn(seed, 8)
    rng = np.random.default_rng(seed + 5000)
    peaks = [stream(buckets, link, [home] * len(buckets)).peak[0] for home in (Home.BOTH, Home.RESIDENT)]
    device = peaks[0] + rng.uniform(-0.1, 1.0) * (peaks[1] - peaks[0])
    everything = sum(2 * bucket.weights + bucket.state for bucket in buckets)
    host = everything if seed % 2 else float(rng.uniform(0.2, 1.0)) * everything
    return buckets, link, Budget(device=float(device), host=host)


def best(buckets: Sequence[Bucket], link: Link, budget: Budget) -> float | None:
    """The shortest step of all that fit, in seconds; None: none does."""
    homes = np.array(list(itertools.product(range(3), repeat=len(buckets))))
    steps = stream(buckets, link, homes)
    return min(steps.seconds[(steps.peak <= budget.device) & (steps.host <= budget.host)].tolist(), default=None)
