"""Costs of a model's layers as arrays, and what the layers of a plan share."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import numpy as np

from jhpt.core.config import Compression
from jhpt.core.plan import Plan, SavedTensors, Zero
from jhpt.planner.cost.schedule import Array

Space = Literal["spmd", "general"]

K = TypeVar("K")

Program = Literal["own", "single", "piped"]
"""What runs the layers: a program of each stage's own, or one SPMD program, of one stage or of several."""


def program_of(space: Space, stages: int) -> Program:
    """What runs the layers of so many stages."""
    if space == "general":
        return "own"
    return "piped" if stages > 1 else "single"


@dataclass(frozen=True)
class LayerStrategy:
    """What all layers of a plan share."""

    micro_batch: int
    zero: Zero
    recompute: bool
    program: Program = "own"
    several: bool = False
    """Micro-batches in a step."""
    pair: bool = False
    """Of one stage: just two of them."""
    late: bool = False
    """Gradients are summed over the data ranks layer by layer, beside the last backward pass."""
    sequence: bool = False
    compression: Compression | None = None
    """Of the sums over the tensor axis; None: off."""
    sample_chunks: tuple[int, ...] = (1,)
    """Numbers of chunks that a device's samples may be cut into, of which every layer has what is best."""
    saved: SavedTensors | None = None
    """With recomputation, beside the input; None: nothing."""
    end: bool = False
    """Of the first and the last layer, where one program treats them apart."""

    @property
    def bare_behind_head(self) -> bool:
        """Whether the copy of the ends' weights is gone behind the head: of one stage, with up to two micro-batches."""
        return self.program == "single" and (self.pair or not self.several)

    @property
    def of_embedding_and_head(self) -> "LayerStrategy":
        """How one SPMD program treats the first and the last layer."""
        return replace(
            self,
            zero=1 if self.zero else 0,
            recompute=False,
            saved=None,
            late=False,
            sequence=False,
            compression=None,
            sample_chunks=(1,),
            end=True,
        )


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
) -> LayerStrategy:
    """What all layers share of a plan with so many stages."""
    program = program_of(space, stages)
    return LayerStrategy(
        batch // micro_batches,
        zero,
        recompute,
        program,
        several=program != "own" and micro_batches > 1,
        pair=program == "single" and micro_batches == 2,
        late=program == "single",
        sequence=sequence,
        compression=compression,
        sample_chunks=sample_chunks,
    )


def strategy_of(plan: Plan) -> LayerStrategy:
    """What all layers of the plan share; chunks of samples they do not (`estimate.chunk_costs`)."""
    stages, count = len(plan.stages), plan.micro_batches
    how = plan.compression if plan.compression.on else None
    strategy = layer_strategy(plan.space, stages, plan.batch, count, plan.zero, plan.recompute, plan.sequence, how)
    return replace(strategy, saved=plan.saved)


@dataclass(frozen=True)
class LayerCosts:
    """One entry per layer.  Seconds on a device, or bytes on a device."""

    forward: Array
    backward: Array
    forward_tensor: Array
    backward_tensor: Array
    gradients: Array
    update: Array
    in_line: Array
    """Gradient traffic that is part of the update."""
    gathered: Array
    """Weights gathered once a step, as far as nothing hides it; part of the update."""
    weights: Array
    optimizer: Array
    activations: Array
    working: Array
    forward_filling: Array
    """Seconds beside, forward, where the layer before is none whose chunks it takes up."""
    backward_filling: Array
    """The same in the backward pass, of the layer behind."""
    tied: Array
    """Seconds to sum a shared parameter's gradient over the first and last stage, where these are two."""
    tied_bytes: Array
    """Bytes of the second copy of a shared parameter."""

    @property
    def state(self) -> Array:
        """Weights, gradients and optimizer state."""
        return self.weights + self.optimizer


def picked(tables: Mapping[K, LayerCosts], keys: Sequence[K], first: int = 0) -> LayerCosts:
    """A row of layers from `first` on, each from the table of its key.

    Where keys differ, and at both ends of the row, fillings become tensor seconds, and are none for who begins there.
    """
    layers = {key: np.array([at for at, own in enumerate(keys) if own == key]) for key in dict.fromkeys(keys)}
    values: dict[str, Array] = {}
    for field in fields(LayerCosts):
        row = values[field.name] = np.empty(len(keys))
        for key, at in layers.items():
            row[at] = getattr(tables[key], field.name)[first + at]
    begins = np.array([True, *(one != other for one, other in itertools.pairwise(keys))])
    embedding_and_head = np.append(begins[1:], True)
    for direction, filled in (("forward", begins), ("backward", embedding_and_head)):
        values[f"{direction}_tensor"][filled] += values[f"{direction}_filling"][filled]
        values[f"{direction}_filling"][filled] = 0.0
    return LayerCosts(**values)
