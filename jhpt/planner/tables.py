"""Costs of a model's layers as arrays, and what the layers of a plan share."""

from dataclasses import dataclass, replace
from typing import Literal

from jhpt.core.plan import Plan, Zero
from jhpt.planner.schedule import Array

Space = Literal["spmd", "general"]

Program = Literal["own", "single", "piped"]
"""What runs the layers: a program of each stage's own, or one SPMD program, of one stage or of several."""


def program_of(space: Space, stages: int) -> Program:
    """What runs the layers of so many stages."""
    if space == "general":
        return "own"
    return "piped" if stages > 1 else "single"


@dataclass(frozen=True)
class Treatment:
    """What all layers of a plan share."""

    micro_batch: int
    zero: Zero
    recompute: bool
    program: Program = "own"
    several: bool = False
    """Micro-batches in a step."""
    late: bool = False
    """Gradients are summed over the data ranks layer by layer, beside the last backward pass."""
    sequence: bool = False

    @property
    def of_ends(self) -> "Treatment":
        """How one SPMD program treats the first and the last layer."""
        return replace(self, zero=1 if self.zero else 0, recompute=False, late=False, sequence=False)


def treated(
    space: Space, stages: int, batch: int, micro_batches: int, zero: Zero, recompute: bool, sequence: bool = False
) -> Treatment:
    """What all layers share of a plan with so many stages."""
    program = program_of(space, stages)
    return Treatment(
        batch // micro_batches,
        zero,
        recompute,
        program,
        several=program != "own" and micro_batches > 1,
        late=program == "single",
        sequence=sequence,
    )


def treatment_of(plan: Plan) -> Treatment:
    """What all layers of the plan share."""
    stages, count = len(plan.stages), plan.micro_batches
    return treated(plan.space, stages, plan.batch, count, plan.zero, plan.recompute, plan.sequence)


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
    tied: Array
    """Seconds to sum a shared parameter's gradient over the first and last stage, where these are two."""
    tied_bytes: Array
    """Bytes of the second copy of a shared parameter."""

    @property
    def state(self) -> Array:
        """Weights, gradients and optimizer state."""
        return self.weights + self.optimizer
