"""What any plan costs: seconds of the schedule that the runtime executes, and bytes on devices and hosts.

A plan becomes five arrays (`StageTimes`); the longest path through the micro-batch loop is its step time.  The memory
of a device consists of the state (weights, gradients, optimizer), the activations of all micro-batches in flight, the
working set of one layer, the buffers of the transfers between stages and, where moments are stored in low precision,
what an update decodes beyond these.

A plan of space="spmd" is one program.  Its layers cost what `memory` makes of them; in a pipeline every stage has a
`Slot` for embedding and head and as large a ring of activations as the first stage.  The stages of space="general" are
separate programs, which run and allocate only what they need.  So the same stages may cost more or less in the other
space.  Plans with offloaded blocks cost what `offload` states.  Left out: the compiler's
temporaries inside a layer, and fragmentation.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jhpt.core import rules
from jhpt.core.cluster import Cluster
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Stage
from jhpt.core.plan_check import check_plan
from jhpt.core.profile import ModelProfile
from jhpt.core.schedule import in_flight
from jhpt.core.work import flops_shares, late_products
from jhpt.planner.cost.activations import fullest_host, offloaded_activation_bytes, saved_tensors_of
from jhpt.planner.cost.basis import NO_OTHERS
from jhpt.planner.cost.communication import residual_bytes
from jhpt.planner.cost.layers import ChunkCosts, LayerCosts, LayerStrategy, select_layers, strategy_of
from jhpt.planner.cost.memory import EMBEDDING_AND_HEAD, Slot
from jhpt.planner.cost.model import CostModel, End
from jhpt.planner.cost.offload import device_bytes, host_bytes, offloaded_step
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import Array, step_seconds


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The arrays of `schedule.step_seconds` for one plan: [S, v], [S v - 1] (cut) and [S] (the others) seconds."""

    forward: Array
    backward: Array
    cut: Array
    sync: Array
    update: Array
    weights: Array | None = None

    def step_seconds(self, plan: Plan, overlap: bool = True) -> float:
        """Seconds of a step with the plan's schedule.  overlap: whether transfers run beside computation."""
        times = self.forward, self.backward, self.cut, self.sync, self.update
        return float(step_seconds(plan.schedule, plan.micro_batches, *times, overlap=overlap, weights=self.weights))


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """One stage.

    seconds: by cause, over a whole step.  bytes: by cause, on each device.  capacity: usable bytes of a device.
    in_flight: micro-batches (with chunks: pairs of both) for whose activations there is memory.  host_bytes: offloaded
    bytes by cause, on the stage's fullest host.
    """

    seconds: dict[str, float]
    bytes: dict[str, float]
    capacity: float
    in_flight: int
    host_bytes: dict[str, float] = field(default_factory=dict)
    host_capacity: float = math.inf

    @property
    def total_bytes(self) -> float:
        """Bytes of all causes."""
        return sum(self.bytes.values())

    @property
    def total_host_bytes(self) -> float:
        """Bytes of all causes."""
        return sum(self.host_bytes.values())

    @property
    def missing(self) -> float:
        """Bytes that a device or a host lacks, whichever lacks more; 0 or negative if the stage fits."""
        return max(self.total_bytes - self.capacity, self.total_host_bytes - self.host_capacity)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a step, and the causes of seconds and bytes by stage."""

    seconds: float
    stages: tuple[StageEstimate, ...]
    times: StageTimes = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices and hosts."""
        return all(stage.missing <= 0 for stage in self.stages)


def evaluate(
    plan: Plan, profile: ModelProfile, cluster: Cluster, others: Mapping[str, ModelProfile] = NO_OTHERS
) -> Estimate:
    """The estimate of any plan, including one that does not fit.

    others: profiles of the cluster's other kinds of devices, by `Device.rates`.

    Raises:
      InputError: the plan does not match the model or the cluster, or cannot run in its space.
    """
    return price(plan, CostModel(profile, cluster, plan.gradient_compression, others=others))


