"""The integers of a compiled program, computed for one device: which branches it takes, how often its loops run.

Control flow depends on few numbers: the device's index, loop counters, and tables such as a schedule, which are
constants of the program.  Values are computed on demand, backwards from where they are needed, and wrap around as their
element type does.  Everything that does not consist of integers is UNKNOWN.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jhpt.compiled.hlo import Array, Computation, Instruction, Module

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}
"""Element types that are followed; narrower ones do not decide control flow."""

LARGEST = 1 << 16
"""Elements of the largest array that is followed; schedules are smaller."""

MOST_ROUNDS = 1 << 14
"""Iterations of a loop whose condition has to be evaluated.  A training step has one per tick, micro-batch or layer."""


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()

Value = Any
"""A numpy array, a tuple of `Reference`, or UNKNOWN."""


@dataclass
class Frame:
    """One execution of a computation on one device."""

    module: Module
    computation: Computation
    arguments: Sequence["Reference"]
    device: int
    values: dict[str, Value] = field(default_factory=dict)

    def reference(self, name: str) -> "Reference":
        """A reference to a value, which is computed when it is read."""
        return Reference(self, name)

    def value(self, name: str) -> Value:
        """The value of an instruction, in its element type."""
        if name not in self.values:
            instruction = self.computation[name]
            self.values[name] = _typed(self._value(instruction), instruction)
        return self.values[name]

    def inner(self, computation: str, arguments: Sequence["Reference"]) -> "Frame":
        """An execution that this one calls."""
        return Frame(self.module, self.module[computation], arguments, self.device)

    def branch(self, conditional: Instruction) -> tuple[str, "Reference"] | None:
        """The computation that a conditional runs, and its argument; None if it is not known."""
        chosen = self.value(conditional.operands[0])
        if chosen is UNKNOWN:
            return None
        branches = branches_of(conditional)
        if self.computation[conditional.operands[0]].arrays[0].dtype == "pred":
            index = 0 if chosen.item() else 1
        else:  # numbers out of range mean the last one
            index = int(chosen.item())
            index = index if 0 <= index < len(branches) else len(branches) - 1
        return branches[index], self.reference(conditional.operands[1 + index])

    def _value(self, instruction: Instruction) -> Value:
        if not instruction.is_tuple and not _followed(instruction.arrays[0]):
            return UNKNOWN
        match instruction.opcode:
            case "parameter":
                return self.arguments[int(instruction.inside)].get()
            case "tuple":
                return tuple(self.reference(name) for name in instruction.operands)
            case "get-tuple-element":
                whole = self.value(instruction.operands[0])
                return UNKNOWN if whole is UNKNOWN else whole[instruction.numbers("index")[0]].get()
            case "fusion" | "call":
                called = instruction.called("calls") or instruction.called("to_apply")
                return self._result(called, [self.reference(name) for name in instruction.operands])
            case "conditional":
                branch = self.branch(instruction)
                return UNKNOWN if branch is None else self._result(branch[0], [branch[1]])
            case "while":
                return self._after(instruction)
            case "partition-id":
                return np.array(self.device)
            case "replica-id":
                return np.array(0)
            case "constant":
                return _literal(instruction)
        return self._computed(instruction)

    def _result(self, computation: str, arguments: Sequence["Reference"]) -> Value:
        """The result of a computation."""
        inner = self.inner(computation, arguments)
        return inner.value(inner.computation.root)

    def _computed(self, instruction: Instruction) -> Value:
        """The result of one of `OPERATIONS`."""
        operation = OPERATIONS.get(instruction.opcode)
        if operation is None:
            return UNKNOWN
        operands = [self.value(name) for name in instruction.operands]
        if any(value is UNKNOWN for value in operands):
            return UNKNOWN
        arrays = [self.computation[name].arrays[0] for name in instruction.operands]
        with np.errstate(all="ignore"):  # numbers wrap around, and divisions by zero have a result
            return operation(instruction, arrays, *operands)

    def _after(self, loop: Instruction) -> Value:
        """The state after a loop: the elements that it does not change; control flow does not need the others."""
        state = self.value(loop.operands[0])
        if state is UNKNOWN:
            return UNKNOWN
        same = unchanged(self.module[loop.called("body")])
        return tuple(old if index in same else KNOWN_BY_NOBODY for index, old in enumerate(state))


@dataclass(frozen=True)
class Reference:
    """A value of a frame; without a frame it is unknown."""

    frame: Frame | None
    name: str

    def get(self) -> Value:
        """The value."""
        return UNKNOWN if self.frame is None else self.frame.value(self.name)


KNOWN_BY_NOBODY = Reference(None, "")


class Unclear(Exception):
    """The number of iterations of a loop is not known."""


def rounds(outer: Frame, loop: Instruction) -> Iterator[Frame]:
    """The executions of a loop's body, one after the other.

    Raises:
      Unclear: the loop's condition does not depend on integers alone, or the loop has too many iterations to follow.
    """
    body = outer.module[loop.called("body")]
    same, root, trips = unchanged(body), body[body.root], trip_count(loop)
    start = outer.value(loop.operands[0])
    state = tuple(KNOWN_BY_NOBODY for _ in root.operands) if start is UNKNOWN else start
    for _ in range(MOST_ROUNDS if trips is None else trips):
        argument = [_holding(outer, body, "state", state)]
        if trips is None and not _goes_on(outer.inner(loop.called("condition"), argument)):
            return
        frame = outer.inner(body.name, argument)
        yield frame
        # Counters are computed now, because a chain of references to the first iteration would grow with every one.
        state = tuple(
            old if index in same else _settled(frame, name)
            for index, (old, name) in enumerate(zip(state, root.operands, strict=True))
        )
    if trips is None:
        raise Unclear


def _goes_on(test: Frame) -> bool:
    value = test.value(test.computation.root)
    if value is UNKNOWN:
        raise Unclear
    return bool(value.item())


def _holding(like: Frame, computation: Computation, name: str, value: Value) -> Reference:
    """A reference to a value that is already known."""
    return Frame(like.module, computation, (), like.device, {name: value}).reference(name)


def _settled(frame: Frame, name: str) -> Reference:
    """A reference to the value itself, if it is a single integer."""
    one = frame.computation[name]
    if one.is_tuple or not _followed(one.arrays[0]) or one.arrays[0].elements != 1:
        return KNOWN_BY_NOBODY
    return _holding(frame, frame.computation, name, frame.value(name))


def unchanged(body: Computation) -> frozenset[int]:
    """The elements of a loop's state that its body does not change."""
    root = body[body.root]
    if root.opcode != "tuple":
        return frozenset()
    (parameter,) = body.parameters
    indices = set()
    for index, name in enumerate(root.operands):
        one = body[name]
        while one.opcode in ("copy", "bitcast") and one.shape == body[one.operands[0]].shape:
            one = body[one.operands[0]]
        if one.opcode == "get-tuple-element" and one.operands == (parameter,) and one.numbers("index") == (index,):
            indices.add(index)
    return frozenset(indices)


