"""What all layers of a plan share, and the costs of a row of layers as arrays."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

import numpy as np

from jhpt.core.config import Compression
from jhpt.core.plan import OtherBlocks, Plan, SavedTensors, Space, Zero
from jhpt.planner.cost.schedule import Array

K = TypeVar("K")

Program = Literal["per_stage", "one_stage", "pipeline"]
"""What runs the layers: a program for each stage, or one SPMD program for a single stage or for a pipeline."""


def program_of(space: Space, stages: int) -> Program:
    """The kind of program that runs so many stages."""
    if space == "general":
        return "per_stage"
    return "pipeline" if stages > 1 else "one_stage"


@dataclass(frozen=True)
class LayerStrategy:
    """What all layers of a plan share."""

    micro_batch: int
    """Samples of a micro-batch on all data ranks together."""
    zero: Zero
    recompute: bool
    program: Program = "per_stage"
    several_micro_batches: bool = False
    """Whether one SPMD program accumulates gradients over several micro-batches."""
    accumulates: bool = False
    """Whether gradients are added up over several micro-batches, in any program."""
    two_micro_batches: bool = False
    """Whether a single stage has exactly two micro-batches."""
    reduces_late: bool = False
    """Whether each layer's gradients are reduced one layer late, beside the backward pass of the next layer."""
    sequence: bool = False
    compression: Compression | None = None
    """Of the all-reduces over the tensor axis; None: off."""
    sample_chunks: tuple[int, ...] = (1,)
    """Candidate numbers of chunks of a device's samples; every layer gets the best of them."""
    saved: SavedTensors | None = None
    """With recomputation: what a layer saves beside its input; None: nothing."""
    zero_ranks: int | None = None
    """With hybrid sharding the number of neighbouring data ranks over which ZeRO shards; None: all."""
    other_blocks: OtherBlocks | None = None
    """On one stage: the blocks that save more; None: none.  Tables of layers are those of `of_first_blocks` or
    `of_other_blocks`."""
    embedding_or_head: bool = False
    """Whether this is the strategy of embedding and head in one SPMD program."""

    def shards(self, data: int) -> int:
        """Over how many of `data` data ranks ZeRO shards."""
        return min(self.zero_ranks or data, data)

    @property
    def frees_copy_after_head(self) -> bool:
        """Whether the compute-dtype copy of embedding and head is freed after the head's last use: with a single stage
        and at most two micro-batches."""
        return self.program == "one_stage" and (self.two_micro_batches or not self.several_micro_batches)

    @property
    def of_first_blocks(self) -> "LayerStrategy":
        """The strategy of the blocks that recompute most."""
        return self if self.other_blocks is None else replace(self, other_blocks=None)

    @property
    def of_other_blocks(self) -> "LayerStrategy":
        """The strategy of the blocks that save more."""
        if self.other_blocks is None:
            return self
        saved = self.other_blocks.saved
        return replace(self, recompute=saved is not None, saved=saved, other_blocks=None)

    @cached_property
    def of_embedding_and_head(self) -> "LayerStrategy":
        """The strategy of the first and the last layer in one SPMD program."""
        return replace(
            self,
            zero=1 if self.zero else 0,
            recompute=False,
            saved=None,
            other_blocks=None,
            reduces_late=False,
            sequence=False,
            compression=None,
            sample_chunks=(1,),
            embedding_or_head=True,
        )


@lru_cache(maxsize=65536)
def layer_strategy(
    space: Space,
    stages: int,
    batch: int,
    micro_batches: int,
    zero: Zero,
    recompute: bool,
    sequence: bool = False,
    compression: Compression | None = None,
    sample_chunks: tuple[int, ...] = (1,),
    saved: SavedTensors | None = None,
    zero_ranks: int | None = None,
) -> LayerStrategy:
    """The strategy of a plan with so many stages.

    With one micro-batch nothing is added up, and ZeRO-2 is ZeRO-1.
    """
    program, zero = program_of(space, stages), 1 if zero == 2 and micro_batches == 1 else zero
    return LayerStrategy(
        batch // micro_batches,
        zero,
        recompute,
        program,
        several_micro_batches=program != "per_stage" and micro_batches > 1,
        accumulates=micro_batches > 1,
        two_micro_batches=program == "one_stage" and micro_batches == 2,
        reduces_late=program == "one_stage",
        sequence=sequence,
        compression=compression,
        sample_chunks=sample_chunks,
        saved=saved,
        zero_ranks=zero_ranks,
    )


