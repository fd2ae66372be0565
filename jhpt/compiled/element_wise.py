"""Bytes that a compiled step moves outside of matrix products: what its element-wise kernels, reductions and copies
read and write.

A kernel (a fusion, or an operation of its own) reads every operand and writes its result once.  Of an array that it
only slices it reads the slice; of one that it updates in place it writes the update.  Left out: caches, which hold a
part of what one kernel writes and the next one reads.
"""

from dataclasses import replace

from jhpt.compiled.evaluate import Frame
from jhpt.compiled.hlo import Computation, Instruction, Module
from jhpt.compiled.program import Tally, Walk

FREE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "iota",
    "after-all",
    "partition-id",
    "while",
    "conditional",
    "call",
}
"""Opcodes that move nothing by themselves."""

KERNEL = "mosaic_gpu_v2"
"""The custom call of a kernel of `jhpt.kernels`, which reads its operands and writes its results once.  Other custom
calls are products and fused attention, and are not counted."""

SLICES = ("dynamic-slice", "slice", "gather")


class ElementWise(Walk):
    """One device's execution of a program, in which `Tally.moved` is counted."""

    def _worth_a_look(self, computation: Computation) -> tuple[Instruction, ...]:
        return tuple(computation)

    def _called(self, frame: Frame, instruction: Instruction) -> Tally:
        tally = super()._called(frame, instruction)
        if tally.flops or not _moves(instruction):
            return tally
        return replace(tally, moved=moved_bytes(self.module, frame.computation, instruction))


def _moves(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return (instruction.attribute("custom_call_target") or "").strip('"') == KERNEL
    return opcode not in FREE and not opcode.startswith("async") and not opcode.endswith(("-start", "-done"))


def moved_bytes(module: Module, computation: Computation, kernel: Instruction) -> float:
    """Bytes that a kernel reads and writes."""
    if kernel.opcode != "fusion":
        operands = (computation[name] for name in kernel.operands)
        return _size(kernel) + sum(_size(operand) for operand in operands)
    inner = module[kernel.called("calls")]
    read = sum(_read(inner, each) for each in inner if each.opcode == "parameter")
    root = tuple(inner)[-1]
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written(inner, result) for result in results)


def _size(instruction: Instruction) -> float:
    return sum(array.bytes for array in instruction.arrays)


def _read(inner: Computation, parameter: Instruction) -> float:
    """Bytes that a fusion reads of one of its parameters."""
    users = [each for each in inner if parameter.name in each.operands]
    if users and all(each.opcode in SLICES and each.operands[0] == parameter.name for each in users):
        return sum(_size(each) for each in users)
    if users and all(_updates(each) and each.operands[0] == parameter.name for each in users):
        return 0.0
    return _size(parameter)


def _written(inner: Computation, result: Instruction) -> float:
    """Bytes that a fusion writes of one of its results."""
    if result.opcode in ("bitcast", "copy", "convert") and (source := inner[result.operands[0]]) and _updates(source):
        result = source
    return _size(inner[result.operands[1]]) if _updates(result) else _size(result)


def _updates(instruction: Instruction) -> bool:
    return instruction.opcode == "dynamic-update-slice"