def trip_count(loop: Instruction) -> int | None:
    """The number of iterations of a loop, if the compiler states it."""
    count = loop.config.get("known_trip_count", {}).get("n")
    return None if count is None else int(count)


def branches_of(conditional: Instruction) -> tuple[str, ...]:
    """The computations that a conditional chooses from."""
    if text := conditional.attribute("branch_computations"):
        return tuple(re.findall(r"%?([\w.$-]+)", text))
    return conditional.called("true_computation"), conditional.called("false_computation")


def _followed(array: Array) -> bool:
    return array.dtype in DTYPES and array.elements <= LARGEST


def _typed(value: Value, instruction: Instruction) -> Value:
    """An array in the element type of the instruction that it came from."""
    if value is UNKNOWN or isinstance(value, tuple):
        return value
    return np.asarray(value).astype(DTYPES[instruction.arrays[0].dtype], copy=False)


def _literal(instruction: Instruction) -> Value:
    array = instruction.arrays[0]
    words = re.findall(r"-?\d+|true|false", instruction.inside)
    numbers = [word == "true" if word in ("true", "false") else int(word) for word in words]
    if len(numbers) != array.elements:
        return UNKNOWN
    return np.array(numbers, DTYPES[array.dtype]).reshape(array.dims)


# Operations: (instruction, shapes of the operands, values of the operands) -> value, which `_typed` converts to the
# instruction's element type.

Operation = Callable[..., Value]


def _each(function: Callable[..., Any]) -> Operation:
    return lambda instruction, arrays, *values: function(*values)


