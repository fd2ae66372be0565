"""What a chain of layers saves under a memory budget, in the least time: exactly (`choose_in_chain`).

Not called by plans yet; it will choose what each layer saves if layers differ.  A dynamic programme over the layers
finds the fastest choice within one budget.  Every option of a layer has saved bytes, working bytes that its backward
pass needs while it recomputes, and seconds.  With f micro-batches in flight a device holds

    f sum of saved  +  max of working

bytes, and the seconds add up.  For each limit on the working bytes (one of the options' values), the labels
(saved, seconds) of the first layers are extended by the options of the next layer.  A label that another one beats in
both is dropped, because no optimum needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerOption:
    """What a layer may save.

    saved: bytes from its forward pass until its backward pass.  working: further bytes during its backward pass.
    seconds: of recomputation.
    """

    saved: float
    working: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ChainChoice:
    """options: position of the option of every layer.  bytes: most bytes at a time."""

    options: tuple[int, ...]
    seconds: float
    bytes: float


def choose_in_chain(layers: Sequence[Sequence[LayerOption]], budget: float, in_flight: int = 1) -> ChainChoice | None:
    """The fastest choice that fits, and among equally fast ones the smallest; None if none fits."""
    limits = sorted({option.working for options in layers for option in options}) or [0.0]
    choices = [choice for limit in limits if (choice := _fastest_within(layers, budget, in_flight, limit))]
    return min(choices, key=lambda choice: (choice.seconds, choice.bytes), default=None)


def _fastest_within(
    layers: Sequence[Sequence[LayerOption]], budget: float, in_flight: int, limit: float
) -> ChainChoice | None:
    """The fastest choice among options whose working bytes are at most `limit`."""
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
    return ChainChoice(options=tuple(chosen), seconds=float(seconds[end]), bytes=float(saved[end]) + working)


def _undominated(sizes: Array, times: Array) -> NDArray[np.intp]:
    """Positions of the labels that no other label beats in both."""
    order = np.lexsort((times, sizes))
    sofar = np.minimum.accumulate(times[order])
    better = np.concatenate([[True], times[order][1:] < sofar[:-1] * (1 - 1e-12)])
    return order[better]
