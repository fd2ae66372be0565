"""Loss spikes: the checkpoint from before one is kept, because those after it may be worth nothing.

With the median m of the losses before, and s = 1.4826 x the median of |loss - m| (the standard deviation of normal
values, Rousseeuw and Croux 1993), a loss is a spike if

    loss > m + SIGMAS max(s, LEAST m)

Losses fall during training, which widens s and so makes the rule milder where they fall fast.
"""

import math
import statistics
from collections.abc import Sequence

WINDOW = 20
"""Losses before that are compared with."""

FEWEST = 5
"""Losses before, without which nothing is called a spike."""

SIGMAS = 10.0
LEAST = 0.02
"""The least scatter that losses are taken to have, relative to their median."""


def is_spike(before: Sequence[float], loss: float) -> bool:
    """Whether a loss is far above those before it.  One that is not finite is: its update is skipped, others follow."""
    window = [value for value in before[-WINDOW:] if math.isfinite(value)]
    if len(window) < FEWEST:
        return False
    if not math.isfinite(loss):
        return True
    middle = statistics.median(window)
    scatter = 1.4826 * statistics.median(abs(value - middle) for value in window)
    return loss > middle + SIGMAS * max(scatter, LEAST * abs(middle))
