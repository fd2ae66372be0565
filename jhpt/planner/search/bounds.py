"""The dynamic programme: for every suffix of the layers, the least time that its stages can take.

A stage with forward F, backward B, t = F + B, in flight w of M micro-batches, whose output travels c seconds to a
downstream with round trip D (a micro-batch's way through all later stages and back), starts at `head` = sum over
earlier stages of F + c.  It cannot finish its last backward before head + own, where, because the first backward
waits for the round trip and so does the last one (program order: w forwards, then pairs, then w backwards),

    own = max(F + D, w F) + (M - w) t + max(D + B, w B)                  w < M
    own = max(max(F + D, M F) + M B, M F + D + B)                        w = M
    own >= F + M c + (D - c) + B                                         the link alone: M transfers, then the way back

Under 1f1b the device of stage e runs backward n - 2 (S-1-e) right after forward n.  So forward n of stage s, forward n
of stage e = s + j, the backward after it there, the one of the same micro-batch at s and the forward after that are a
chain, and that last forward is number n + 2 j + 1: a turn of R, the round trip from s to e, moves s by W = 2 j + 1
micro-batches.  Its first 2 (p-1-j) forwards, p stages left, come before the first turn, as many backwards follow the
last, and what k more turns leave of M - 1 steps of t is done between them:

    own >= (k + 1) R + (M - 1 - k W) t = (M - 2 j k) t + (k + 1)(R - t)        0 < k, 2 (p-1-j) + k W < M

Where transfers are in line, a stage takes part in M + p - 1 exchanges in each direction between its first forward and
its last backward; and in between it waits for its neighbours' passes, so that with the next stage's F' and B', once
this is known,

    own >= M t + 2 (M + p - 1) c
    own >= M (max(F, F') + max(B, B')) + min(F, F') + min(B, B') + 2 (M + p - 1) c

After it the errors travel back through the earlier stages, and wherever they arrive gradients are reduced and applied,
after = sync - B + update seconds.  So T >= head + own + (way back to any earlier stage) + after there.  All of it
decomposes over suffixes; with the smallest round trip D per suffix as a relaxation:

    D[p, i] = min over j of  t + 2 c + D[p-1, j]
    V[p, i] = min over j of  max(own, t + 2 c + V[p-1, j]) = v                      back at the suffix's first stage
    Z[p, i] = min over j of  max(v + after, F + c + Z[p-1, j])                      everything done

in O(N^2) for each number p of stages left.  This is the recurrence F[j][k] of Zeng et al. 2021 (min over cuts of a
max) with the ramp, the look-ahead and the gradients inside, so that its value bounds the step time itself instead of
the steady state; enumerating the largest stage time (Zheng et al. 2022, Alpa, equation 2) is not needed.
"""

from dataclasses import dataclass

import numpy as np

from jhpt.planner.cost.schedule import Array


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
