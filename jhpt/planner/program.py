"""What one SPMD program, as `jhpt.sharding` runs it, makes of the layers' costs.

The first and the last layer, the ends, lie outside the loop over layers:

    - they are never recomputed;
    - under ZeRO-3 they are held as under ZeRO-1: gathered once a step, whole while it lasts, their gradients scattered
      once.

Bytes of a parameter on one of d data ranks, w of them in the compute dtype; o of weight, what its rounding left, and
moments, as they are kept (`core.state`):

    ZeRO                        0                   1                               3
    state of the optimizer      o                   o / d                           o / d
    weight to compute with      w, kept so: none    w                               none        (working set)
    gradient in float32         4                   4 / d, where it is given away layer by layer
                                                    4, with several micro-batches   4 / d
                                                    w, else

A layer at work has, beside what it keeps, its weights and those fetched ahead (ZeRO-3), its gradient, and the gradient
of the layer before where that is given away late.

With several stages, moreover,

    - the last layer runs forward and backward in the backward pass of the last stage: its forward seconds belong there;
    - what the ends keep lives for one pass: it is working set, whatever the micro-batches in flight;
    - every micro-batch in flight keeps the output of its stage, in a ring whose slots are as large on every stage;
    - every stage has a slot for parameters, gradients and optimizer state of the ends: the first layer's on the first
      stage, the last one's and the copy of what it shares on the last.  All stages gather and update the slot, the
      first and the last one sum its gradients;
    - gradients are summed when the last backward is over, beside nothing; ZeRO-1 gathers weights before the first
      forward.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from jhpt.planner.schedule import Array
from jhpt.planner.tables import LayerCosts, Treatment

ENDS = [0, -1]

FLOAT32 = 4.0
"""Bytes in which gradients are summed up, and weights stored where nothing else is said."""


@dataclass(frozen=True)
class Held:
    """Bytes of a parameter on a device: weight and gradient, optimizer state, and of the layer at work, beside them."""

    weights: float
    optimizer: float
    working: float


def held(
    treatment: Treatment, zero: int, data: int, wire: float, state: float, *, as_kept: bool, overlap: bool
) -> Held:
    """By the head of this file.

    Args:
      state: of weight, gradient and optimizer as a program of its stage's own holds them.
      as_kept: weights are used in the dtype that they are kept in.
    """
    optimizer = state - 2 * wire
    if treatment.program == "own":
        weights = 2 * wire / (data if zero == 3 else 1)
        return Held(weights, optimizer / (data if zero else 1), 2 * wire if zero == 3 else 0.0)
    stored = optimizer + (wire if as_kept else 0.0)
    used = {0: 0.0 if as_kept else wire, 1: wire, 3: 0.0}[zero]
    late = treatment.late and overlap and data > 1
    if zero == 1:
        gradient = FLOAT32 if treatment.several else FLOAT32 / data if late else wire
    else:
        gradient = FLOAT32 / (data if zero else 1)
    working = (2 * wire if zero == 3 else 0.0) + wire + (wire if late else 0.0)
    return Held(used + gradient, stored / (data if zero else 1), working)


@dataclass(frozen=True)
class Slot:
    """What a stage of a pipeline has beside its inner layers.  Seconds once a step, bytes on a device."""

    weights: float = 0.0
    optimizer: float = 0.0
    update: float = 0.0
    gathered: float = 0.0
    """Part of the update."""
    reduced: float = 0.0
    """To sum the gradients, on the first and the last stage."""
    exchanged: float = 0.0
    """To sum a shared parameter's gradient over these two."""
    output: float = 0.0
    """Bytes that a micro-batch in flight keeps beside what its layers do."""

    @property
    def state(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.optimizer

    def seconds(self, *, used: bool) -> float:
        """Of the update, and of the gradients where a layer uses the slot."""
        return self.update + (self.reduced + self.exchanged if used else 0.0)


def with_ends(inner: LayerCosts, ends: LayerCosts) -> LayerCosts:
    """First and last layer from `ends`, all others from `inner`."""

    def joined(name: str) -> Array:
        values = getattr(inner, name).copy()
        values[ENDS] = getattr(ends, name)[ENDS]
        return values

    return LayerCosts(**{field.name: joined(field.name) for field in fields(LayerCosts)})


def in_pipeline(costs: LayerCosts) -> LayerCosts:
    """Several stages: the last layer in the backward pass, and nothing that is the slot's."""
    once = ("update", "in_line", "gathered", "weights", "optimizer")
    return replace(
        costs,
        forward=_without(costs.forward, [-1]),
        backward=costs.backward + _only(costs.forward, [-1]),
        forward_tensor=_without(costs.forward_tensor, [-1]),
        backward_tensor=costs.backward_tensor + _only(costs.forward_tensor, [-1]),
        activations=_without(costs.activations, ENDS),
        working=_without(costs.working, ENDS) + _only(costs.activations, ENDS),
        tied=_without(costs.tied, [-1]),
        tied_bytes=_without(costs.tied_bytes, [-1]),
        **{name: _without(getattr(costs, name), ENDS) for name in once},
    )


def _without(values: Array, layers: list[int]) -> Array:
    rest = values.copy()
    rest[layers] = 0.0
    return rest


def _only(values: Array, layers: list[int]) -> Array:
    rest = np.zeros_like(values)
    rest[layers] = values[layers]
    return rest
