"""Covering arrays: few cases in which every pair of values still meets."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import pytest


def pairwise(*axes: Sequence, where: Callable[..., bool] = lambda *_: True, seed: int = 0) -> list[tuple]:
    """A small deterministic subset of the product of `axes` that contains every pair of values of every two axes.

    where: cases that there are; a pair that none of them has is left out.
    seed: of the order in which cases are tried; some orders lead to smaller subsets.
    """
    cases = [case for case in itertools.product(*axes) if where(*case)]
    random.Random(seed).shuffle(cases)  # a pair's other values vary
    bits: dict[tuple, int] = {}

    def pairs(case: tuple) -> int:
        """A bit for every pair."""
        covered = 0
        for i, j in itertools.combinations(range(len(axes)), 2):
            covered |= 1 << bits.setdefault((i, case[i], j, case[j]), len(bits))
        return covered

    masks = list(map(pairs, cases))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(cases)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~masks[best]
    return chosen


def quick_and_exhaustive(cases: Iterable, quick: Iterable) -> list:
    """Parameters of a test: the cases in `quick` run always, the others under `-m exhaustive` only.

    Raises:
      ValueError: `quick` names a case that is not there.
    """
    cases, quick = list(cases), list(quick)
    if missing := [case for case in quick if case not in cases]:
        raise ValueError(f"no such case: {missing}")

    def parameter(case):
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in quick else pytest.mark.exhaustive)

    return [parameter(case) for case in cases]
