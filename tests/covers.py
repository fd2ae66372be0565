"""Covering arrays: few cases in which every pair of values still meets."""

import itertools
import random
from collections.abc import Callable, Sequence


def pairwise(*axes: Sequence, where: Callable[..., bool] = lambda *_: True) -> list[tuple]:
    """A small deterministic subset of the product of `axes` that contains every pair of values of every two axes.

    where: cases that there are; a pair that none of them has is left out.
    """
    cases = [case for case in itertools.product(*axes) if where(*case)]
    random.Random(0).shuffle(cases)  # a pair's other values vary
    bits: dict[tuple, int] = {}

    def pairs(case: tuple) -> int:
        """A bit for every pair."""
        found = 0
        for i, j in itertools.combinations(range(len(axes)), 2):
            found |= 1 << bits.setdefault((i, case[i], j, case[j]), len(bits))
        return found

    masks = list(map(pairs, cases))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(cases)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~masks[best]
    return chosen