def price(plan: Plan, model: CostModel) -> Estimate:
    """`evaluate` with a cost model that can be reused for many plans."""
    check(plan, model)
    if plan.offload is not None:
        return _offloaded(plan, model)
    times = stage_times(plan, model)
    seconds = times.step_seconds(plan, model.cluster.overlap)
    stages = tuple(_stage_estimate(plan, position, model, times, seconds) for position in range(len(plan.stages)))
    return Estimate(seconds=seconds, stages=stages, times=times)


def _offloaded(plan: Plan, model: CostModel) -> Estimate:
    """The estimate of a plan with offloaded blocks."""
    step, stage = offloaded_step(plan, model), plan.stages[0]
    forward, backward = (np.array([[step.entry[way] + step.passes[way] + step.exit[way]]]) for way in (0, 1))
    # All micro-batches pass through a block before the next block begins: to the schedule they are one.
    update = np.array([step.finish])
    times = StageTimes(forward=forward, backward=backward, cut=np.zeros(0), sync=backward[:, 0], update=update)
    estimate = StageEstimate(
        seconds=dict(step.causes),
        bytes=device_bytes(plan, model),
        capacity=model.places.of(stage.members).memory,
        in_flight=plan.micro_batches,
        host_bytes=host_bytes(plan, model),
        host_capacity=min(node.host_memory for node in model.cluster.nodes),
    )
    return Estimate(seconds=step.seconds, stages=(estimate,), times=times)


def chunk_costs(chunk: Chunk, place: Place, strategy: LayerStrategy, model: CostModel) -> ChunkCosts:
    """The costs of every layer, taken from the table of its tensor degree and number of sample chunks.

    Embedding and head never have several sample chunks.  Chunks of equal layers share their costs.
    """
    runs = tuple((run.layers, run.tensor, run.sample_chunks) for run in chunk.runs)
    key = runs, model.alike[chunk.first : chunk.stop], place, strategy
    if key not in model.chunks:
        model.chunks[key] = _chunk_costs(chunk, place, strategy, model)
    return model.chunks[key]


def _chunk_costs(chunk: Chunk, place: Place, strategy: LayerStrategy, model: CostModel) -> ChunkCosts:
    last, others = model.num_layers - 1, strategy.other_blocks
    keys = [
        # Layer 0 is the embedding, so block n is layer n + 1.
        (tensor, 1 if layer in (0, last) else cut, others is not None and layer > others.after)
        for layer, tensor, cut in zip(range(chunk.first, chunk.stop), chunk.tensor, chunk.sample_chunks, strict=True)
    ]
    of_blocks = strategy.of_first_blocks, strategy.of_other_blocks
    tables = {
        (tensor, cut, other): model.table(place, tensor, replace(of_blocks[other], sample_chunks=(cut,)))
        for tensor, cut, other in set(keys)
    }
    reshard = sum(
        model.reshard_seconds(place, layer, before, after, strategy.micro_batch, sequence=strategy.sequence)
        for layer, (before, after) in enumerate(itertools.pairwise(chunk.tensor), chunk.first)
    )
    return ChunkCosts(select_layers(tables, keys, chunk.first), reshard)


def stage_layers(plan: Plan, position: int, strategy: LayerStrategy, model: CostModel) -> list[LayerCosts]:
    """The costs of the layers in every chunk of a stage, under a strategy."""
    place = _slowest_place(plan, position, model)
    return [chunk_costs(chunk, place, strategy, model).layers for chunk in plan.stages[position].chunks]


def stage_times(plan: Plan, model: CostModel) -> StageTimes:
    """The five arrays of a plan."""
    strategy, stages = strategy_of(plan), len(plan.stages)
    shape = (stages, plan.chunks)
    forward, backward, sync, update = np.zeros(shape), np.zeros(shape), np.zeros(stages), np.zeros(stages)
    for s, stage in enumerate(plan.stages):
        place, places = _slowest_place(plan, s, model), model.places.by_kind(stage)
        for c, chunk in reversed(list(enumerate(stage.chunks))):
            costs = chunk_costs(chunk, place, strategy, model)
            forward[s, c], backward[s, c] = costs.forward, costs.backward
            # Backward passes take chunks in reverse.  Gradients of a later chunk that are not reduced in time delay
            # those of this one.
            delayed = max(0.0, sync[s] - stages * backward[s, c + 1]) if c + 1 < plan.chunks else 0.0
            sync[s] = max(backward[s, c], costs.sync, delayed + costs.sums["gradients"])
            update[s] += max(chunk_costs(chunk, each, strategy, model).sums["update"] for each in places)
        update[s] += _tied(stage, place, strategy, model)[0]
        update[s] += slot_of(plan, s, model).seconds(used=s in (0, stages - 1))
    if plan.space == "general":
        forward, backward, sync = (each + model.stage_dispatch for each in (forward, backward, sync))
    cut = _cuts(plan, model)
    if model.profile.framework.exposed_transfers and stages > 1:
        waits = _transfer_waits(cut, forward.shape)
        forward, backward = forward + waits, backward + waits
        cut = np.zeros_like(cut)
    weights = _late_seconds(plan, model) if plan.schedule == "zb-h1" else None
    return StageTimes(forward=forward, backward=backward, cut=cut, sync=sync, update=update, weights=weights)


