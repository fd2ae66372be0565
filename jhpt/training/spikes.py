"""Loss spikes: what is called one, on the host and inside a step.

With the median m of the losses before, and s = 1.4826 x the median of |loss - m| (the standard deviation of normal
values, Rousseeuw and Croux 1993), a loss is a spike if

    loss > m + `guards.sigmas` max(s, LEAST m)

Losses fall during training, which widens s and so makes the rule milder where they fall fast.

With `guards.spike=keep` the host looks at the losses that are reported (`is_spike`).  Otherwise the step itself looks
at every loss (`SpikeGuard`), with a window that is part of its state: all devices decide alike, from the same numbers,
the device never waits for the host, and a run that is resumed decides as one that is not.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.guards_config import FEWEST, GuardsConfig

LEAST = 0.02
"""The least scatter that losses are taken to have, relative to their median."""

NORMAL = 1.4826
"""Standard deviation of normal values over the median of their distances from the median."""


def is_spike(before: Sequence[float], loss: float, guards: GuardsConfig) -> bool:
    """Whether a loss is far above those before it.  One that is not finite is: its update is skipped, others follow."""
    window = [value for value in before[-guards.window :] if math.isfinite(value)]
    if len(window) < FEWEST:
        return False
    if not math.isfinite(loss):
        return True
    middle = statistics.median(window)
    scatter = NORMAL * statistics.median(abs(value - middle) for value in window)
    return loss > middle + guards.sigmas * max(scatter, LEAST * abs(middle))


Losses = dict[str, jax.Array]
"""What a step knows of those before it, the same on every device:

window   float32 [W]: the losses of the last applied updates, the newest last; NaN where there are fewer
spikes   int32 [1]: how many there were
first    int32 [1]: the step of the first one since training has gone back; 0: none.  Always 0 without rewinding.
"""


@dataclass(frozen=True, kw_only=True)
class SpikeGuard:
    """The rule inside a step.  rewinds: whether training goes back at a spike."""

    sigmas: float
    window: int
    rewinds: bool

    def fresh(self) -> Losses:
        """Before the first step."""
        none = jnp.zeros((1,), jnp.int32)
        return {"window": jnp.full((self.window,), jnp.nan, jnp.float32), "spikes": none, "first": none}

    def spikes(self, losses: Losses, loss: jax.Array) -> jax.Array:
        """Whether this loss is a spike.  One that is not finite is none: its update is skipped anyway."""
        window = losses["window"]
        middle = jnp.nanmedian(window)
        scatter = NORMAL * jnp.nanmedian(jnp.abs(window - middle))
        limit = middle + self.sigmas * jnp.maximum(scatter, LEAST * jnp.abs(middle))
        enough = jnp.sum(~jnp.isnan(window)) >= FEWEST
        return enough & jnp.isfinite(loss) & (loss > limit)

    def after(self, losses: Losses, step: jax.Array, loss: jax.Array, *, spike: jax.Array, good: jax.Array) -> Losses:
        """After the step of this number.  good: whether its update was applied."""
        shifted = jnp.append(losses["window"][1:], loss.astype(jnp.float32))
        first = losses["first"]
        return {
            "window": jnp.where(good, shifted, losses["window"]),
            "spikes": losses["spikes"] + spike,
            "first": jnp.where(spike & (first == 0), step, first) if self.rewinds else first,
        }

    def fitted(self, saved: Losses | None, places: Mapping[str, jax.sharding.Sharding]) -> Losses:
        """What a checkpoint holds, for a run whose settings may be others; None: it comes from a run without guard."""
        if saved is None:
            made = self.fresh
        else:
            there = {name: np.asarray(leaf) for name, leaf in saved.items()}
            window = there["window"][-self.window :]
            window = np.concatenate([np.full(self.window - len(window), np.nan, np.float32), window])
            first = there["first"] if self.rewinds else np.zeros_like(there["first"])
            made = lambda: jax.tree.map(jnp.asarray, {**there, "window": window, "first": first})  # noqa: E731
        laid: Losses = jax.jit(made, out_shardings=dict(places))()
        return laid


def first_spike(losses: Losses | None) -> int | None:
    """The step of the spike before which training has to go back; None: it can go on."""
    return None if losses is None else int(np.asarray(losses["first"])[0]) or None


def spike_guard(guards: GuardsConfig) -> SpikeGuard | None:
    """The rule that steps of this configuration apply; None: they apply none."""
    if guards.spike == "keep":
        return None
    return SpikeGuard(sigmas=guards.sigmas, window=guards.window, rewinds=guards.spike == "rewind")
