"""What layers keep between their passes and hold in them: bytes; and what keeping less costs: shares and copies."""

from collections.abc import Iterable, Sequence

import numpy as np

from jhpt.core.cluster import Link
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import SavedTensors
from jhpt.core.profile import LayerKind
from jhpt.planner.cost.memory import work_bytes
from jhpt.planner.cost.recompute import repeated, size_of
from jhpt.planner.cost.schedule import Array
from jhpt.planner.cost.streaming import copy_seconds


class Activations:
    """Of layers of these kinds, of which `index` says which layer is which.

    local: samples on a device.  tensor: ranks over which what is divided is cut.  cut: those over which what is
    replicated is, with sequence parallelism.
    """

    def __init__(self, kinds: Sequence[LayerKind], index: Array, inputs: Array, causal: bool, link: Link) -> None:
        self.kinds, self.index, self.inputs, self.causal, self.link = kinds, index, inputs, causal, link
        self._divided = np.array([kind.activation_bytes for kind in kinds])
        self._replicated = np.array([kind.replicated_bytes for kind in kinds])

    def all(self, tensor: int, cut: int, local: int) -> Array:
        """[kinds] of a forward pass, all that its backward pass reads."""
        return (self._divided / tensor + self._replicated / cut) * local

    def saved(self, saved: SavedTensors, tensor: int, cut: int, local: int, chunks: int) -> Array:
        """[layers] of what is named, and of inputs that are not on the host."""
        named = self._sizes([name for name in saved.device if name != BLOCK_INPUT], tensor, cut)[self.index]
        away = np.array([BLOCK_INPUT in saved.host and bool(kind.tensors) for kind in self.kinds])[self.index]
        here, there = self.input_shares(chunks)
        return local * (named + np.where(away, there, here) * self.inputs / cut)

    def twice(self, cut: int, local: int, chunks: int) -> Array:
        """[layers] of inputs that are kept a second time, in parts, without recomputation."""
        return local * (self.input_shares(chunks)[0] - 1) * self.inputs / cut

    def input_shares(self, chunks: int) -> tuple[float, float]:
        """Of a block's input: what is on the device where it is kept there, and where it is kept on the host.

        Where a norm follows the sums (BERT) the derivative of the last of several chunks takes both parts of its input,
        whatever becomes of their norm.
        """
        return (1.0, 0.0) if chunks == 1 or self.causal else (1.0 + 1.0 / chunks, 2.0 / chunks)

    def working(self, tensor: int, cut: int, local: int, *, recompute: bool, one_program: bool) -> Array:
        """[kinds] of tensors in a backward pass; of layers without named ones what is computed again."""
        again = self.all(tensor, cut, local) * recompute
        named = [
            local * work_bytes(kind, tensor, cut, causal=self.causal) if one_program and kind.tensors else own
            for kind, own in zip(self.kinds, again, strict=True)
        ]
        return np.array(named)

    def _sizes(self, names: Iterable[str], tensor: int, cut: int) -> Array:
        """[kinds] of a sample's tensors of these names."""
        return np.array([size_of(kind.tensors, names).on(tensor, cut) for kind in self.kinds])

    def copy_seconds(self, names: Iterable[str], tensor: int, cut: int, local: int) -> Array:
        """[kinds] to move tensors of these names, each for itself, to the host or back."""
        return sum(
            (copy_seconds(self.link, self._sizes([name], tensor, cut) * local) for name in names),
            start=np.zeros(len(self.kinds)),
        )

    def repeated(self, saved: SavedTensors) -> tuple[Array, Array]:
        """[kinds] shares of computation and sums of the forward pass that the backward pass repeats."""
        found = [repeated(kind.tensors, saved) for kind in self.kinds]
        return np.array([one.seconds for one in found]), np.array([one.sums for one in found])
