"""What stages cost, for every contiguous range of layers at once, and the least time that a step with them takes.

A stage has forward seconds F, backward seconds B and t = F + B.  Of the M micro-batches w are in flight.  A transfer to
the next stage takes c seconds, and the way of a micro-batch through all later stages and back takes D, transfers
included.  The stage starts at `head`: the sum of F + c over the earlier stages.  Its last backward pass ends at
head + E or later.  In every tick it exchanges with both its neighbours, which takes x: the larger of the two transfers.
So a tick takes F + x or B + x, or with both passes P = max(t, x + max(F, B)) (`cost.schedule`).  The first backward
pass waits for the round trip D, and so does the last one (w - 1 ticks without backward pass, M - w + 1 with both, w - 1
without forward pass).  So

    E = max(F + D, (w-1)(F + x) + F) + t + (M - w - 1) P + max(D + B, (w-1)(B + x) + B)                       w < M
    E = max(max(F + D, (M-1)(F + x) + F) + (M-1)(B + x) + B, (M-1)(F + x) + F + D + B)                        w = M
    E >= F + M c + (D - c) + B                                         the link alone: M transfers, then the way back

Under 1f1b the device of stage e runs backward pass n - 2 (S-1-e) right after forward pass n.  So these passes form a
chain: forward n of stage s, forward n of stage e = s + j, the backward pass that follows on e, the backward pass of the
same micro-batch on s, and the forward pass that follows on s.  The last of them is forward n + 2 j + 1: one round trip
from s to e takes R seconds and advances s by W = 2 j + 1 micro-batches.  With p stages left, the first 2 (p-1-j)
forward passes of s come before the first round trip, and as many backward passes follow the last one.  After k more,
M - 1 - k W steps of t are left to do in between:

    E >= (k + 1) R + (M - 1 - k W) t = (M - 2 j k) t + (k + 1)(R - t)        0 < k, 2 (p-1-j) + k W < M

If transfers are in line, a stage takes part in M + p - 1 exchanges in each direction between its first forward and its
last backward pass, and between exchanges it waits for its neighbours' passes.  With F' and B' of the next stage, once
it is known,

    E >= M t + 2 (M + p - 1) c
    E >= M (max(F, F') + max(B, B')) + min(F, F') + min(B, B') + 2 (M + p - 1) c

Under 1f1b every two passes have an exchange between them, after the forward pass with the next stage and after the
backward pass with the one before, which takes c' seconds.  So with tau = t + c + c' the backward passes are tau apart
while forward passes are left, B + c + c' from then on, and each of the last forward passes makes a whole round trip:

    E >= F + D + (M - w) tau + (w - 1)(B + c + c') + B
    E >= 2 (F + D + B) + c' + (M - 1 - w) tau                                                     w < M
    E >= (k + 1)(F + D + B) + k c' + (M - 1 - k w)(B + c + c')                                    k = floor((M-1)/w)

After that the errors travel back through the earlier stages.  At each stage gradients are then reduced and applied,
which takes after = sync - B + update seconds.  So a step takes T >= head + E + (way back to any earlier stage) + after
of that stage.  All of this decomposes over suffixes if D is relaxed to the smallest round trip of each suffix:

    D[p, i] = min over j of  t + 2 c + D[p-1, j]
    V[p, i] = min over j of  max(E, t + 2 c + V[p-1, j]) = v                        back at the suffix's first stage
    Z[p, i] = min over j of  max(v + after, F + c + Z[p-1, j])                      everything done

in O(N^2) for each number p of stages left.  This is the recurrence F[j][k] of Zeng et al. 2021 (min over cuts of a
max) with the ramp, the look-ahead and the gradients included.  So its value bounds the step time itself instead of the
steady state, and the largest stage time need not be enumerated (Zheng et al. 2022, Alpa, equation 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jhpt.planner.cost.layers import LayerCosts
from jhpt.planner.cost.memory import Slot
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array

NEAR = 2
"""How many next stages have a bound of their round trip beside the bound for all later stages."""

SLACK = 1e-9
"""Relative tolerance for sums of the same numbers in a different order."""


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
      local: samples of a micro-batch on one device, or the share of them that sequence parallelism leaves; the transfer
        buffers hold that many.
    """
    errors = costs.backward + costs.backward_tensor
    first, last = costs.forward_filling[:, None], costs.backward_filling[None, :]
    update, state = range_sums(costs.update) + slot.seconds(used=False), range_sums(costs.state) + slot.state
    used = slot.seconds(used=True) - slot.seconds(used=False)
    update[0, :] += used
    update[:, -1] += used
    if (tied := model.tied_layer) is not None:
        update[1 : tied + 1, tied:] += costs.tied[tied] + costs.tied_update[tied]
        state[1 : tied + 1, tied:] += costs.tied_bytes[tied]
        update[0, :tied] += costs.tied[tied]
    received = np.concatenate([[0.0], model.boundary[:-1]])
    sent = np.concatenate([model.boundary[:-1], [0.0]])
    return Ranges(
        forward=range_sums(costs.forward + costs.forward_tensor) + first,
        backward=range_sums(errors) + last,
        sync=_sync(errors, costs.gradients) + last,
        update=update,
        state=state,
        activations=range_sums(costs.activations) + slot.output,
        working=_running_max(costs.working) + 2 * local * (received[:, None] + sent[None, :]),
    )


