"""Amounts of memory, rates and counts as people write and read them."""

import math
import re
from collections.abc import Mapping

UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}

LEAST = 1024
"""The smallest amount that is accepted, in bytes.  A smaller number has lost its unit."""

_SIZE = re.compile(r"\s*([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*")
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


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


BYTES_PER_SECOND = {f"{unit}/s": float(size) for unit, size in UNITS.items() if unit}
BYTES_PER_SECOND |= {f"{p}bit/s": 1000.0**i / 8 for i, p in enumerate("kMGT", 1)}
BYTES_PER_SECOND |= {f"{p}bps": 1000.0**i / 8 for i, p in enumerate("kMGT", 1)}
"""Units of rates.  `Gb/s` is none: some write it for bytes."""

FLOP_PER_SECOND = {f"{p}{name}": 1000.0**i for i, p in enumerate("GTP", 3) for name in ("FLOP/s", "FLOPS")}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_quantity(value: object, units: Mapping[str, float], example: str) -> float:
    """A number in SI units, or text with one of these units, such as `450GB/s`; at least 0 and finite.

    Raises:
      ValueError: anything else; the message has the example.
    """
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        else:
            number = float(match[1]) * ({"": 1.0} | dict(units))[match[2]] if match else math.nan
    except (ValueError, KeyError, OverflowError):  # 1.2.3; another unit; 10**400
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r:.60} is no such amount; write it as {example}")
    return number


def parse_count(text: float | str) -> float:
    """A number of things with a suffix for thousands: `260B` is 260e9; ValueError for anything else, and below one."""
    match = _QUANTITY.fullmatch(str(text))
    try:
        count = float(match[1]) * COUNTS[match[2].upper()] if match else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise ValueError(f"{text!r} is no number of them; write it as 260B, 1.5T or 3e11 (K, M, B and T are thousands)")
    return count
