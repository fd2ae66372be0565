"""The work of a layer in numbers, whatever the device: operations with their FLOP and bytes, and named tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from jhpt.core.section import NonNegative, Section

Kind = Literal["product", "fused attention", "element-wise", "table"]
"""table: work on the rows of a table or on the logits, whose passes through memory are counted one by one."""


class Operation(NamedTuple):
    """One kernel: FLOP it executes and bytes it reads and writes.

    result: (rows, columns, products) of a product's result, by which it fills the device; None: it fills it.
    rate: share of the rate of its kind that its shape allows.  drawn: random numbers that it draws.
    repeated: whether every rank of the tensor axis does all of it; sequence parallelism divides it.
    """

    flops: float
    moved: float
    kind: Kind = "product"
    result: tuple[float, float, float] | None = None
    rate: float = 1.0
    drawn: float = 0.0
    repeated: bool = False


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
    operand_bytes: NonNegative = Field(
        0.0, description="of what its matrix product with weights reads beside them; 0: it has no weights"
    )


def matmul(rows: float, columns: float, depth: float, element: int, count: float = 1) -> Operation:
    """`count` products [rows, depth] [depth, columns] in one kernel: 2 count rows columns depth FLOP; every operand is
    read and the result written once."""
    touched = rows * depth + depth * columns + rows * columns
    return Operation(
        2.0 * count * rows * columns * depth, float(element * count * touched), result=(rows, columns, count)
    )


def stream(moved: float, *, drawn: float = 0.0, repeated: bool = False) -> Operation:
    """Element-wise work that reads and writes so many bytes in all, each input and each result once."""
    return Operation(0.0, float(moved), "element-wise", drawn=drawn, repeated=repeated)


def table(moved: float) -> Operation:
    """Work on the rows of a table, or on the logits, that reads and writes so many bytes in all."""
    return Operation(0.0, float(moved), "table")


def transposed(products: Iterable[Operation]) -> tuple[Operation, ...]:
    """The backward pass of products y = x w: dx = dy w^T and dw = x^T dy, each with the FLOP and bytes of y."""
    return tuple(part for product in products for part in _gradients(product))


def _gradients(product: Operation) -> tuple[Operation, Operation]:
    """dx [rows, depth] and dw [depth, columns]."""
    if product.result is None:
        return product, product
    rows, columns, count = product.result
    depth = product.flops / (2 * rows * columns * count)
    return product._replace(result=(rows, depth, count)), product._replace(result=(depth, columns, count))


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes per sample.

    divided: bytes that the tensor axis divides.  whole: bytes that every tensor rank holds in full.
    """

    divided: float
    whole: float

    def on(self, tensor: int, sequence: int) -> float:
        """Bytes on a device: `divided / tensor + whole / sequence`.

        Args:
          tensor: tensor-parallel degree.
          sequence: number of parts into which sequence parallelism cuts what every rank would hold in full; 1 without.
        """
        return self.divided / tensor + self.whole / sequence


def size_of(tensors: Iterable[NamedTensor], names: Iterable[str]) -> Size:
    """Bytes of the tensors with these names that the backward pass reads.  The others are never saved."""
    wanted = set(names)
    selected = [tensor for tensor in tensors if tensor.name in wanted and tensor.read]
    divided = sum(tensor.bytes for tensor in selected if tensor.sharded)
    return Size(divided=divided, whole=sum(tensor.bytes for tensor in selected if not tensor.sharded))


def flops_shares(tensors: Sequence[NamedTensor]) -> dict[str, float]:
    """Share of the forward pass's FLOP that computes each tensor, by name."""
    total = sum(tensor.flops for tensor in tensors) or 1.0
    return {tensor.name: tensor.flops / total for tensor in tensors}


def late_products(tensors: Sequence[NamedTensor]) -> tuple[str, ...]:
    """The products whose weights' gradients can wait under zb-h1, where all named tensors are saved, by result.

    The largest products for whose operands, input and gradient of the result, there is room where the tensors were, as
    `jhpt.sharding.split_backward` deals them out.
    """
    room, late = sum(tensor.bytes for tensor in tensors if tensor.read), list[str]()
    for tensor in sorted(tensors, key=lambda tensor: -tensor.flops):
        needed = tensor.operand_bytes + tensor.bytes
        if tensor.operand_bytes and needed <= room:
            late.append(tensor.name)
            room -= needed
    return tuple(late)


def all_reduce_shares(tensors: Sequence[NamedTensor]) -> dict[str, float]:
    """Share of the forward pass's all-reduces over the tensor axis that each tensor needs, by name."""
    total = sum(tensor.summed for tensor in tensors) or 1
    return {tensor.name: tensor.summed / total for tensor in tensors}