def prefix_sums(values: Array) -> Array:
    """[N + 1] sums of the first 0, 1, ..., N values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def range_sums(values: Array) -> Array:
    """[i, j] sum of values i..j."""
    total = prefix_sums(values)
    return total[None, 1:] - total[:-1, None]


def _running_max(values: Array) -> Array:
    """[i, j] largest of values i..j."""
    n = len(values)
    started = np.arange(n)[None, :] >= np.arange(n)[:, None]
    return np.where(started, np.maximum.accumulate(np.where(started, values[None, :], -np.inf), axis=1), 0.0)


def _sync(errors: Array, gradients: Array) -> Array:
    """[i, j] max over l in i..j of (sum of errors l..j + sum of gradients i..l); see `layers.sync_seconds`."""
    done, left = prefix_sums(errors), prefix_sums(gradients)
    return done[None, 1:] - left[:-1, None] + _running_max(left[1:] - done[:-1])


@dataclass(frozen=True)
class StageTerms:
    """The seconds of a stage; the arrays hold one entry for each way to choose it."""

    forward: Array
    backward: Array
    sync: Array
    update: Array


def stage_seconds(
    stage: StageTerms, transfer: Array, beyond: Array, window: int, micro_batches: int, before: Array | float = 0.0
) -> Array:
    """E: least seconds from a stage's start to the end of its last backward pass.

    Args:
      transfer: seconds of the transfer to the next stage; 0 for the last stage.
      beyond: least round trip of the later stages, without this transfer; 0 for the last stage.
      window: micro-batches in flight.
      before: seconds of the transfer from the stage before, if it is known.
    """
    f, b, m, w = stage.forward, stage.backward, micro_batches, window
    trip, exchange = 2 * transfer + beyond, np.maximum(transfer, before)
    first, last = w * f + (w - 1) * exchange, w * b + (w - 1) * exchange  # never 0 times an infinite pass
    if w < m:
        more = m - w - 1
        both = np.maximum((more + 1) * (f + b), f + b + np.maximum(f, b) * more + exchange * more) if more else f + b
        seconds = np.maximum(f + trip, first) + both + np.maximum(trip + b, last)
    else:
        seconds = np.maximum(np.maximum(f + trip, first) + last, first + trip + b)
    return np.maximum(seconds, f + (m + 1) * transfer + beyond + b)


def stage_seconds_in_turn(
    stage: StageTerms, transfer: Array, beyond: Array, window: int, micro_batches: int, before: Array | float = 0.0
) -> Array:
    """E under 1f1b; arguments as of `stage_seconds`."""
    trip, hops = stage.forward + 2 * transfer + beyond, transfer + before
    alone, both = stage.backward + hops, stage.forward + stage.backward + hops
    left, rounds = micro_batches - window, (micro_batches - 1) // window
    seconds = trip + (window - 1) * alone + stage.backward
    if left:
        seconds = seconds + left * both
        twice = 2 * (trip + stage.backward) + before
        seconds = np.maximum(seconds, twice + (left - 1) * both if left > 1 else twice)
    again = (rounds + 1) * (trip + stage.backward) + rounds * before
    return np.maximum(seconds, again + (micro_batches - 1 - rounds * window) * alone)


def after(stage: StageTerms) -> Array:
    """Seconds from the end of a stage's last backward pass until its parameters are updated."""
    return stage.sync - stage.backward + stage.update


def round_trips(micro_batches: int, stages_left: int, ahead: int) -> int:
    """Most round trips k after the first, under 1f1b, between a stage and the stage that comes `ahead` stages later."""
    return max(0, (micro_batches - 1 - 2 * (stages_left - 1 - ahead)) // (2 * ahead + 1))


def round_trip_seconds(
    stage: StageTerms, transfer: Array, ahead: Mapping[int, Array], micro_batches: int, left: int
) -> Array:
    """E under 1f1b, by the round trips from a stage to later ones.

    Args:
      ahead: by the number j of the next stages, the least seconds of a round trip through them, without this transfer.
      left: number of stages left, this one included.
    """
    both, least = stage.forward + stage.backward, np.zeros_like(stage.forward)
    for j, seconds in ahead.items():
        if j and (k := round_trips(micro_batches, left, j)):
            least = np.maximum(least, (micro_batches - 2 * j * k) * both + (k + 1) * (2 * transfer + seconds))
    return least


def stage_seconds_gpipe(
    stage: StageTerms, transfer: Array, beyond: Array, micro_batches: int, before: Array | float = 0.0
) -> Array:
    """E under gpipe: no exchange runs beside a pass, and the last micro-batch makes a round trip."""
    both, exchange = stage.forward + stage.backward, np.maximum(transfer, before)
    return micro_batches * both + 2 * (micro_batches - 1) * exchange + 2 * transfer + beyond


def stage_seconds_in_line(stage: StageTerms, transfer: Array, micro_batches: int, left: int) -> Array:
    """E if transfers are part of the program: an exchange before and after every pass occupies the stage.

    Args:
      transfer: seconds of the exchange with a neighbour.
      left: number of later stages.  This stage takes part in exchanges until their last forward pass, and from their
        first backward pass on.
    """
    return micro_batches * (stage.forward + stage.backward) + 2 * (micro_batches + left) * transfer


def pair_seconds_in_line(
    stage: StageTerms, following: StageTerms, transfer: Array, micro_batches: int, left: int
) -> Array:
    """`stage_seconds_in_line` if the next stage is known: between two exchanges each waits for the other's pass."""
    longer = np.maximum(stage.forward, following.forward) + np.maximum(stage.backward, following.backward)
    shorter = np.minimum(stage.forward, following.forward) + np.minimum(stage.backward, following.backward)
    return micro_batches * longer + shorter + 2 * (micro_batches + left) * transfer
