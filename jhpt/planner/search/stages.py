"""What stages cost, for every contiguous range of layers at once, and the least time that a step with them takes.

A stage has forward seconds F, backward seconds B and t = F + B.  w of the M micro-batches are in flight.  Its output
travels c seconds to the stages after it, whose round trip (a micro-batch's way through all of them and back) takes D.
The stage starts at `head` = sum over earlier stages of F + c.  Its last backward pass ends at head + busy or later.
The first backward pass waits for the round trip, and so does the last one (program order: w forward passes, then
pairs, then w backward passes), so

    busy = max(F + D, w F) + (M - w) t + max(D + B, w B)                  w < M
    busy = max(max(F + D, M F) + M B, M F + D + B)                        w = M
    busy >= F + M c + (D - c) + B                                         the link alone: M transfers, then the way back

Under 1f1b the device of stage e runs backward pass n - 2 (S-1-e) right after forward pass n.  So these form a chain:
forward n of stage s, forward n of stage e = s + j, the backward after it there, the backward of the same micro-batch at
s, and the forward after that.  This last forward is number n + 2 j + 1: a turn of R seconds, the round trip from s to
e, moves s on by W = 2 j + 1 micro-batches.  With p stages left, the first 2 (p-1-j) forwards of s come before the first
turn and as many backwards follow the last one.  The steps of t that k more turns leave of M - 1 take place in between:

    busy >= (k + 1) R + (M - 1 - k W) t = (M - 2 j k) t + (k + 1)(R - t)        0 < k, 2 (p-1-j) + k W < M

If transfers are in line, a stage takes part in M + p - 1 exchanges in each direction between its first forward and its
last backward pass.  In between it waits for its neighbours' passes.  So, with F' and B' of the next stage once they are
known,

    busy >= M t + 2 (M + p - 1) c
    busy >= M (max(F, F') + max(B, B')) + min(F, F') + min(B, B') + 2 (M + p - 1) c

After that the errors travel back through the earlier stages.  At each stage gradients are then reduced and applied,
which takes after = sync - B + update seconds.  So T >= head + busy + (way back to any earlier stage) + after there.
All of this decomposes over suffixes if D is relaxed to the smallest round trip of each suffix:

    D[p, i] = min over j of  t + 2 c + D[p-1, j]
    V[p, i] = min over j of  max(busy, t + 2 c + V[p-1, j]) = v                     back at the suffix's first stage
    Z[p, i] = min over j of  max(v + after, F + c + Z[p-1, j])                      everything done

in O(N^2) for each number p of stages left.  This is the recurrence F[j][k] of Zeng et al. 2021 (min over cuts of a
max) with the ramp, the look-ahead and the gradients included.  So its value bounds the step time itself instead of the
steady state, and the largest stage time need not be enumerated (Zheng et al. 2022, Alpa, equation 2).
"""

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


@dataclass(frozen=True)
class StageTerms:
    """One stage's seconds, broadcast over its choices."""

    forward: Array
    backward: Array
    sync: Array
    update: Array


def own_seconds(stage: StageTerms, transfer: Array, beyond: Array, window: int, micro_batches: int) -> Array:
    """Least seconds from a stage's start to the end of its last backward.

    Args:
      transfer: seconds of the transfer to the next stage; 0 for the last.
      beyond: least round trip of the stages after it, without this transfer; 0 for the last.
      window: micro-batches in flight.
    """
    f, b, m, w = stage.forward, stage.backward, micro_batches, window
    trip = 2 * transfer + beyond
    if w < m:
        own = np.maximum(f + trip, w * f) + (m - w) * (f + b) + np.maximum(trip + b, w * b)
    else:
        own = np.maximum(np.maximum(f + trip, m * f) + m * b, m * f + trip + b)
    return np.maximum(own, f + (m + 1) * transfer + beyond + b)


def after(stage: StageTerms) -> Array:
    """Seconds from the end of a stage's last backward until its parameters are updated."""
    return stage.sync - stage.backward + stage.update


def turns(micro_batches: int, stages_left: int, ahead: int) -> int:
    """Most turns k between a stage and the one `ahead` of it under 1f1b, after the first."""
    return max(0, (micro_batches - 1 - 2 * (stages_left - 1 - ahead)) // (2 * ahead + 1))


def own_gpipe_seconds(stage: StageTerms, transfer: Array, beyond: Array, micro_batches: int) -> Array:
    """The same for gpipe, whose step is at least a round trip and M - 1 times the longest stage."""
    both = stage.forward + stage.backward
    return micro_batches * both + 2 * transfer + beyond


def in_line_seconds(stage: StageTerms, transfer: Array, micro_batches: int, left: int) -> Array:
    """The same where transfers are part of the program: an exchange before and after every pass holds the stage.

    Args:
      transfer: seconds of the exchange with a neighbour.
      left: number of later stages; this stage exchanges data until their last forward and from their first backward.
    """
    return micro_batches * (stage.forward + stage.backward) + 2 * (micro_batches + left) * transfer


def pair_in_line_seconds(
    stage: StageTerms, following: StageTerms, transfer: Array, micro_batches: int, left: int
) -> Array:
    """The same of a stage whose next one is known: between two exchanges each waits for the other's pass."""
    longer = np.maximum(stage.forward, following.forward) + np.maximum(stage.backward, following.backward)
    shorter = np.minimum(stage.forward, following.forward) + np.minimum(stage.backward, following.backward)
    return micro_batches * longer + shorter + 2 * (micro_batches + left) * transfer
