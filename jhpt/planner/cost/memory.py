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
    gradient                    4                   4, and w / d where it is given away late    4 / d
    of one micro-batch          4                   w / d, where it is given away late, else w  w / d
    of an end                   4 + w, of one micro-batch w, in a pipeline 4

With several micro-batches the ends have, beside what is added up, a gradient of this one.  Behind the last head the
copy of their weights is gone: of one and of two micro-batches the other layers' backward passes find gradients alone.
With one stage and one micro-batch no gradient is there before the backward pass: while the last layer is at work, which
begins it, there is room for that much else (`in_one_stage`); of two micro-batches the first one's is widened only then.

Over one data rank ZeRO-1 is as none.  ZeRO-3 shares nothing out, either, but reads every layer's weights as they are
kept and rounds them where they are used: there is no copy of all of them, and of one micro-batch gradients stay as
they are.

A layer at work has, beside what it keeps, its weights as they are read, those fetched ahead and as they came (ZeRO-3),
the gradient of the layer before where that is given away late, and the tensors of `work_bytes`.  The last layer has,
beside what it keeps, its gradient in the compute dtype.

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

from jhpt.core.profile import LayerKind
from jhpt.planner.cost.layers import LayerCosts, LayerStrategy
from jhpt.planner.cost.recompute import size_of
from jhpt.planner.cost.schedule import Array

EMBEDDING_AND_HEAD = [0, -1]

FLOAT32 = 4.0
"""Bytes in which gradients are summed up, and weights stored where nothing else is said."""

WORK = {True: (2, 3), False: (3, 4)}
"""Causal or not: tensors like the hidden layer, and like the residual stream, beside the named ones where a block's
backward pass holds most.  Counted in programs for an H100: GPT-6.7B, tensor 1 and 4, gpt2-1.5b, and bert-large, whose
exact GELU leaves its derivative, and dropout masks (jax 0.10.2)."""


@dataclass(frozen=True)
class Held:
    """Bytes of a parameter on a device: weight and gradient, optimizer state, and of the layer at work, beside them.

    coming: of the first, by how much less is there while the last layer is at work."""

    weights: float
    optimizer: float
    working: float
    coming: float = 0.0


def held(strategy: LayerStrategy, data: int, wire: float, state: float, *, as_stored: bool, overlap: bool) -> Held:
    """By the head of this file.

    Args:
      state: of weight, gradient and optimizer as a program of its stage's own holds them.
      as_kept: weights are used in the dtype that they are kept in.
    """
    if data == 1 and (strategy.program == "own" or strategy.zero == 1):
        strategy = replace(strategy, zero=0)
    zero, optimizer = strategy.zero, state - 2 * wire
    if strategy.program == "own":
        weights = 2 * wire / (data if zero == 3 else 1)
        return Held(weights, optimizer / (data if zero else 1), 2 * wire if zero == 3 else 0.0)
    stored = optimizer + (wire if as_stored else 0.0)
    used = {0: 0.0 if as_stored else wire, 1: wire, 3: 0.0}[zero]
    late = strategy.late and overlap and data > 1
    gradient = _gradient(strategy, data, wire, late=late)
    if strategy.end and strategy.bare_behind_head:
        return Held(gradient, stored / (data if zero else 1), wire, wire - used)
    # What is read goes as its gradient comes: of both together there is half as much again as of one.
    read = (1.5 if data > 1 else 0.5) * wire if zero == 3 else 0.0
    working = read + wire + (wire if late else 0.0)
    coming = _coming(strategy, gradient, wire, data) if strategy.program == "single" else 0.0
    return Held(used + gradient, stored / (data if zero else 1), working, coming)


def _gradient(strategy: LayerStrategy, data: int, wire: float, *, late: bool) -> float:
    zero, several = strategy.zero, strategy.several
    if strategy.program == "single" and strategy.end:
        return FLOAT32 + wire if several else wire
    if zero == 3:
        return (FLOAT32 if several or strategy.program == "piped" else wire) / data
    if zero == 1 and not several:
        return wire / data if late else wire
    return FLOAT32 + (wire / data if zero == 1 and late else 0.0)


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


def with_embedding_and_head(inner: LayerCosts, embedding_and_head: LayerCosts) -> LayerCosts:
    """First and last layer from `embedding_and_head`, all others from `inner`."""

    def joined(name: str) -> Array:
        values = getattr(inner, name).copy()
        values[EMBEDDING_AND_HEAD] = getattr(embedding_and_head, name)[EMBEDDING_AND_HEAD]
        return values

    return LayerCosts(**{field.name: joined(field.name) for field in fields(LayerCosts)})


def _coming(strategy: LayerStrategy, gradient: float, wire: float, data: int) -> float:
    """Of the gradient, with one stage: what is not there while the last layer is at work."""
    if not strategy.several:
        return gradient
    if strategy.end:
        return wire
    return (FLOAT32 - wire) / (data if strategy.zero == 3 else 1) if strategy.pair else 0.0


def work_bytes(kind: LayerKind, tensor: int, cut: int, *, causal: bool) -> float:
    """Of a sample, in the backward pass of a layer with named tensors, whatever it keeps: all of them, read or computed
    again; what the activation makes of the hidden layer, and its gradient; norms, errors and sums (`WORK`)."""
    # What is on its way and what came; of a cut sequence a product's input and the error of its result, gathered.
    summed = 2 * max(own.bytes for own in kind.tensors if not own.sharded) if tensor > 1 else 0.0
    named = size_of(kind.tensors, [tensor.name for tensor in kind.tensors]).on(tensor, cut)
    hidden = max((own.bytes for own in kind.tensors if own.sharded), default=0.0) / tensor
    stream = max(own.bytes for own in kind.tensors if not own.sharded) / cut
    more, streams = WORK[causal]
    return named + more * hidden + streams * stream + summed


def in_one_stage(costs: LayerCosts, last: float, coming: float) -> LayerCosts:
    """One stage: what the last layer keeps lives for one pass, beside all that other layers keep, and before gradients.

    Args:
      last: bytes of that layer at work.
      coming: bytes of gradients that are not there yet, without copies of the ends' weights that still are.
    """
    working = costs.working.copy()
    working[-1] = max(working[-1], last - coming)
    return replace(costs, activations=_without(costs.activations, [-1]), working=working)


def in_pipeline(costs: LayerCosts, last: float) -> LayerCosts:
    """Several stages: the last layer in the backward pass, and nothing that is the slot's.  last: bytes of that layer
    at work."""
    once = ("update", "in_line", "gathered", "weights", "optimizer")
    working = _without(costs.working, EMBEDDING_AND_HEAD) + _only(costs.activations, EMBEDDING_AND_HEAD)
    working[-1] = last
    return replace(
        costs,
        forward=_without(costs.forward, [-1]),
        backward=costs.backward + _only(costs.forward, [-1]),
        forward_tensor=_without(costs.forward_tensor, [-1]),
        backward_tensor=costs.backward_tensor + _only(costs.forward_tensor, [-1]),
        activations=_without(costs.activations, EMBEDDING_AND_HEAD),
        working=working,
        tied=_without(costs.tied, [-1]),
        tied_bytes=_without(costs.tied_bytes, [-1]),
        **{name: _without(getattr(costs, name), EMBEDDING_AND_HEAD) for name in once},
    )


def _without(values: Array, layers: list[int]) -> Array:
    rest = values.copy()
    rest[layers] = 0.0
    return rest


def _only(values: Array, layers: list[int]) -> Array:
    rest = np.zeros_like(values)
    rest[layers] = values[layers]
    return rest
