"""The text of a compiled program (HLO), read into computations and instructions.

Attributes are kept as text and parsed when they are read.  Format: `HloModule::ToString`, as printed by jaxlib 0.10 and
newer; in a scheduled module the order of instructions is the order in which they are issued.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ELEMENT_BYTES = {"pred": 1.0, "token": 0.0, "c64": 8.0, "c128": 16.0}
"""Bytes by the name of an element type; for other types the first number in the name is their bits."""

_LEAF = re.compile(r"(\w+)\[([^\]]*)\](?:\{([\d,]*))?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_NAME = re.compile(r"%([^\s,(){}]+)")
_OPCODE = re.compile(r"\s*([\w-]+)\(")


@dataclass(frozen=True)
class Array:
    """One array of a shape.  order: minor to major; empty if the text has none."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes of all elements."""
        return self.elements * element_bytes(self.dtype)

    @property
    def row_major(self) -> bool:
        """Whether the last dimension varies fastest, not counting dimensions of one entry."""
        wide = [dim for dim in self.order if self.dims[dim] > 1]
        return wide == sorted(wide, reverse=True)


def element_bytes(dtype: str) -> float:
    """Bytes of an element, such as 4.0 for `f32`."""
    bits = re.search(r"\d+", dtype)
    return ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else int(bits[0]) / 8 if bits else 0.0


@dataclass(frozen=True)
class Instruction:
    """One line.  inside: the text between the brackets after the opcode.  tail: the attributes."""

    name: str
    opcode: str
    shape: str
    inside: str
    tail: str

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result; those of a tuple in order."""
        return tuple(
            Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), _numbers(order or ""))
            for dtype, dims, order in _LEAF.findall(self.shape)
        )

    @property
    def is_tuple(self) -> bool:
        """Whether its result is a tuple."""
        return self.shape.startswith("(")

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(_NAME.findall(self.inside))

    def attribute(self, name: str) -> str | None:
        """The text after `name=`, with its brackets; None if there is no such attribute."""
        match = re.search(rf"(?:^|[,\s]){name}=", self.tail)
        return None if match is None else value_at(self.tail, match.end())

    def called(self, name: str) -> str:
        """The computation that an attribute names."""
        return (self.attribute(name) or "").lstrip("%")

    def numbers(self, name: str) -> tuple[int, ...]:
        """`{0,2}` as (0, 2); of a missing attribute ()."""
        return _numbers(self.attribute(name) or "")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's configuration of the instruction."""
        text = self.attribute("backend_config")
        return json.loads(text) if text and text.startswith("{") else {}


@dataclass(frozen=True)
class Computation:
    """Instructions in order.  root: the name of the one whose value is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, by number."""
        numbered = {int(i.inside): i.name for i in self if i.opcode == "parameter"}
        return tuple(numbered[n] for n in sorted(numbered))


@dataclass(frozen=True)
class Module:
    """A program."""

    computations: Mapping[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def read(text: str) -> Module:
    """The module that the text describes."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    lines: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith("}"):
            computations[name] = Computation(name, lines, root)
        elif line.startswith((" ", "\t")):
            if match := _INSTRUCTION.match(line):
                one = _instruction(match[2], line, match.end())
                lines[one.name] = one
                root = one.name if match[1] else root
        elif match := _HEADER.match(line):
            name, lines, root = match[2], {}, ""
            entry = name if match[1] else entry
    return Module(computations, entry)


def text_of(compiled: Any) -> str:
    """The text of a `jax.stages.Compiled`, with all its constants; `as_text` leaves large ones out."""
    (module,) = compiled.runtime_executable().hlo_modules()
    options = sys.modules[type(module).__module__].HloPrintOptions()  # moved between jaxlib's modules more than once
    options.print_large_constants = True
    options.print_operand_shape = False
    return str(module.to_string(options))


def value_at(text: str, start: int) -> str:
    """The value that begins at `start`: up to a comma or blank outside brackets and quotes."""
    depth, quoted, index = 0, False, start
    while index < len(text):
        char = text[index]
        if quoted:
            index += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif depth == 0 and char in ", ":
            break
        index += 1
    return text[start:index]


def _instruction(name: str, line: str, start: int) -> Instruction:
    stop = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    match = _OPCODE.match(line, stop)
    assert match, line
    end = _closing(line, match.end() - 1)
    return Instruction(name, match[1], line[start:stop], line[match.end() : end - 1], line[end:].lstrip(", "))


def _closing(text: str, start: int) -> int:
    """One past the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"-?\d+", text))
