"""Whole numbers of a program come to what the compiler's own arithmetic makes of them."""

import operator

import jax
import numpy as np
import pytest

from jhpt.compiled.evaluate import DTYPES, UNKNOWN, Frame
from jhpt.compiled.hlo import read


def evaluated(*lines, device=0):
    """The value of the last of a program's instructions."""
    *others, last = lines
    body = "\n".join([*(f"  {line}" for line in others), f"  ROOT {last}"])
    module = read(f"ENTRY %main () -> any {{\n{body}\n}}\n")
    entry = module[module.entry]
    return Frame(module, entry, [], device).value(entry.root)


def constant(name, dtype, numbers):
    return f"%{name} = {dtype}[{len(numbers)}]{{0}} constant({{{', '.join(map(str, numbers))}}})"


UNARY = {"not": operator.invert, "negate": jax.lax.neg, "abs": jax.lax.abs, "sign": jax.lax.sign}
BINARY = {
    "add": jax.lax.add,
    "subtract": jax.lax.sub,
    "multiply": jax.lax.mul,
    "divide": jax.lax.div,
    "remainder": jax.lax.rem,
    "minimum": jax.lax.min,
    "maximum": jax.lax.max,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
    "xor": jax.lax.bitwise_xor,
    "shift-left": jax.lax.shift_left,
    "shift-right-arithmetic": jax.lax.shift_right_arithmetic,
    "shift-right-logical": jax.lax.shift_right_logical,
}
WHOLE = [name for name in DTYPES if name not in ("pred", "s64", "u64")]  # of 64 bits: examples


def edges(dtype):
    """Every pair of numbers where something changes."""
    info = np.iinfo(DTYPES[dtype])
    some = sorted(
        {info.min, info.min + 1, info.max - 1, info.max, 0, 1, 3, 7, 31, 100} | ({-1, -8} if info.min else set())
    )
    return np.array([(a, b) for a in some for b in some], DTYPES[dtype]).T


@pytest.mark.parametrize(
    ("opcode", "dtype"),
    [(opcode, dtype) for opcode in (*UNARY, *BINARY) for dtype in WHOLE if (opcode, dtype[0]) != ("abs", "u")],
)
def test_arithmetic_is_that_of_the_element_type(opcode, dtype):
    a, b = edges(dtype)
    shape = f"{dtype}[{len(a)}]{{0}}"
    operands = "%a" if opcode in UNARY else "%a, %b"
    actual = evaluated(constant("a", dtype, a), constant("b", dtype, b), f"%r = {shape} {opcode}({operands})")
    expected = jax.jit(UNARY[opcode])(a) if opcode in UNARY else jax.jit(BINARY[opcode])(a, b)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("source", WHOLE)
def test_conversions_wrap(source):
    (a, _) = edges(source)
    for target in (*WHOLE, "pred"):
        actual = evaluated(constant("a", source, a), f"%r = {target}[{len(a)}]{{0}} convert(%a)")
        np.testing.assert_array_equal(actual, jax.lax.convert_element_type(a, DTYPES[target]))


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (("%a = s32[] constant(-8)", "%b = s32[] constant(1)", "%r = s32[] shift-right-logical(%a, %b)"), 2147483644),
        (("%a = u32[] constant(0)", "%r = u32[] not(%a)"), 4294967295),
        (("%a = s32[] constant(2147483647)", "%b = s32[] constant(1)", "%r = s32[] add(%a, %b)"), -2147483648),
        (("%a = s32[] constant(300)", "%r = u8[] convert(%a)"), 44),
        (("%a = u64[] constant(18446744073709551615)", "%b = u64[] constant(2)", "%r = u64[] add(%a, %b)"), 1),
        (("%a = s64[] constant(-2)", "%b = s64[] constant(60)", "%r = s64[] shift-right-logical(%a, %b)"), 15),
        (("%a = pred[] constant(true)", "%r = pred[] not(%a)"), False),
        (("%a = s32[] constant(-1)", "%b = u32[] convert(%a)", "%r = s64[] convert(%b)"), 4294967295),
        (("%a = u32[] partition-id()", "%b = u32[] constant(4)", "%r = u32[] subtract(%a, %b)"), 4294967295),
        (("%a = s4[] constant(7)", "%b = s4[] constant(1)", "%r = s4[] add(%a, %b)"), UNKNOWN),
        (("%a = s4[] constant(7)", "%r = s32[] convert(%a)"), UNKNOWN),
        (("%a = f32[] constant(7)", "%r = s32[] convert(%a)"), UNKNOWN),
    ],
)
def test_single_numbers(lines, value):
    assert evaluated(*lines, device=3) == value


def test_unsigned_numbers_are_compared_as_such():
    lines = ("%a = u32[] constant(0)", "%b = u32[] not(%a)", "%r = pred[] compare(%a, %b), direction=LT")
    assert evaluated(*lines)
