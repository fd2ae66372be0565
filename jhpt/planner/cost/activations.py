"""What layers save for the backward pass, in bytes, and what recomputing or offloading the rest costs, in seconds.

A layer's kind lists its named tensors: their bytes, what they are computed from, and with how many FLOP
(`jhpt.core.work.NamedTensor`).  The profile gives the seconds of the whole forward pass, measured or analytic.
Recomputing tensor i takes f_i / (sum of all f) of these seconds, and as many all-reduces over the tensor axis as there
are among the recomputed tensors.  What lies between named tensors (norms, activations, attention scores) is always
recomputed; the seconds of the backward pass include it.

Offloaded activations stay on the hosts from a block's forward pass to its backward pass.  As on the devices, every
micro-batch in flight holds the tensors of the largest chunk, in a ring that is equally long on all stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jhpt.core.cluster import Link
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import Chunk, Plan, SavedTensors
from jhpt.core.profile import LayerKind, ModelProfile, NamedTensor
from jhpt.core.schedule import in_flight
from jhpt.core.work import all_reduce_shares, flops_shares, size_of
from jhpt.planner.cost.memory import work_bytes
from jhpt.planner.cost.schedule import Array
from jhpt.planner.cost.streaming import copy_seconds

NOTHING = SavedTensors()
"""Full recomputation: only the input of each layer is saved."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A value of a block's forward pass.

    seconds: to compute it from its inputs.  inputs: positions of earlier tensors; the block's own input, which is
    always saved, is not listed.  read: whether the backward pass reads it.
    """

    seconds: float
    inputs: tuple[int, ...] = ()
    read: bool = True


def seconds_of(tensors: Sequence[Tensor], saved: Sequence[bool]) -> float:
    """Seconds of recomputation.  Each tensor that is needed and not saved is recomputed once."""
    needed = [tensor.read for tensor in tensors]
    total = 0.0
    for position in reversed(range(len(tensors))):  # inputs come first, so this visits readers before them
        if needed[position] and not saved[position]:
            total += tensors[position].seconds
            for source in tensors[position].inputs:
                needed[source] = True
    return total


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What a layer's backward pass repeats: shares of the forward pass's computation and of its all-reduces."""

    seconds: float
    all_reduces: float


@lru_cache(maxsize=1024)
def repeated(tensors: tuple[NamedTensor, ...], saved: SavedTensors) -> Repeated:
    """The shares that the backward pass repeats if it finds `saved`.  A layer without named tensors repeats all."""
    if not tensors:
        return Repeated(seconds=1.0, all_reduces=1.0)
    shares = flops_shares(tensors), all_reduce_shares(tensors)
    kept = [tensor.name in (*saved.device, *saved.host) for tensor in tensors if tensor.name != BLOCK_INPUT]
    seconds, all_reduces = (seconds_of(graph(tensors, share), kept) for share in shares)
    return Repeated(seconds=seconds, all_reduces=all_reduces)


def graph(tensors: Sequence[NamedTensor], seconds: dict[str, float]) -> list[Tensor]:
    """The tensors other than the block's input, which is always available.  seconds: that each takes, by name."""
    inner = [tensor for tensor in tensors if tensor.name != BLOCK_INPUT]
    position = {tensor.name: index for index, tensor in enumerate(inner)}
    return [
        Tensor(
            seconds=seconds[tensor.name],
            inputs=tuple(position[name] for name in tensor.inputs if name != BLOCK_INPUT),
            read=tensor.read,
        )
        for tensor in inner
    ]


