"""Amounts of memory as people write and read them."""

import math
import re

UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}

LEAST = 1024
"""The smallest amount that is accepted, in bytes.  A smaller number has lost its unit."""

_SIZE = re.compile(r"\s*([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: float | str) -> float:
    """Bytes of `24GiB`, `80GB` or `16e9`; ValueError for anything else, and for a number without its unit."""
    match = _SIZE.fullmatch(str(text))
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    try:
        size = float(match[1]) * unit if match and unit else 0.0
    except ValueError:  # 1.2.3
        size = 0.0
    if not 0 < size < float("inf"):
        raise ValueError(f"{text!r} is no amount of memory; write it as 24GiB, 80GB or 16e9")
    if size < LEAST:
        raise ValueError(f"{text!r} is {size:g} bytes, in which nothing fits; write the unit, such as 24GiB or 80GB")
    return size


def gib(count: float) -> str:
    """Bytes as `3.2 GiB`; less than a tenth of one in MiB."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 0.1 * 2**30 else f"{count / 2**20:.3g} MiB"


def enough_gib(count: float) -> str:
    """As `gib`, but rounded up: whoever makes this much available has enough."""
    if count >= 0.1 * 2**30:
        return f"{math.ceil(10 * count / 2**30) / 10:.1f} GiB"
    return f"{math.ceil(10 * count / 2**20) / 10:.1f} MiB"
