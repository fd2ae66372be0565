"""The work of a layer in numbers, whatever the device: operations with their FLOP and bytes, and named tensors."""

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from jhpt.core.section import NonNegative, Section


class Operation(NamedTuple):
    """One kernel: FLOP it executes and bytes it reads and writes."""

    flops: float
    moved: float


class Work(NamedTuple):
    """What one device executes for one layer and one micro-batch."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


class NamedTensor(Section):
    """A tensor inside a layer that the backward pass reads: saved, recomputed or offloaded by name."""

    name: str
    bytes: NonNegative = Field(description="per sample, on one device without tensor parallelism")
    flops: NonNegative = Field(0.0, description="per sample, to compute it again from its inputs")
    sharded: bool = Field(True, description="whether the tensor axis divides it")
    inputs: tuple[str, ...] = Field((), description="the named tensors that it is computed from")
    read: bool = Field(True, description="whether the backward pass reads it, or what is made of it without a name")
    summed: bool = Field(False, description="whether it is an all-reduce over the tensor axis, or made of one")


def matmul(rows: float, columns: float, depth: float, element: int, count: float = 1) -> Operation:
    """`count` products [rows, depth] [depth, columns] in one kernel: 2 count rows columns depth FLOP; every operand is
    read and the result written once."""
    touched = rows * depth + depth * columns + rows * columns
    return Operation(2.0 * count * rows * columns * depth, float(element * count * touched))


def stream(moved: float) -> Operation:
    """Element-wise work that reads and writes so many bytes in all."""
    return Operation(0.0, float(moved))


def transposed(products: Iterable[Operation]) -> tuple[Operation, ...]:
    """The backward pass of products y = x w: dx = dy w^T and dw = x^T dy, each with the FLOP and bytes of y."""
    return tuple(product for product in products for _ in range(2))
