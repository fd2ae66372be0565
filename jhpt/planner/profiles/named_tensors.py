"""Sizes of a layer's named tensors, and the share of the forward pass that computes each of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jhpt.core.profile import NamedTensor


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


def all_reduce_shares(tensors: Sequence[NamedTensor]) -> dict[str, float]:
    """Share of the forward pass's all-reduces over the tensor axis that each tensor needs, by name."""
    total = sum(tensor.summed for tensor in tensors) or 1
    return {tensor.name: tensor.summed / total for tensor in tensors}
