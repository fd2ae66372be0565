"""Costs of every contiguous range of layers at once: matrices `[i, j]` for layers i..j (j included)."""

from dataclasses import dataclass

import numpy as np

from jhpt.planner.cost.layers import LayerCosts
from jhpt.planner.cost.memory import Slot
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array


@dataclass(frozen=True)
class Ranges:
    """Seconds and bytes of stages, [N, N].  Entries with j < i have no meaning."""

    forward: Array
    backward: Array
    sync: Array
    update: Array
    state: Array
    activations: Array
    working: Array

    def bytes(self, slots: int) -> Array:
        """Bytes of a device with `slots` micro-batches in flight."""
        return self.state + slots * self.activations + self.working


def ranges(costs: LayerCosts, slot: Slot, model: CostModel, local: float) -> Ranges:
    """The costs of all ranges of layers, as stages of a pipeline that runs all layers with one strategy.

    Args:
      local: samples of a micro-batch on one device; the transfer buffers hold that many.
    """
    errors = costs.backward + costs.backward_tensor
    first, last = costs.forward_filling[:, None], costs.backward_filling[None, :]
    update, state = sums(costs.update) + slot.seconds(used=False), sums(costs.state) + slot.state
    used = slot.seconds(used=True) - slot.seconds(used=False)
    update[0, :] += used
    update[:, -1] += used
    if (tied := model.tied_layer) is not None:
        update[1 : tied + 1, tied:] += costs.tied[tied]
        state[1 : tied + 1, tied:] += costs.tied_bytes[tied]
        update[0, :tied] += costs.tied[tied]
    come = np.concatenate([[0.0], model.boundary[:-1]])
    leave = np.concatenate([model.boundary[:-1], [0.0]])
    return Ranges(
        forward=sums(costs.forward + costs.forward_tensor) + first,
        backward=sums(errors) + last,
        sync=_sync(errors, costs.gradients) + last,
        update=update,
        state=state,
        activations=sums(costs.activations) + slot.output,
        working=_running_max(costs.working) + 2 * local * (come[:, None] + leave[None, :]),
    )


def prefix(values: Array) -> Array:
    """[N + 1] sums of the first 0, 1, ..., N values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def sums(values: Array) -> Array:
    """[i, j] sum of values i..j."""
    total = prefix(values)
    return total[None, 1:] - total[:-1, None]


def _running_max(values: Array) -> Array:
    """[i, j] largest of values i..j."""
    n = len(values)
    started = np.arange(n)[None, :] >= np.arange(n)[:, None]
    return np.where(started, np.maximum.accumulate(np.where(started, values[None, :], -np.inf), axis=1), 0.0)


def _sync(errors: Array, gradients: Array) -> Array:
    """[i, j] max over l in i..j of (sum of errors l..j + sum of gradients i..l); see `estimate.sync_seconds`."""
    done, left = prefix(errors), prefix(gradients)
    return done[None, 1:] - left[:-1, None] + _running_max(left[1:] - done[:-1])
