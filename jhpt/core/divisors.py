"""Divisors, which decide what can be cut into equal parts, and lists of choices for error messages."""

import math
from collections.abc import Iterable


def divisors(n: int, up_to: int | None = None) -> list[int]:
    """The divisors of `n`, ascending; none of what is below 1."""
    if n < 1:
        return []
    small = [d for d in range(1, min(math.isqrt(n), up_to or n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small if n // d <= (up_to or n))})


def common_divisors(sizes: Iterable[int]) -> list[int]:
    """The numbers that divide every one of `sizes`, ascending."""
    sizes = list(sizes)
    return [d for d in divisors(min(sizes)) if all(size % d == 0 for size in sizes)]


def one_of(choices: Iterable[object]) -> str:
    """`"1, 2 or 4"` for an error message."""
    *rest, last = [str(choice) for choice in choices]
    return f"{', '.join(rest)} or {last}" if rest else last