def strategy_of(plan: Plan) -> LayerStrategy:
    """The strategy of a plan.  Sample chunks differ between layers and are not part of it (`estimate.chunk_costs`)."""
    stages, count = len(plan.stages), plan.micro_batches
    compression = plan.compression if plan.compression.on else None
    decided = plan.batch, count, plan.zero, plan.recompute, plan.sequence, compression
    strategy = layer_strategy(plan.space, stages, *decided, saved=plan.saved, zero_ranks=plan.zero_ranks)
    return strategy if plan.other_blocks is None else replace(strategy, other_blocks=plan.other_blocks)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a row of layers, one entry per layer: seconds on a device, or bytes on a device."""

    forward: Array
    backward: Array
    forward_tensor: Array
    """Exposed all-reduces over the tensor axis; not part of `forward`."""
    backward_tensor: Array
    gradients: Array
    """Reduction of gradients beside the last backward pass."""
    update: Array
    gradients_in_update: Array
    """Reduction of gradients that nothing hides; part of the update."""
    gathered: Array
    """The exposed part of the all-gather of weights once per step; part of the update."""
    weights: Array
    """Bytes of weights and gradients."""
    optimizer: Array
    activations: Array
    working: Array
    """Bytes that a layer needs while it runs."""
    forward_filling: Array
    """Additional forward seconds of a layer whose predecessor has a different number of chunks, or none."""
    backward_filling: Array
    """Additional backward seconds of a layer whose successor has a different number of chunks, or none."""
    tied: Array
    """Seconds to sum a shared parameter's gradient over the first and the last stage, if these are different."""
    tied_update: Array
    """Seconds to update the second copy of a shared parameter."""
    tied_bytes: Array
    """Bytes of the second copy of a shared parameter."""

    @property
    def state(self) -> Array:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.optimizer


def select_layers(tables: Mapping[K, LayerCosts], keys: Sequence[K], first: int = 0) -> LayerCosts:
    """A row of layers from `first` on, each taken from the table of its key.

    Where neighbouring keys differ, and at both ends of the row, fillings are added to the tensor seconds.
    """
    layers = {key: np.array([at for at, other in enumerate(keys) if other == key]) for key in dict.fromkeys(keys)}
    values: dict[str, Array] = {}
    for field in fields(LayerCosts):
        row = values[field.name] = np.empty(len(keys))
        for key, at in layers.items():
            row[at] = getattr(tables[key], field.name)[first + at]
    begins = np.array([True, *(one != other for one, other in itertools.pairwise(keys))])
    ends = np.append(begins[1:], True)
    for direction, filled in (("forward", begins), ("backward", ends)):
        values[f"{direction}_tensor"][filled] += values[f"{direction}_filling"][filled]
        values[f"{direction}_filling"][filled] = 0.0
    return LayerCosts(**values)


@dataclass(frozen=True)
class ChunkCosts:
    """The layers of one chunk, each at its own degree, and the seconds of resharding between them.

    Half of the resharding counts in each pass: all-gathers in the forward pass, or their transposes in the backward
    pass.
    """

    layers: LayerCosts
    reshard: float

    @cached_property
    def sums(self) -> dict[str, float]:
        """The sum over the layers of every cost."""
        return {field.name: float(getattr(self.layers, field.name).sum()) for field in fields(LayerCosts)}

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return float((self.layers.forward + self.layers.forward_tensor).sum()) + self.reshard / 2

    @cached_property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return float(self._errors.sum()) + self.reshard / 2

    @cached_property
    def sync(self) -> float:
        """Seconds from the start of the last backward pass until the last gradient is reduced (`sync_seconds`)."""
        return sync_seconds(self._errors, self.layers.gradients) + self.reshard / 2

    @cached_property
    def tensor(self) -> float:
        """Exposed seconds of all-reduces over the tensor axis, in both passes."""
        return float((self.layers.forward_tensor + self.layers.backward_tensor).sum())

    @cached_property
    def working(self) -> float:
        """Bytes that the largest layer needs while it runs."""
        return float(self.layers.working.max())

    @property
    def _errors(self) -> Array:
        return self.layers.backward + self.layers.backward_tensor


def sync_seconds(backward: Array, gradients: Array) -> float:
    """Seconds from the start of the last backward pass until the last gradient is reduced.

    The backward pass visits layers from last to first.  A layer's reduction starts when its backward pass and the
    previous reduction have ended: max over l of (sum of backward from the end to l + sum of gradients from l to the
    start).
    """
    done = np.cumsum(backward[::-1])
    remaining = np.cumsum(gradients)[::-1]
    return float(np.max(done + remaining))
