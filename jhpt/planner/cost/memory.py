"""Bytes of parameters and of temporary tensors, and what one SPMD program makes of the layers' costs.

Embedding and head, the first and the last layer, lie outside the loop over layers that `jhpt.sharding` runs:

    - they are never recomputed;
    - under ZeRO-2 and ZeRO-3 they are treated as under ZeRO-1: their weights are gathered once per step and stay whole
      until its end, and their gradients are scattered once.

Bytes per parameter on one of the d data ranks over which ZeRO shards, with w bytes in the compute dtype and o bytes for
the stored weight, its rounding remainder and the moments (`core.state`):

    ZeRO                         0                         1                               2       3
    optimizer state              o                         o / d                           o / d   o / d
    compute-dtype weight         w, or 0 if stored so      w                               w       0  (working set)
    gradient                     4                         4, and w / d if reduced late    4 / d   4 / d
      with one micro-batch       4                         w / d if reduced late, else w   w / d   w / d
      of embedding and head      4 + w; with one micro-batch w; in a pipeline 4

A program for each stage holds gradients in float32 from the first pass on, of embedding and head too, and with ZeRO-3
w / d of each weight.

With several micro-batches embedding and head have a gradient of the current micro-batch beside the accumulated one.
After the head's last use the copy of their weights is freed: with one or two micro-batches only gradients remain during
the backward passes of the other layers.  With one stage and one micro-batch no gradient exists before the backward
pass.  While the head, which starts it, is at work, that much room is free for its tensors (`in_one_stage`).  With two
micro-batches the first one's gradient is widened to float32 only then.

On a single data rank ZeRO-1 and ZeRO-2 are the same as ZeRO-0.  ZeRO-3 shards nothing either, but it reads every
layer's weights as they are stored and converts them where they are used: there is no copy of all weights, and with one
micro-batch the gradients stay in the compute dtype.

Beside what it saves, a running layer needs its weights as they are read; with ZeRO-3 the prefetched weights, both
sharded and gathered; the gradient of the previous layer, if that is reduced late; and the tensors of `work_bytes`.  The
head needs, beside what it saves, the gradient of its logits in the compute dtype.

With several stages, moreover:

    - the head runs forward and backward within the backward pass of the last stage: its forward seconds count there;
    - what embedding and head save lives for one pass only, so it is working set, however many micro-batches are in
      flight;
    - every micro-batch in flight saves the output of its stage, in a ring whose slots have equal sizes on all stages;
    - every stage reserves a slot for parameters, gradients and optimizer state of embedding or head: the first stage
      uses it for the embedding, the last one for the head and its copy of a shared parameter.  All stages gather and
      update the slot; the first and the last one reduce its gradients;
    - gradients are reduced after the last backward pass, with ZeRO-2 and ZeRO-3 after each, where nothing hides them;
      ZeRO-1 and ZeRO-2 gather weights before the first forward pass.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from jhpt.core.profile import LayerKind
from jhpt.core.work import size_of
from jhpt.planner.cost.layers import LayerCosts, LayerStrategy
from jhpt.planner.cost.schedule import Array

EMBEDDING_AND_HEAD = [0, -1]

FLOAT32 = 4.0
"""Bytes of a number in which gradients are accumulated and, by default, weights are stored."""

WORK = {True: (2, 3), False: (3, 4)}
"""By causality: how many tensors of the size of the hidden layer, and of the residual stream, exist beside the named
ones at the peak of a block's backward pass.  Counted in programs compiled for an H100 with jax 0.10.2: GPT-6.7B with
tensor degrees 1 and 4, gpt2-1.5b, and bert-large, where an exact GELU leaves its derivative and dropout its masks."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on a device.

    weights: compute-dtype weight and gradient.  optimizer: stored state.  working: additional bytes of the layer that
    runs.  absent_at_head: the part of `weights` that does not exist yet while the head runs.
    """

    weights: float
    optimizer: float
    working: float
    absent_at_head: float = 0.0


def parameter_bytes(
    strategy: LayerStrategy, data: int, wire: float, state: float, *, as_stored: bool, overlap: bool
) -> ParameterBytes:
    """Bytes per parameter on one of `data` ranks, by the table at the head of this file.

    Args:
      wire: bytes of a number in the compute dtype.
      state: bytes of weight and gradient in the compute dtype and of the optimizer state (`ModelProfile.state_bytes`).
      as_stored: whether weights are computed with in the dtype that they are stored in.
      overlap: whether the cluster overlaps communication with computation.
    """
    if data == 1 and (strategy.program == "per_stage" or strategy.zero < 3):
        strategy = replace(strategy, zero=0)
    zero, optimizer = strategy.zero, state - 2 * wire
    stored, copy = (optimizer + wire, 0.0) if as_stored else (optimizer, wire)
    if strategy.program == "per_stage":
        used = {0: copy, 1: wire, 2: wire, 3: copy / data}[zero]
        gradient = FLOAT32 / (data if zero > 1 else 1)
        return ParameterBytes(used + gradient, stored / (data if zero else 1), 2 * wire if zero == 3 else 0.0)
    used = {0: copy, 1: wire, 2: wire, 3: 0.0}[zero]
    late = strategy.reduces_late and overlap and data > 1
    gradient = _gradient(strategy, data, wire, late=late)
    if strategy.embedding_or_head and strategy.frees_copy_after_head:
        return ParameterBytes(gradient, stored / (data if zero else 1), wire, wire - used)
    # The weights that are read are freed as their gradient is written: at the peak there is 1.5 times one of them.
    read = (1.5 if data > 1 else 0.5) * wire if zero == 3 else 0.0
    working = read + wire + (wire if late else 0.0)
    absent = _absent_at_head(strategy, gradient, wire, data) if strategy.program == "one_stage" else 0.0
    return ParameterBytes(used + gradient, stored / (data if zero else 1), working, absent)


def _gradient(strategy: LayerStrategy, data: int, wire: float, *, late: bool) -> float:
    zero, several = strategy.zero, strategy.several_micro_batches
    if strategy.program == "one_stage" and strategy.embedding_or_head:
        return FLOAT32 + wire if several else wire
    if zero > 1:
        return (FLOAT32 if several or strategy.program == "pipeline" else wire) / data
    if zero == 1 and not several:
        return wire / data if late else wire
    return FLOAT32 + (wire / data if zero == 1 and late else 0.0)


@dataclass(frozen=True)
class Slot:
    """What a stage of a pipeline reserves for embedding or head.  Seconds are per step, bytes on a device."""

    weights: float = 0.0
    optimizer: float = 0.0
    update: float = 0.0
    gathered: float = 0.0
    """All-gather of weights; part of the update."""
    reduced: float = 0.0
    """Reduction of the gradients, on the first and the last stage."""
    exchanged: float = 0.0
    """Sum of a shared parameter's gradient over these two stages."""
    output: float = 0.0
    """Bytes that a micro-batch in flight saves beside what its layers save."""

    @property
    def state(self) -> float:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.optimizer

    def seconds(self, *, used: bool) -> float:
        """Seconds of the update and, if `used` by a layer, of its gradients."""
        return self.update + (self.reduced + self.exchanged if used else 0.0)