def _slowest_place(plan: Plan, position: int, model: CostModel) -> Place:
    """The place of a stage; where data ranks have samples by speed, that of the kind of device that is done last."""
    stage, strategy = plan.stages[position], strategy_of(plan)

    def seconds(place: Place) -> float:
        costs = [chunk_costs(chunk, place, strategy, model) for chunk in stage.chunks]
        return sum(each.forward + each.backward for each in costs)

    places = model.places.by_kind(stage)
    return max(places, key=seconds) if len(places) > 1 else places[0]


def _late_seconds(plan: Plan, model: CostModel) -> Array:
    """[S] seconds of a weight pass: each of its products takes as long as that of the forward pass with as many FLOP.

    What is not a product counts in a layer's forward pass in proportion.
    """

    def seconds(position: int) -> float:
        chunk, (layers,) = plan.stages[position].chunks[0], stage_layers(plan, position, strategy_of(plan), model)
        each = (model.profile.kinds[name].tensors for name in model.profile.layers[chunk.first : chunk.stop])
        shares = [sum(flops_shares(tensors)[name] for name in late_products(tensors)) for tensors in each]
        return float(np.array(shares) @ layers.forward)

    return np.array([seconds(position) for position in range(len(plan.stages))])


def _transfer_waits(cut: Array, shape: tuple[int, ...]) -> Array:
    """[S, v] seconds in which a stage waits beside each pass: while it receives and while it sends.

    cut: [S v - 1] seconds between one chunk and the next.
    """
    waits: Array = (np.append(cut, 0.0) + np.append(0.0, cut)).reshape(shape[::-1]).T
    return waits


def slot_of(plan: Plan, position: int, model: CostModel) -> Slot:
    """What a stage reserves for embedding and head."""
    stage = plan.stages[position]
    place = model.places.of(stage.members)
    return model.slot(place, stage.chunks[0].tensor[0], strategy_of(plan))


def _tied(stage: Stage, place: Place, strategy: LayerStrategy, model: CostModel) -> tuple[float, float]:
    """(seconds, bytes) for a parameter that the first layer shares with a layer of another stage.

    Both stages take part in the sum of its gradient; the stage of the other layer holds the copy and updates it.
    """
    tied = model.tied_layer
    if tied is None:
        return 0.0, 0.0
    held = {layer: t for c in stage.chunks for layer, t in zip(range(c.first, c.stop), c.tensor, strict=True)}
    if (0 in held) == (tied in held):
        return 0.0, 0.0
    costs = model.layer_costs(place, held.get(tied, held.get(0, 1)), strategy)
    if tied not in held:
        return float(costs.tied[tied]), 0.0
    return float(costs.tied[tied] + costs.tied_update[tied]), float(costs.tied_bytes[tied])


