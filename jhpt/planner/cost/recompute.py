"""What it saves and costs that some named tensors of a block are kept, and others computed again.

A layer's kind says of its named tensors how large they are, what they are computed from, and with how many FLOP
(`jhpt.core.profile.NamedTensor`).  Its forward pass takes as many seconds as it takes, measured or not: to compute
tensor i again takes f_i / (sum of all f) of them, and of the sums over the tensor axis as many as there are sums among
what is computed again.  What lies between named tensors is computed again in any case, which the seconds of the
backward pass count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import SavedTensors
from jhpt.core.profile import NamedTensor
from jhpt.planner.cost.recompute_block import Fate, Tensor, seconds_of

NOTHING = SavedTensors()
"""But the input."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Shares of a layer's forward pass that its backward pass repeats: of its computation, of its sums."""

    seconds: float
    sums: float


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes per sample: what the tensor axis divides, and what every rank has whole."""

    divided: float
    whole: float

    def on(self, tensor: int, cut: int) -> float:
        """Of a device of so many tensor ranks.  cut: into how many parts they cut what each has whole."""
        return self.divided / tensor + self.whole / cut


def size_of(tensors: Iterable[NamedTensor], names: Iterable[str]) -> Size:
    """Of those of these names that the backward pass reads: others are never kept."""
    wanted = set(names)
    found = [tensor for tensor in tensors if tensor.name in wanted and tensor.read]
    divided = sum(tensor.bytes for tensor in found if tensor.sharded)
    return Size(divided=divided, whole=sum(tensor.bytes for tensor in found if not tensor.sharded))


@lru_cache(maxsize=1024)
def repeated(tensors: tuple[NamedTensor, ...], saved: SavedTensors) -> Repeated:
    """With these kept.  Of a layer without named tensors: all of it."""
    if not tensors:
        return Repeated(seconds=1.0, sums=1.0)
    shares = flops_shares(tensors), sum_shares(tensors)
    fates = [_fate(tensor.name, saved) for tensor in tensors if tensor.name != BLOCK_INPUT]
    seconds, sums = (seconds_of(graph(tensors, share), fates) for share in shares)
    return Repeated(seconds=seconds, sums=sums)


def flops_shares(tensors: Sequence[NamedTensor]) -> dict[str, float]:
    """Of a forward pass, by name."""
    total = sum(tensor.flops for tensor in tensors) or 1.0
    return {tensor.name: tensor.flops / total for tensor in tensors}


def sum_shares(tensors: Sequence[NamedTensor]) -> dict[str, float]:
    """Of the sums over the tensor axis in a forward pass, by name."""
    total = sum(tensor.summed for tensor in tensors) or 1
    return {tensor.name: tensor.summed / total for tensor in tensors}


def graph(
    tensors: Sequence[NamedTensor], seconds: dict[str, float], sizes: dict[str, float] | None = None
) -> list[Tensor]:
    """All but the block's input, which is always there, for `block.choose`; sizes: None: of one sample."""
    inner = [tensor for tensor in tensors if tensor.name != BLOCK_INPUT]
    position = {tensor.name: at for at, tensor in enumerate(inner)}
    return [
        Tensor(
            name=tensor.name,
            bytes=sizes[tensor.name] if sizes else tensor.bytes,
            seconds=seconds[tensor.name],
            inputs=tuple(position[name] for name in tensor.inputs if name != BLOCK_INPUT),
            read=tensor.read,
        )
        for tensor in inner
    ]


def _fate(name: str, saved: SavedTensors) -> Fate:
    if name in saved.host:
        return Fate.OFFLOADED
    return Fate.SAVED if name in saved.device else Fate.RECOMPUTED