class Activations:
    """Activations of a model's layers.  Arrays are [kinds] or, where stated, [layers].

    Args:
      kinds: kinds of layers.
      index: [layers] position of each layer's kind.
      inputs: [layers] bytes of each layer's input, per sample.
      causal: whether the model is a causal one (GPT); if not, a norm follows each residual sum (BERT).
      link: between a device and its host.

    The methods share these arguments: `tensor` is the tensor-parallel degree; `sequence` the number of parts into which
    sequence parallelism cuts replicated tensors (1 without); `local` the number of samples on a device.
    """

    def __init__(self, kinds: Sequence[LayerKind], index: Array, inputs: Array, causal: bool, link: Link) -> None:
        self.kinds, self.index, self.inputs, self.causal, self.link = kinds, index, inputs, causal, link
        self._divided = np.array([kind.activation_bytes for kind in kinds])
        self._replicated = np.array([kind.replicated_bytes for kind in kinds])

    def all(self, tensor: int, sequence: int, local: int) -> Array:
        """[kinds] bytes that the backward pass reads, all of which is saved without recomputation."""
        return (self._divided / tensor + self._replicated / sequence) * local

    def saved(self, saved: SavedTensors, tensor: int, sequence: int, local: int, chunks: int) -> Array:
        """[layers] bytes on the device with recomputation: the named tensors, and the inputs unless offloaded."""
        named = self._sizes([name for name in saved.device if name != BLOCK_INPUT], tensor, sequence)[self.index]
        offloaded = np.array([BLOCK_INPUT in saved.host and bool(kind.tensors) for kind in self.kinds])[self.index]
        on_device, beside_offload = self.input_shares(chunks)
        return local * (named + np.where(offloaded, beside_offload, on_device) * self.inputs / sequence)

    def second_inputs(self, sequence: int, local: int, chunks: int) -> Array:
        """[layers] bytes of inputs that are saved a second time, chunk by chunk, without recomputation."""
        return local * (self.input_shares(chunks)[0] - 1) * self.inputs / sequence

    def input_shares(self, chunks: int) -> tuple[float, float]:
        """Multiples of a block's input on the device: if the input is saved there, and if it is offloaded.

        Where a norm follows the residual sums (BERT), the derivative of the last of several chunks reads both parts of
        its input, whatever becomes of their norm.
        """
        return (1.0, 0.0) if chunks == 1 or self.causal else (1.0 + 1.0 / chunks, 2.0 / chunks)

    def working(self, tensor: int, sequence: int, local: int, *, recompute: bool, one_program: bool) -> Array:
        """[kinds] bytes that a backward pass needs temporarily.

        In one SPMD program a layer with named tensors needs `work_bytes`; any other layer needs what it recomputes.
        """
        recomputed = self.all(tensor, sequence, local) * recompute
        return np.array(
            [
                local * work_bytes(kind, tensor, sequence, causal=self.causal) if one_program and kind.tensors else size
                for kind, size in zip(self.kinds, recomputed, strict=True)
            ]
        )

    def _sizes(self, names: Iterable[str], tensor: int, sequence: int) -> Array:
        """[kinds] bytes per sample of the tensors with these names."""
        return np.array([size_of(kind.tensors, names).on(tensor, sequence) for kind in self.kinds])

    def copy_seconds(self, names: Iterable[str], tensor: int, sequence: int, local: int) -> Array:
        """[kinds] seconds to copy the tensors with these names, one after the other, to the host or back."""
        return sum(
            (copy_seconds(self.link, self._sizes([name], tensor, sequence) * local) for name in names),
            start=np.zeros(len(self.kinds)),
        )

    def repeated(self, saved: SavedTensors) -> tuple[Array, Array]:
        """[kinds] shares of the forward pass that the backward pass repeats: of computation, of all-reduces."""
        shares = [repeated(kind.tensors, saved) for kind in self.kinds]
        return np.array([share.seconds for share in shares]), np.array([share.all_reduces for share in shares])


def saved_tensors_of(plan: Plan) -> SavedTensors:
    """What the plan saves by name.  Without recomputation it names nothing, and offloads nothing."""
    return (plan.saved or NOTHING) if plan.recompute else NOTHING


def offloaded_activation_bytes(plan: Plan, profile: ModelProfile, saved: SavedTensors) -> list[float]:
    """Bytes that each device of the plan, in order, offloads to its host."""
    slots = in_flight(plan.schedule, len(plan.stages), 0, plan.chunks, plan.micro_batches)
    names, samples = saved.host, plan.batch // plan.micro_batches

    def of_chunk(chunk: Chunk, devices: int) -> float:
        total = 0.0
        for layer, tensor in zip(range(chunk.first, chunk.stop), chunk.tensor, strict=True):
            size = size_of(profile.kinds[profile.layers[layer]].tensors, names)
            total += size.on(tensor, tensor if plan.sequence else 1) * -(-samples * tensor // devices)
        return total

    return [
        slots * max(of_chunk(chunk, stage.devices) for chunk in stage.chunks)
        for stage in plan.stages
        for _ in range(stage.devices)
    ]


def fullest_host(by_device: Sequence[float], each: int) -> float:
    """Bytes on the fullest host, where `each` neighbouring devices share a host."""
    return max(float(np.sum(by_device[first : first + each])) for first in range(0, len(by_device), each))