def _cuts(plan: Plan, model: CostModel) -> Array:
    """[S v - 1] seconds in which a micro-batch moves to the next chunk, or is exchanged for another one's error."""
    stages, batch = len(plan.stages), plan.batch // plan.micro_batches
    ways = model.ways(plan.schedule, plan.space)
    if stages == 1:
        return np.zeros(0)
    cuts = []
    for virtual in range(stages * plan.chunks - 1):
        chunk, at = divmod(virtual, stages)
        next_chunk, to = divmod(virtual + 1, stages)
        sender, receiver = plan.stages[at], plan.stages[to]
        last, first = sender.chunks[chunk], receiver.chunks[next_chunk]
        ends = (
            End(model.places.of(sender.members), sender.devices // last.tensor[-1]),
            End(model.places.of(receiver.members), receiver.devices // first.tensor[0]),
        )
        transfer, sequence = model.places.between(sender.members, receiver.members), first.tensor[0]
        seconds = model.moved_seconds(last.stop - 1, transfer, ends, batch, sequence if plan.sequence else 1)
        cuts.append(ways * seconds)
    return np.array(cuts)


def slots(plan: Plan, position: int) -> int:
    """The number of (chunk, micro-batch) pairs whose activations stage `position` has memory for."""
    stages = len(plan.stages)
    at = 0 if plan.space == "spmd" else position
    return in_flight(plan.schedule, stages, at, plan.chunks, plan.micro_batches)


def buffer_bytes(model: CostModel, first: int, stop: int, local: float) -> float:
    """Bytes of the transfer buffers of a chunk: two slots each for its input and its output, in both directions."""
    received = model.boundary[first - 1] if first else 0.0
    sent = model.boundary[stop - 1] if stop < model.num_layers else 0.0
    return 2.0 * local * float(received + sent)


def _stage_estimate(plan: Plan, position: int, model: CostModel, times: StageTimes, step: float) -> StageEstimate:
    stage, count = plan.stages[position], plan.micro_batches
    place, slot = _slowest_place(plan, position, model), slot_of(plan, position, model)
    costs = [chunk_costs(chunk, place, strategy_of(plan), model) for chunk in stage.chunks]
    fullest = max(model.places.by_kind(stage), key=lambda each: each.samples or 0)
    forward, backward = (times.forward[position].sum(), times.backward[position].sum())
    tensor = sum(c.tensor for c in costs)
    reshard = sum(c.reshard for c in costs)
    in_line = float(sum(c.sums["gradients_in_update"] for c in costs))
    in_line += slot.reduced if position in (0, len(plan.stages) - 1) else 0.0
    exposed = float(times.sync[position] - times.backward[position, 0]) + in_line
    update = float(times.update[position]) - in_line
    working = count * (forward + backward) + exposed + update
    seconds = {
        "compute": count * (forward + backward - tensor - reshard),
        "tensor communication": count * tensor,
        "resharding": count * reshard,
        "gradients exposed": exposed,
        "update": update,
        "waiting": step - working,
    }
    return StageEstimate(
        seconds={cause: float(value) for cause, value in seconds.items()},
        bytes=_stage_bytes(plan, position, fullest, model),
        capacity=fullest.memory,
        in_flight=slots(plan, position),
        **_activations_on_host(plan, position, model),
    )


def _stage_bytes(plan: Plan, position: int, place: Place, model: CostModel) -> dict[str, float]:
    """Bytes by cause on a device of a stage, whose devices are those of the place."""
    strategy, stage = strategy_of(plan), plan.stages[position]
    costs = [chunk_costs(chunk, place, strategy, model) for chunk in stage.chunks]
    degree, many = stage.chunks[0].tensor[0], len(plan.stages) > 1
    local = place.local(strategy.micro_batch, degree) / (degree if plan.sequence else 1)
    tied, slot = _tied(stage, place, strategy, model)[1], slot_of(plan, position, model)
    saved = sum(c.sums["optimizer"] for c in costs) + slot.optimizer + tied
    sizes = {
        "weights and gradients": sum(c.sums["weights"] for c in costs) + slot.weights,
        **saved_bytes(saved, model),
        "activations": slots(plan, position) * (max(c.sums["activations"] for c in costs) + slot.output),
        "working set": max(c.working for c in costs),
        "transfers": max(buffer_bytes(model, c.first, c.stop, local) for c in stage.chunks) if many else 0.0,
    }
    if model.profile.state.decoded_bytes:
        sizes["update"] = _decoded_bytes(plan, saved, sizes, [c.layers for c in costs], stage, model)
    return {cause: float(value) for cause, value in sizes.items()}


def _decoded_bytes(
    plan: Plan, saved: float, sizes: dict[str, float], parts: list[LayerCosts], stage: Stage, model: CostModel
) -> float:
    """Bytes of the moments that an update decodes, beyond the memory that is free by then.

    Args:
      saved: bytes of stored state.
      sizes: bytes by other causes.
    """
    state = model.profile.state
    data = strategy_of(plan).shards(stage.devices // stage.chunks[0].tensor[0])
    share = state.bytes / (data if plan.zero else 1)
    # The share of the stored bytes that is state, not the residual of compression.
    share /= share + residual_bytes(model.gradient_compression)
    freed = 0.0
    if strategy_of(plan).frees_copy_after_head:
        freed = sum(part.optimizer[EMBEDDING_AND_HEAD].sum() for part in parts)
    copied = _used_bytes(share * (saved - freed), plan.zero, data, model)
    free = sizes["activations"] + sizes["working set"] + copied
    return max(0.0, share * saved * state.decoded_bytes / state.bytes - free)


def _activations_on_host(plan: Plan, position: int, model: CostModel) -> dict[str, Any]:
    """Fields of `StageEstimate` for the stage's fullest host, on which other stages may have devices too."""
    saved = saved_tensors_of(plan)
    if not saved.host:
        return {}
    stage, each = plan.stages[position], model.places.per_node
    first, stop = stage.device // each * each, -(-(stage.device + stage.devices) // each) * each
    return {
        "host_bytes": {
            "activations": fullest_host(offloaded_activation_bytes(plan, model.profile, saved)[first:stop], each)
        },
        "host_capacity": min(node.host_memory for node in model.cluster.nodes),
    }


def saved_bytes(size: float, model: CostModel) -> dict[str, float]:
    """Bytes of the stored state by cause; a single cause if it is float32 or includes residuals of compression."""
    state = model.profile.state
    if not state.low_precision or model.gradient_compression.on:
        return {"optimizer": size}
    return {cause: size * part / state.bytes for cause, part in state.causes.items()}


def _used_bytes(saved: float, zero: int, data: int, model: CostModel) -> float:
    """Bytes of compute-dtype copies, which are freed before an update decodes moments.  saved: bytes of stored
    state."""
    shares = data if zero in (1, 2) else 1
    copied = shares > 1 or (zero < 3 and not model.profile.used_as_stored)
    return copied * shares * saved / model.profile.state.bytes * model.profile.bytes_per_weight


def check(plan: Plan, model: CostModel) -> None:
    """InputError if the plan does not match the model or the cluster, or cannot run in its space."""
    check_plan(plan, model.num_layers)
    rules.check(_choices_of(plan, model))
    for stage in plan.stages:
        for chunk in stage.chunks:
            _check_degrees(chunk, model)


def _check_degrees(chunk: Chunk, model: CostModel) -> None:
    for layer, tensor in zip(range(chunk.first, chunk.stop), chunk.tensor, strict=True):
        if not model.allowed(layer, tensor):
            top = model.kinds[model.index[layer]].max_tensor
            fit = one_of(t for t in range(1, top + 1) if top % t == 0)
            raise InputError(f"layer {layer} cannot be cut into tensor={tensor} shards; use {fit}")


def _choices_of(plan: Plan, model: CostModel) -> rules.Choices:
    """What the plan decides for this model and cluster, as the rules see it."""
    tied = model.tied_layer if plan.space == "spmd" and len(plan.stages) == 1 else None
    # Tokens are cut whatever their width; compression needs whole numbers of a width.
    tokens = model.tensor_all_reduce.stream or (model.profile.sample_tokens and not plan.compression.on)
    return rules.Choices(
        space=plan.space,
        devices=1 + max(max(stage.apart or (stage.device + stage.devices - 1,)) for stage in plan.stages),
        available=model.cluster.num_devices,
        place=model.cluster.name,
        mixed=model.cluster.mixed,
        tensor=plan.degrees,
        sequence=plan.sequence,
        sequence_length=model.profile.sample_tokens,
        compression=plan.compression.on and plan.degrees[-1] > 1,
        sample=None if tokens else model.profile.sample,
        tied=(plan.stages[0].chunks[0].tensor[0], plan.stages[0].chunks[0].tensor[tied]) if tied else None,
    )
