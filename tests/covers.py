"""Covering arrays: few cases in which every pair of values still meets."""

import itertools
from collections.abc import Sequence


def pairwise(*axes: Sequence) -> list[tuple]:
    """A small deterministic subset of the product of `axes` that contains every pair of values of every two axes."""
    cases = list(itertools.product(*axes))

    def pairs(case: tuple) -> set:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(axes)), 2)}

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