def _quotient(a: Any, b: Any) -> Any:
    """The quotient, rounded towards zero; all ones for a division by zero."""
    return np.where(b == 0, np.invert(np.zeros_like(a)), (a - np.fmod(a, b)) // b)


def _remainder(a: Any, b: Any) -> Any:
    """The remainder of `_quotient`, which has the sign of `a`."""
    return np.where(b == 0, a, np.fmod(a, b))


def _shifted_as(kind: str) -> Operation:
    """A shift to the right of unsigned integers ("u", which fills with zeros) or signed ones ("i", with the sign)."""

    def shifted(a: Any, b: Any) -> Any:
        dtype = np.dtype(f"{kind}{a.dtype.itemsize}")
        return np.right_shift(a.view(dtype), b.view(dtype))

    return _each(shifted)


def _same(x: Any) -> Any:
    return x


def _compare(instruction: Instruction, arrays: Any, a: Any, b: Any) -> Value:
    return COMPARISONS[instruction.attribute("direction") or "EQ"](a, b)


def _reshape(instruction: Instruction, arrays: Sequence[Array], value: Any) -> Value:
    target = instruction.arrays[0]
    alike = target.dtype == arrays[0].dtype and target.elements == arrays[0].elements
    straight = instruction.opcode == "reshape" or (target.row_major and arrays[0].row_major)
    return value.reshape(target.dims) if alike and straight else UNKNOWN


def _broadcast(instruction: Instruction, arrays: Any, value: Any) -> Value:
    dims, mapped = instruction.arrays[0].dims, instruction.numbers("dimensions")
    shape = [dims[dim] if dim in mapped else 1 for dim in range(len(dims))]
    return np.broadcast_to(value.reshape(shape), dims)


def _iota(instruction: Instruction, arrays: Any) -> Value:
    dims, along = instruction.arrays[0].dims, (*instruction.numbers("iota_dimension"), 0)[0]
    shape = [size if dim == along else 1 for dim, size in enumerate(dims)]
    return np.broadcast_to(np.arange(dims[along] if dims else 1).reshape(shape), dims)


def _slice(instruction: Instruction, arrays: Any, value: Any) -> Value:
    spans = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", instruction.attribute("slice") or "")
    return value[tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in spans)]


def _starts(dims: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    """The slices at these starts, clamped as in XLA."""
    first = [min(max(int(s.item()), 0), d - n) for d, n, s in zip(dims, sizes, starts, strict=True)]
    return tuple(slice(at, at + n) for at, n in zip(first, sizes, strict=True))


def _dynamic_slice(instruction: Instruction, arrays: Any, value: Any, *starts: Any) -> Value:
    return value[_starts(value.shape, instruction.numbers("dynamic_slice_sizes"), starts)]


def _dynamic_update(instruction: Instruction, arrays: Any, value: Any, update: Any, *starts: Any) -> Value:
    result = np.array(value)
    result[_starts(value.shape, update.shape, starts)] = update
    return result


COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}

OPERATIONS: dict[str, Operation] = {
    "add": _each(np.add),
    "subtract": _each(np.subtract),
    "multiply": _each(np.multiply),
    "divide": _each(_quotient),
    "remainder": _each(_remainder),
    "minimum": _each(np.minimum),
    "maximum": _each(np.maximum),
    "and": _each(np.bitwise_and),
    "or": _each(np.bitwise_or),
    "xor": _each(np.bitwise_xor),
    "not": _each(np.invert),
    "negate": _each(np.negative),
    "abs": _each(np.abs),
    "sign": _each(np.sign),
    "select": _each(np.where),
    "clamp": _each(lambda low, x, high: np.clip(x, low, high)),
    "shift-left": _each(np.left_shift),
    "shift-right-arithmetic": _shifted_as("i"),
    "shift-right-logical": _shifted_as("u"),
    "convert": _each(_same),
    "copy": _each(_same),
    "optimization-barrier": _each(_same),
    "compare": _compare,
    "reshape": _reshape,
    "bitcast": _reshape,
    "broadcast": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update,
    "concatenate": lambda i, arrays, *values: np.concatenate(values, axis=i.numbers("dimensions")[0]),
    "transpose": lambda i, arrays, value: value.transpose(i.numbers("dimensions")),
}
