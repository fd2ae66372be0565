"""What every layer of a chain keeps, under one budget, in the least time: a dynamic programme over layers.

A layer has options, such as those of `block.front`: bytes that it keeps, bytes that its backward pass needs while it
computes again, seconds.  With f micro-batches in flight a device holds

    f sum of kept  +  max of working

and the seconds add up.  For each limit on what is working (the options' own) the labels (kept, seconds) of the layers
so far are extended by one layer's options; what another label beats in both is dropped, which no optimum needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Option:
    """kept: bytes from a layer's forward pass until its backward pass.  working: bytes beside these during the latter.
    seconds: that it costs."""

    saved: float
    working: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """options: position of every layer's.  bytes: at most at a time."""

    options: tuple[int, ...]
    seconds: float
    bytes: float


def choose(layers: Sequence[Sequence[Option]], budget: float, in_flight: int = 1) -> Chosen | None:
    """The fastest choice that fits, of those the smallest; None: none fits."""
    limits = sorted({option.working for options in layers for option in options}) or [0.0]
    found = [one for limit in limits if (one := _within(layers, budget, in_flight, limit))]
    return min(found, key=lambda one: (one.seconds, one.bytes)) if found else None


def _within(layers: Sequence[Sequence[Option]], budget: float, in_flight: int, limit: float) -> Chosen | None:
    """With options that work in so many bytes."""
    saved, seconds = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []  # label before, option
    for options in layers:
        allowed = [at for at, option in enumerate(options) if option.working <= limit]
        if not allowed:
            return None
        sizes, costs = (np.array([getattr(options[at], name) for at in allowed]) for name in ("saved", "seconds"))
        sums, times = (saved[:, None] + in_flight * sizes).ravel(), (seconds[:, None] + costs).ravel()
        best = _undominated(sums, times)
        best = best[sums[best] + limit <= budget * (1 + 1e-12)]
        if not len(best):
            return None
        saved, seconds = sums[best], times[best]
        before, which = np.divmod(best, len(allowed))
        steps.append((before, np.array(allowed)[which]))
    label = int(np.lexsort((saved, seconds))[0])
    end, chosen = label, list[int]()
    for before, option in reversed(steps):
        chosen.append(int(option[label]))
        label = int(before[label])
    chosen.reverse()
    working = max((options[at].working for options, at in zip(layers, chosen, strict=True)), default=0.0)
    return Chosen(options=tuple(chosen), seconds=float(seconds[end]), bytes=float(saved[end]) + working)


def _undominated(sizes: Array, times: Array) -> NDArray[np.intp]:
    """Positions of labels that none beats in both."""
    order = np.lexsort((times, sizes))
    sofar = np.minimum.accumulate(times[order])
    better = np.concatenate([[True], times[order][1:] < sofar[:-1] * (1 - 1e-12)])
    return order[better]
