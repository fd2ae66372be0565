"""Amounts of memory, read and written."""

import math

import pytest

from jhpt.core.amounts import BYTES_PER_SECOND, enough_gib, gib, parse_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("80GB", 80e9), ("16e9", 16e9), (" 1.5 mib", 1.5 * 2**20), (7000, 7e3)]
)
def test_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", (24, "24", "80 B", "1023"))
def test_without_their_unit(text):
    with pytest.raises(ValueError, match="write the unit, such as 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3", "1e999", "nan", "5 apples"])
def test_what_is_none(text):
    with pytest.raises(ValueError, match="24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("count", "text"), [(24 * 2**30, "24.0 GiB"), (1.06 * 2**30, "1.1 GiB"), (5e4, "0.0477 MiB")])
def test_as_people_read_them(count, text):
    assert gib(count) == text


def test_enough_is_never_less():
    """And no more than a tenth of its unit above."""
    for power in range(10 * 16, 10 * 45):
        count = 1.001 * 2 ** (power / 10)
        unit = 2**20 if count < 0.1 * 2**30 else 2**30
        parsed = parse_bytes(enough_gib(count))
        assert count <= parsed <= math.ceil(count + 0.1 * unit)


@pytest.mark.parametrize(
    ("value", "number"),
    [("450GB/s", 450e9), ("400 Gbit/s", 50e9), ("400Gbps", 50e9), (5e10, 5e10), ("1e9", 1e9), ("2GiB/s", 2 * 2**30)],
)
def test_rates(value, number):
    assert parse_quantity(value, BYTES_PER_SECOND, "450GB/s") == number


@pytest.mark.parametrize("value", ["450Gb/s", "450GB", "-1GB/s", True, None, [], float("nan"), 10**400, "1.2.3GB/s"])
def test_what_is_no_rate(value):
    with pytest.raises(ValueError, match="450GB/s"):
        parse_quantity(value, BYTES_PER_SECOND, "450GB/s")
