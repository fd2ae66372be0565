"""The cost of one layer in a plan, derived independently for the oracle.

Seconds and bytes follow from those of the plain layer and from collectives.
"""

from dataclasses import replace
from typing import NamedTuple

from jhpt.planner.cost.communication import Group, all_gather, all_reduce, reduce_scatter
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.memory import work_bytes
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.places import Place


class LayerCost(NamedTuple):
    """Seconds and bytes of a layer.

    forward, backward: seconds of a micro-batch, with its communication.  gradients: seconds of their communication
    beside the last backward pass.  once: seconds of everything that follows it.
    state: bytes throughout the step.  saved: bytes of each micro-batch in flight.  working: bytes while it runs.
    """

    forward: float
    backward: float
    gradients: float
    once: float
    state: float
    saved: float
    working: float


def separate_layer(model: CostModel, place: Place, t: int, strategy: LayerStrategy, layer: int) -> LayerCost:
    """A layer in a program that belongs to its stage alone."""
    c = model.layer_costs(place, t, strategy)
    passes = (c.forward + c.forward_tensor, c.backward + c.backward_tensor)
    arrays = (*passes, c.gradients, c.update, c.state, c.activations, c.working)
    return LayerCost(*(float(values[layer]) for values in arrays))


def single_stage_layer(
    model: CostModel, place: Place, t: int, strategy: LayerStrategy, layer: int, *, late: bool = False
) -> LayerCost:
    """A layer in a program of a single stage.

    late: parameters and gradients are communicated before and after the passes, not beside them.
    """
    kind, data = model.kinds[model.index[layer]], place.devices // t
    piped, late = late, late or not model.cluster.overlap
    end = layer in (0, model.num_layers - 1)
    zero = min(strategy.zero, 1) if end else strategy.zero
    sequence = strategy.sequence and not end
    plain_strategy = LayerStrategy(strategy.micro_batch, 0, False, sequence=sequence)
    plain = separate_layer(model, place, t, plain_strategy, layer)
    size, group = kind.parameters / t * model.profile.bytes_per_weight, place.data_group(t)
    shards, near, far = _groups(place, t, strategy)
    gather, scatter, between = all_gather(near, size), reduce_scatter(near, size), all_reduce(far, size / shards)
    forward, backward, saved, working = plain.forward, plain.backward, plain.saved, 0.0
    # Of ZeRO-2 only what follows the last pass: a layer's gradient travels beside the next layer.
    gradients = {0: all_reduce(group, size), 1: scatter + between, 2: 0.0 if late else scatter, 3: 0.0}[zero]
    gathered = (gather if late else max(0.0, gather - forward)) if zero in (1, 2) else 0.0
    local = -(-strategy.micro_batch // data)
    if strategy.recompute and not end:
        backward, working = backward + forward, saved
        saved = float(model.boundary[layer - 1]) * local / (t if sequence else 1)
    if kind.tensors:
        working = local * work_bytes(kind, t, t if sequence else 1, causal=model.profile.causal)
    # The layer's gradient, and the gradient of the layer before while it is reduced.  With ZeRO-3 also the gathered
    # weights, half of which are freed by then, and on several ranks those of the next layer.
    sent = not end and not late and data > 1
    working += size + (size if sent else 0)
    if zero == 3:
        working += size / 2 + (size if data > 1 else 0)
    if zero == 2:
        backward = backward + scatter if late else max(backward, scatter)
    elif zero == 3 and data == 1:
        # Nothing is gathered, but the weights have not been rounded before.
        rounded = 0.0 if model.profile.used_as_stored else _rounded(model, kind.parameters / t)
        forward, backward = forward + rounded, backward + rounded
    elif zero == 3:
        if not model.cluster.overlap:
            forward, backward = forward + gather, backward + gather + scatter
        elif late:
            forward, backward = max(forward, gather), max(backward, gather) + scatter
        else:
            forward, backward = max(forward, gather), max(backward, gather + scatter)
    once = _updated(model, kind.parameters / t, zero, shards) + gathered + (between if zero > 1 else 0.0)
    state = kind.parameters / t * stored_bytes(model, strategy, shards, sent=sent, slot=piped, end=end and not piped)
    if layer == model.num_layers - 1:
        # Beside its saved activations the gradient, in the compute dtype; on one stage, before all other gradients.
        at_work = saved + local * kind.activation_bytes / t * model.profile.bytes_per_weight / 4
        if piped:  # its gradient is the slot's
            working = at_work
        else:
            coming = _coming(model, strategy, t, shards, sent=data > 1 and not late)
            working, saved = max(working, at_work - coming), 0.0
    if late:
        return LayerCost(forward, backward, 0.0, once + gradients, state, saved, working)
    return LayerCost(forward, backward, gradients, once, state, saved, working)


def pipelined_layer(model: CostModel, place: Place, t: int, strategy: LayerStrategy, layer: int) -> LayerCost:
    """A layer in one program of several stages.  Embedding and head have only their passes here: every stage has the
    rest."""
    row = single_stage_layer(model, place, t, strategy, layer, late=True)
    if layer not in (0, model.num_layers - 1):
        return row
    if layer:
        row = row._replace(forward=0.0, backward=row.forward + row.backward)
    return row._replace(once=0.0, state=0.0, saved=0.0, working=row.working if layer else row.saved)


def _groups(place: Place, t: int, strategy: LayerStrategy) -> tuple[int, Group, Group]:
    """(shards, the group of data ranks that share them, the group of those that hold the same ones)."""
    shards = strategy.zero_ranks or place.devices // t
    nodes = place.devices // (shards * t)
    if nodes == 1:
        return shards, place.data_group(t), replace(place.data_group(t), size=1)
    # Whole nodes: shards inside each, and on every node as many groups of one member each.
    near = Group(shards, 1, 1, shards, place.inside, place.network)
    return shards, near, Group(nodes, nodes, shards * t, 1, place.inside, place.network)


class EmbeddingAndHeadCost(NamedTuple):
    """Embedding and head on a stage of a pipeline.

    once: seconds on every stage.  used: further seconds on the stages that use them.  state, saved: bytes on every
    stage.
    """

    once: float
    used: float
    state: float
    saved: float


def embedding_and_head_cost(model: CostModel, place: Place, t: int, strategy: LayerStrategy) -> EmbeddingAndHeadCost:
    """The cost of embedding and head on a stage of a pipeline."""
    data = place.devices // t
    first, last = (model.kinds[model.index[layer]] for layer in (0, -1))
    parameters = max(first.parameters, last.parameters + last.tied_parameters) / t
    size, group = parameters * model.profile.bytes_per_weight, place.data_group(t)
    shards, near, far = _groups(place, t, strategy)
    zero = 1 if strategy.zero and data > 1 else 0
    # ZeRO-3 leaves only the exchange of a tied parameter between two devices.
    plain = model.layer_costs(place, t, LayerStrategy(strategy.micro_batch, 3, False))
    return EmbeddingAndHeadCost(
        once=_updated(model, parameters, zero, shards) + (all_gather(near, size) if zero else 0.0),
        used=(reduce_scatter(near, size) + all_reduce(far, size / shards) if zero else all_reduce(group, size))
        + _sum_over_ends(model, place, float(plain.tied[-1])),
        state=parameters
        * stored_bytes(model, replace(strategy, zero=min(strategy.zero, 1)), shards, sent=False, slot=True),
        saved=-(-strategy.micro_batch // data) * max(map(float, model.boundary[:-1])) / (t if strategy.sequence else 1),
    )


def _sum_over_ends(model: CostModel, place: Place, exchange: float) -> float:
    """Seconds of an all-reduce over the first and the last stage, from those in which programs of their own exchange
    the same bytes: it has one latency and, where both directions of an exchange go one after the other, half the rest.
    """
    latency = (place.network if len(model.places.nodes) > 1 else place.inside).latency
    return (exchange - latency) / model.cluster.both_ways + latency if exchange else 0.0


def _updated(model: CostModel, parameters: float, zero: int, data: int) -> float:
    return parameters / (data if zero else 1) * model.profile.update_seconds


def _rounded(model: CostModel, parameters: float) -> float:
    """Seconds to read weights of 4 bytes and to write them in 2."""
    return parameters * (4 + 2) / model.cluster.nodes[0].device.memory_bandwidth


def stored_bytes(
    model: CostModel, strategy: LayerStrategy, data: int, *, sent: bool, slot: bool, end: bool = False
) -> float:
    """Bytes of a parameter's weight, gradient and optimizer's state in one SPMD program, which stores them in float32.

    sent: gradients are reduced layer by layer.  slot: in a pipeline.  end: embedding or head of a single stage.
    """
    width = model.profile.bytes_per_weight
    zero = min(strategy.zero, 1) if end else strategy.zero
    share = model.profile.state_bytes - 2 * width + (4 if width == 4 else 0)
    # With one or two micro-batches, embedding and head have freed their copies when all other gradients are there.
    gone = end and (strategy.two_micro_batches or not strategy.several_micro_batches)
    used = 0.0 if gone else _copied(model, zero, data)
    return used + share / (data if zero else 1) + _gradient(model, strategy, data, sent=sent, slot=slot, end=end)


def _copied(model: CostModel, zero: int, data: int) -> float:
    """Bytes of a weight's copy in the compute dtype.  ZeRO-1 and 2 over one rank are like none; with ZeRO-3 only the
    layer that is computed has a copy."""
    width = model.profile.bytes_per_weight
    return width if zero < 3 and (width != 4 or (zero > 0 and data > 1)) else 0.0


def _gradient(model: CostModel, strategy: LayerStrategy, data: int, *, sent: bool, slot: bool, end: bool) -> float:
    """Bytes of a gradient.  Several micro-batches are added up in float32.  One micro-batch has the compute dtype, but
    float32 without ZeRO and with ZeRO-1 and 2 over one rank (not with ZeRO-3 over one rank)."""
    width = model.profile.bytes_per_weight
    if end:
        return 4 + width if strategy.several_micro_batches else width
    if strategy.zero == 3 or (strategy.zero == 2 and data > 1):
        return (4 if strategy.several_micro_batches or slot else width) / data
    if strategy.zero == 0 or data == 1:
        return 4.0
    return (4 if strategy.several_micro_batches else 0.0 if sent else width) + (width / data if sent else 0.0)


def _coming(model: CostModel, strategy: LayerStrategy, t: int, data: int, *, sent: bool) -> float:
    """Bytes that are allocated only after the last layer has run.

    With one micro-batch these are gradients, with two the bytes by which those of the first are widened.  Embedding and
    head have the gradient of this micro-batch instead, less the copy in the compute dtype that is freed later.
    """
    width, embedding_and_head, total = model.profile.bytes_per_weight, (0, model.num_layers - 1), 0.0
    few = strategy.two_micro_batches or not strategy.several_micro_batches
    for layer, index in enumerate(model.index):
        if layer in embedding_and_head:
            one = width - (_copied(model, min(strategy.zero, 1), data) if few else 0.0)
        elif strategy.several_micro_batches:
            one = (4 - width) / (data if strategy.zero > 1 else 1) if strategy.two_micro_batches else 0.0
        else:
            one = _gradient(model, strategy, data, sent=sent, slot=False, end=False)
        total += model.kinds[index].parameters / t * one
    return total
