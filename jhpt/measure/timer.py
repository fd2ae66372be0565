"""The timer of every benchmark: it calls variants in turn, waits for every call, and returns raw samples."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

TICK = 1e-9
"""Seconds.  The clock's resolution, in place of a sample of zero, which has no logarithm."""


def interleaved(variants: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every call, `rounds` per variant, called in turn so that drift of the machine affects all alike.

    Every call is timed until its result is ready.  The order is reversed every other round.
    """
    for _ in range(warmup):
        for call in variants.values():
            jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds):
        names = list(variants) if index % 2 == 0 else list(reversed(list(variants)))
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            samples[name].append(time.perf_counter() - start)
    return samples


def spread(samples: list[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile)."""
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return middle, lower, upper


def relative_spread(samples: Sequence[float]) -> float | None:
    """(q90 - q10) / median of the repetitions; None if there is only one.

    Quantiles between two samples are linear, so with few samples this is close to (largest - smallest) / median.
    """
    if len(samples) < 2:
        return None
    low, middle, high = (float(value) for value in np.quantile(samples, (0.1, 0.5, 0.9)))
    return (high - low) / max(middle, TICK)


def steady(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Typical seconds of every variant of one `interleaved` run, which can be added and subtracted.

        seconds[v] = median over rounds r of (samples[v][r] / g[r])  x  median of g;   g[r]: geometric mean of round r

    On a shared machine whole rounds can be slow.  Medians of each variant alone may come from different rounds, so a
    small difference between two of them may be mostly drift.  Shares of a round do not have this problem.
    """
    positive = {name: [max(time, TICK) for time in times] for name, times in samples.items()}
    pace = [statistics.geometric_mean(times) for times in zip(*positive.values(), strict=True)]
    typical = statistics.median(pace)
    return {
        name: typical * statistics.median(time / mean for time, mean in zip(times, pace, strict=True))
        for name, times in positive.items()
    }
