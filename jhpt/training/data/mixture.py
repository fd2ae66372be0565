"""Several sources as one sequence of windows, in which each has its share of every stretch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

ENDLESS = 2**62
"""The length of a sequence without an end."""


class Sequences(Protocol):
    """Sequences of tokens by index: `Windows` or a `Mixture`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


def turn(index: int, shares: Sequence[int]) -> tuple[int, int]:
    """(source, position in it) of an item of an endless sequence in which sources take turns.

    Of `sum(shares)` items in a row, each source gives as many as its share, evenly spread.  Of the first n items,
    floor(n rest / (share + rest)) belong to the sources behind the first; the item is the first source's if it does not
    raise that number, and else an item of the sequence of the others.
    """
    rest = sum(shares)
    for source, share in enumerate(shares):
        whole, rest = rest, rest - share
        before, after = index * rest // whole, (index + 1) * rest // whole
        if before == after:
            return source, index - before
        index = before
    raise AssertionError("shares are positive")


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of the weights as they are written: 0.7 and 0.3 are 7 and 3."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    return tuple(number // math.gcd(*numbers) for number in numbers)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Windows of several sources, which take turns by their shares.

    By index a source begins again after its last window.  With the sources' lengths as shares, the first `len` windows
    are all windows once, and any stretch of them has every source in proportion to its size.
    """

    sources: tuple[Sequences, ...]
    shares: tuple[int, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> np.ndarray:
        source, position = turn(index, self.shares)
        return self.sources[source][position % len(self.sources[source])]


class Turns:
    """The endless sequence of `turn`, as grain reads it."""

    def __init__(self, shares: Sequence[int]):
        self._shares = tuple(shares)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[int, int]:
        return turn(index, self._shares)
