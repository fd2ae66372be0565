"""Random layers on a random link, and the best choice of what to offload, by trying all choices."""

import itertools
from collections.abc import Sequence

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.cost.streaming import Bucket, Home, stream
from jhpt.planner.search.offload_buckets import Budget


def drawn(seed: int, layers: int) -> tuple[list[Bucket], Link]:
    """Up to `layers` layers, some large, some slow, and a link that copies about as fast as they compute."""
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
    """Layers, a link and budgets.

    The device's budget lies between the needs of offloading everything and of offloading nothing, and is sometimes too
    small.  In every other instance the host has too little memory for everything.
    """
    buckets, link = drawn(seed, 8)
    rng = np.random.default_rng(seed + 5000)
    peaks = [stream(buckets, link, [home] * len(buckets)).peak[0] for home in (Home.BOTH, Home.RESIDENT)]
    device = peaks[0] + rng.uniform(-0.1, 1.0) * (peaks[1] - peaks[0])
    everything = sum(2 * bucket.weights + bucket.state for bucket in buckets)
    host = everything if seed % 2 else float(rng.uniform(0.2, 1.0)) * everything
    return buckets, link, Budget(device=float(device), host=host)


def best(buckets: Sequence[Bucket], link: Link, budget: Budget) -> float | None:
    """Seconds of the shortest step that fits; None: none does."""
    homes = np.array(list(itertools.product(range(3), repeat=len(buckets))))
    steps = stream(buckets, link, homes)
    return min(steps.seconds[(steps.peak <= budget.device) & (steps.host <= budget.host)].tolist(), default=None)
