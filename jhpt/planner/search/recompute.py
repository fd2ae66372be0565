"""Which activations a plan with recomputation saves: those that leave the least recomputation and still fit.

All blocks save activations of the same names, because one program runs them.  A plan that recomputes everything leaves
some free memory on every stage.  A name takes its bytes in all blocks of the stage's fullest chunk, times the number of
micro-batches in flight.  The stage with the least free memory decides, by the integer programme of `saved_tensors`.

A relaxed search finds the plans that are worth it.  It plans for a model whose tensors are recomputed in no time: its
plans are as fast as if they saved everything and as small as if they saved nothing.  So no choice of names is faster
than the fastest of them, and names are chosen for the best plans of every shape.

Where activations may be offloaded (`Request.host`), block inputs may be offloaded, too.  The relaxed model then has all
of them on hosts of unlimited memory, behind a link that takes no time.  Names that the request gives are saved in any
case, and only their place is chosen.  The programme then has the block input and these names among its tensors, as
tensors that cannot be recomputed.  Of equally fast choices it takes the one with the fewest bytes on the host.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jhpt.core.cluster import Cluster, Link
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import Plan, SavedTensors
from jhpt.core.profile import LayerKind, ModelProfile, NamedTensor
from jhpt.core.work import all_reduce_shares, flops_shares
from jhpt.planner.cost.activations import Copies, Fate, Tensor, fullest_host, graph, offloaded_activation_bytes
from jhpt.planner.cost.estimate import StageEstimate, price, stage_layers
from jhpt.planner.cost.layers import strategy_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.saved_tensors import Choice, choose
from jhpt.planner.search.spmd import search_spmd

SHAPES = 8
"""For how many of the fastest shapes names are chosen."""

ROUNDING = 1e-6
"""By how much, relative, the integer programme may exceed a budget."""

SAME = 1e-9
"""Relative.  Of two plans whose seconds differ by less, the one without offload is better."""


def improve(request: Request, model: CostModel, best: Incumbent) -> None:
    """Offers plans that save some activations, and lowers the bound to theirs.

    Does nothing unless the request leaves open what to save or lets named activations be offloaded.
    """
    named = request.host and request.saved is not None
    if (len(request.recompute) < 2 and not named) or not any(kind.tensors for kind in model.kinds):
        return
    names = request.saved.device if named and request.saved else None
    free, relaxed = _relaxed(request, model, names), Incumbent()
    search_spmd(replace(request, recompute=(True,)), free, relaxed)
    best.note_unexplored_bound(relaxed.lower_bound)
    for plan in _candidates(request, free, relaxed, best):
        improved = with_names(plan, model, host=request.host, names=names)
        if improved is not None:
            best.offer(improved, model)


def _relaxed(request: Request, model: CostModel, names: tuple[str, ...] | None) -> CostModel:
    """A model whose plans with recomputation are neither slower nor larger than with any choice of names."""
    profile = freely_recomputed(model.profile) if names is None else model.profile
    if not request.host:
        return CostModel(profile, model.cluster, model.gradient_compression)
    away = SavedTensors(host=(BLOCK_INPUT, *(names or ())))
    return CostModel(profile, free_hosts(model.cluster), model.gradient_compression, away)


def free_hosts(cluster: Cluster) -> Cluster:
    """The cluster with hosts of unlimited memory behind links that take no time."""
    link = Link(bandwidth=sys.float_info.max, latency=0.0)
    nodes = tuple(node.model_copy(update={"host": link, "host_memory": math.inf}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _candidates(request: Request, free: CostModel, relaxed: Incumbent, best: Incumbent) -> Iterator[Plan]:
    """Plans of the fastest shapes, cut into any number of micro-batches, that could be faster than the best so far."""
    fastest = sorted(relaxed.shapes.values(), key=lambda pair: pair[0])[:SHAPES]
    shapes = ((plan, zero) for _, plan in fastest for zero in free.levels(request.zero, plan.replicas, plan.space))
    for (plan, zero), count in itertools.product(shapes, request.micro_batches):
        varied = plan.model_copy(update={"micro_batches": count, "zero": zero})
        try:
            estimate = price(varied, free)
        except InputError:  # a micro-batch that the replicas cannot share
            continue
        if estimate.fits and estimate.seconds < best.cutoff:
            yield varied


def freely_recomputed(profile: ModelProfile) -> ModelProfile:
    """The profile with named tensors that are recomputed in no time."""

    def free(kind: LayerKind) -> LayerKind:
        tensors = tuple(tensor.model_copy(update={"flops": 0.0, "summed": False}) for tensor in kind.tensors)
        return kind.model_copy(update={"tensors": tensors})

    return profile.model_copy(update={"kinds": {name: free(kind) for name, kind in profile.kinds.items()}})


def with_names(
    plan: Plan, model: CostModel, *, host: bool = False, names: tuple[str, ...] | None = None
) -> Plan | None:
    """The plan with the best choice of saved activations; None if it does not fit even when it saves none.

    Args:
      host: whether activations, block inputs among them, may be offloaded.
      names: with host, the activations that are saved beside the block input; None: those that are best.
    """
    candidates = [] if names is not None else [_on_device(plan, model)]
    if host:
        candidates.append(_anywhere(plan, model, names))
    plans = [candidate for candidate in candidates if candidate is not None]
    if len(plans) < 2:
        return plans[0] if plans else None
    return min(plans, key=lambda candidate: _rank(candidate, model))


def _rank(plan: Plan, model: CostModel) -> tuple[bool, float]:
    estimate = price(plan, model)
    return not estimate.fits, estimate.seconds * (1 - SAME * (plan.saved is None or not plan.saved.host))


def _on_device(plan: Plan, model: CostModel) -> Plan | None:
    """The plan with the best activations to save on the devices."""
    if (start := _started(plan, SavedTensors(), model)) is None:
        return None
    started, room = start
    kind = _block(model)
    forward, sums, _ = _passes(started, room, model)
    choice = choose(graph(kind.tensors, _seconds(kind, forward, sums), room.sizes(kind)), room.left * (1 - ROUNDING))
    device, _ = _names(choice, [tensor for tensor in kind.tensors if tensor.name != BLOCK_INPUT])
    return _saving(started, SavedTensors(device=device), kind)


def _anywhere(plan: Plan, model: CostModel, names: tuple[str, ...] | None) -> Plan | None:
    """The plan with every saved activation where it is best; None if the given names and the input do not fit."""
    kind, start = _block(model), _started(plan, SavedTensors(host=(BLOCK_INPUT,)), model)
    if start is None or not kind.tensors:
        return None
    started, room = start
    forward, sums, backward = _passes(started, room, model)
    seconds, sizes = _seconds(kind, forward, sums), room.sizes(kind)
    copied = {tensor.name: room.copies(tensor.name, model, plan.sequence) for tensor in kind.tensors}
    needed = {BLOCK_INPUT, *(names or ())}
    # This is more than any choice costs that does not recompute these tensors.
    prohibitive = 2 * (sum(seconds.values()) + 2 * sum(copied.values())) or 1.0
    inner = [
        replace(tensor, name=None) if names is not None and tensor.name not in needed else tensor
        for tensor in graph(kind.tensors, {n: prohibitive if n in needed else s for n, s in seconds.items()}, sizes)
    ]
    whole = sizes[BLOCK_INPUT]
    entry = [Tensor(name=BLOCK_INPUT, bytes=room.entry * whole, host_bytes=whole, seconds=prohibitive)]
    tensors = [replace(tensor, copy_seconds=copied.get(tensor.name or "")) for tensor in inner + entry]
    beside = model.cluster.overlap
    copies = Copies(
        rate=model.cluster.nodes[0].host.bandwidth,
        forward=forward * beside,
        backward=backward * beside,
        budget=_host_room(started, sizes, model) * (1 - ROUNDING),
        sparing=True,
    )
    choice = choose(tensors, room.left * (1 - ROUNDING), copies)
    if choice.seconds >= prohibitive:
        return None
    device, host = _names(choice, sorted(kind.tensors, key=lambda tensor: tensor.name == BLOCK_INPUT))
    if names is not None:  # The choice leaves out names that nothing reads.
        device = tuple(name for name in names if name not in host)
        return started.model_copy(update={"saved": SavedTensors(device=device, host=host)})
    return _saving(started, SavedTensors(device=tuple(n for n in device if n != BLOCK_INPUT), host=host), kind)


def _host_room(plan: Plan, sizes: dict[str, float], model: CostModel) -> float:
    """Bytes that the fullest host has room for, if it holds tensors of these sizes."""
    most = 0.0
    for name, size in sizes.items():
        by_device = offloaded_activation_bytes(plan, model.profile, SavedTensors(host=(name,)))
        most = max(most, fullest_host(by_device, model.places.per_node) / (size or 1.0))
    capacity = min(node.host_memory for node in model.cluster.nodes)
    return capacity / most if most else math.inf


def _started(plan: Plan, saved: SavedTensors, model: CostModel) -> "tuple[Plan, _Room] | None":
    """The plan that saves only these, and its stage with the least memory left; None if it does not fit."""
    started = plan.model_copy(update={"recompute": True, "saved": saved, "seconds": None, "lower_bound": None})
    estimate = price(started, model)
    if any(stage.total_bytes > stage.capacity for stage in estimate.stages):
        return None
    rooms = [_room(started, at, stage, model) for at, stage in enumerate(estimate.stages)]
    return started, min(rooms, key=lambda room: room.left / (room.divided or 1.0))


def _block(model: CostModel) -> LayerKind:
    return model.kinds[model.index[len(model.index) // 2]]


def _seconds(kind: LayerKind, forward: float, sums: float) -> dict[str, float]:
    """Seconds to recompute every tensor."""
    shares, summed = flops_shares(kind.tensors), all_reduce_shares(kind.tensors)
    return {name: shares[name] * forward + summed[name] * sums for name in shares}


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The memory that a stage has for saved tensors of one micro-batch in the blocks of its fullest chunk.

    left: bytes.  divided, whole: how many samples' bytes of a tensor all blocks save, if the tensor axis divides it and
    if not.  entry: share of a block's input that offloading it frees on the device.  blocks: (tensor degree, samples)
    of each.
    """

    stage: int
    chunk: int
    left: float
    divided: float
    whole: float
    entry: float
    blocks: tuple[tuple[int, int], ...]

    def sizes(self, kind: LayerKind) -> dict[str, float]:
        """Bytes of every tensor in all blocks."""
        return {tensor.name: tensor.bytes * (self.divided if tensor.sharded else self.whole) for tensor in kind.tensors}

    def copies(self, name: str, model: CostModel, sequence: bool) -> float:
        """Seconds to move a tensor of all blocks to the host or back."""
        middle, host = model.index[len(model.index) // 2], model.cluster.nodes[0].host  # all nodes are equal
        return sum(
            float(model.activations.copy_seconds(host, [name], tensor, tensor if sequence else 1, local)[middle])
            for tensor, local in self.blocks
        )


def _room(plan: Plan, position: int, estimate: StageEstimate, model: CostModel) -> _Room:
    stage, samples = plan.stages[position], plan.batch // plan.micro_batches
    rooms = []
    for number, chunk in enumerate(stage.chunks):
        layers = zip(range(chunk.first, chunk.stop), chunk.tensor, strict=True)
        degrees = [tensor for layer, tensor in layers if 0 < layer < model.num_layers - 1]
        local = [-(-samples * tensor // stage.devices) for tensor in degrees]
        divided = sum(count / tensor for count, tensor in zip(local, degrees, strict=True))
        left = (estimate.capacity - estimate.total_bytes) / estimate.in_flight
        whole = divided if plan.sequence else float(sum(local))
        blocks = tuple(zip(degrees, local, strict=True))
        on_device, beside_offload = model.activations.input_shares(
            min(max(chunk.sample_chunks), *local, samples) if max(degrees, default=1) > 1 else 1
        )
        rooms.append(
            _Room(
                stage=position,
                chunk=number,
                left=left,
                divided=divided,
                whole=whole,
                entry=on_device - beside_offload,
                blocks=blocks,
            )
        )
    return max(rooms, key=lambda room: room.divided)


def _saving(plan: Plan, saved: SavedTensors, kind: LayerKind) -> Plan:
    """The plan that saves these; without recomputation if that is everything, on the devices."""
    read = {tensor.name for tensor in kind.tensors if tensor.read and tensor.name != BLOCK_INPUT}
    if not saved.host and read.issubset(saved.device):
        return plan.model_copy(update={"recompute": False, "saved": None})
    return plan.model_copy(update={"saved": None if saved == SavedTensors() else saved})


def _passes(plan: Plan, room: _Room, model: CostModel) -> tuple[float, float, float]:
    """Seconds of the blocks without recomputation: forward, its all-reduces, backward."""
    strategy = replace(strategy_of(plan), zero=0, recompute=False, saved=None)
    chunk = plan.stages[room.stage].chunks[room.chunk]
    part = stage_layers(plan, room.stage, strategy, model)[room.chunk]
    inner = slice(int(chunk.first == 0), -1 if chunk.stop == model.num_layers else None)
    forward, sums, backward = (
        float(values[inner].sum()) for values in (part.forward, part.forward_tensor, part.backward)
    )
    return forward, sums, backward


def _names(choice: Choice, tensors: Sequence[NamedTensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of tensors that are read: saved on the device, and offloaded to the host."""
    fates = list(zip(tensors, choice.fates, strict=True))
    device, host = (
        tuple(tensor.name for tensor, chosen in fates if chosen == fate and tensor.read)
        for fate in (Fate.SAVED, Fate.OFFLOADED)
    )
    return device, host
