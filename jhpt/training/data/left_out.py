"""Data that a run leaves out after it has gone back to an earlier step, because the loss jumped on it.

Steps and data then come apart.  Where nothing is left out, the batch that follows step t is the t-th, counted from 0.
Each time the run goes back to step a, the n batches since are left out: steps after a read n batches further on.
"""

from collections.abc import Sequence

LeftOut = Sequence[Sequence[int]]
"""Pairs (a, n) with a ascending: after step a, n batches are left out."""


def position(step: int, left_out: LeftOut) -> int:
    """The position, from 0, of the batch that follows this step."""
    return step + sum(count for after, count in left_out if after <= step)


def gone_back(left_out: LeftOut, back: int, spike: int) -> LeftOut:
    """What is left out once the run has gone back from step `spike` to step `back`: also the data of the steps since,
    and whatever had been left out among them."""
    kept = [(after, count) for after, count in left_out if after < back]
    first = position(back, kept)
    return (*kept, (back, position(spike - 1, left_out) + 1 - first))