def with_embedding_and_head(inner: LayerCosts, embedding_and_head: LayerCosts) -> LayerCosts:
    """The first and the last layer from `embedding_and_head`, all others from `inner`."""

    def joined(name: str) -> Array:
        values = getattr(inner, name).copy()
        values[EMBEDDING_AND_HEAD] = getattr(embedding_and_head, name)[EMBEDDING_AND_HEAD]
        return values

    return LayerCosts(**{field.name: joined(field.name) for field in fields(LayerCosts)})


def _absent_at_head(strategy: LayerStrategy, gradient: float, wire: float, data: int) -> float:
    """With one stage: bytes of the gradient that do not exist yet while the head runs."""
    if not strategy.several_micro_batches:
        return gradient
    if strategy.embedding_or_head:
        return wire
    return (FLOAT32 - wire) / (data if strategy.zero > 1 else 1) if strategy.two_micro_batches else 0.0


def work_bytes(kind: LayerKind, tensor: int, cut: int, *, causal: bool) -> float:
    """Bytes per sample in the backward pass of a layer with named tensors, whatever it saves.

    All named tensors, read or recomputed; the activation of the hidden layer and its gradient; norms, errors and
    all-reduced tensors (`WORK`).  cut: parts into which sequence parallelism cuts replicated tensors.
    """
    # The tensor that is sent and the one received; with sequence parallelism a product's gathered input and error.
    summed = 2 * max(each.bytes for each in kind.tensors if not each.sharded) if tensor > 1 else 0.0
    named = size_of(kind.tensors, [tensor.name for tensor in kind.tensors]).on(tensor, cut)
    hidden = max((each.bytes for each in kind.tensors if each.sharded), default=0.0) / tensor
    stream = max(each.bytes for each in kind.tensors if not each.sharded) / cut
    more, streams = WORK[causal]
    return named + more * hidden + streams * stream + summed


def in_one_stage(costs: LayerCosts, last: float, absent: float) -> LayerCosts:
    """Costs with one stage: what the head saves lives for one pass only, before any gradient exists.

    Args:
      last: bytes that the head needs while it runs.
      absent: bytes of gradients that do not exist yet, less the copies of weights that still do.
    """
    working = costs.working.copy()
    working[-1] = max(working[-1], last - absent)
    return replace(costs, activations=_without(costs.activations, [-1]), working=working)


def in_pipeline(costs: LayerCosts, last: float) -> LayerCosts:
    """Costs with several stages: the head runs in the backward pass, and the slot's costs are left out.

    Args:
      last: bytes that the head needs while it runs.
    """
    once = ("update", "gradients_in_update", "gathered", "weights", "optimizer")
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
        tied_update=_without(costs.tied_update, [-1]),
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
