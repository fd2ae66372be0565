"""Which named tensors the blocks of a plan keep: what computes least again in the memory that is left.

One set of names for all blocks, for one program runs them.  A plan that recomputes everything leaves every stage some
memory; what a name takes of it is its bytes in all blocks of the stage's fullest chunk, times the micro-batches in
flight.  The stage that has least room decides, by the integer programme of `block`.

Which plans are worth it is asked of the search itself: of a model whose tensors are computed again in no time, its
plans are as fast as if they kept everything and as small as if they kept nothing.  So no choice of names is faster than
the fastest of them, and the best of every shape are those to choose names for.

Where tensors may wait on the host (`Request.host`) so may blocks' inputs: the model whose plans are asked for has them
there, too, behind a link that takes no time, on hosts that hold anything.  Names that are given are kept in any case,
and what is chosen is where.  The programme then has the input and given names among its tensors, as what cannot be
computed again.  Of choices that are equally fast it takes the one with the fewest bytes on the host.
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
from jhpt.planner.cost.activation_offload import fullest_host, waiting_bytes
from jhpt.planner.cost.estimate import StageEstimate, price, stage_layers
from jhpt.planner.cost.layers import strategy_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.recompute import flops_shares, graph, sum_shares
from jhpt.planner.cost.recompute_block import Choice, Copies, Fate, Tensor, choose
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.spmd import search_spmd

SHAPES = 8
"""Of plans, the fastest ones, to choose names for."""

ROUNDING = 1e-6
"""By how much, relative, the integer programme may exceed a budget."""

SAME = 1e-9
"""Relative; of two plans that take as long the one without the host is better."""


def improve(asked: Request, model: CostModel, best: Incumbent) -> None:
    """Offers plans that keep some names, where the request leaves that open or lets names wait on the host, and lowers
    the bound to theirs."""
    named = asked.host and asked.saved is not None
    if (len(asked.recompute) < 2 and not named) or not any(kind.tensors for kind in model.kinds):
        return
    names = asked.saved.device if named and asked.saved else None
    free, relaxed = _relaxed(asked, model, names), Incumbent()
    search_spmd(replace(asked, recompute=(True,)), free, relaxed)
    best.note_unexplored_bound(relaxed.lower_bound)
    for plan in _candidates(asked, free, relaxed, best):
        found = with_names(plan, model, host=asked.host, names=names)
        if found is not None:
            best.offer(found, model)


def _relaxed(asked: Request, model: CostModel, names: tuple[str, ...] | None) -> CostModel:
    """A model none of whose plans that recompute is slower or larger than what names make of it."""
    profile = freely_recomputed(model.profile) if names is None else model.profile
    if not asked.host:
        return CostModel(profile, model.cluster, model.gradient_compression)
    away = SavedTensors(host=(BLOCK_INPUT, *(names or ())))
    return CostModel(profile, free_hosts(model.cluster), model.gradient_compression, away)


def free_hosts(cluster: Cluster) -> Cluster:
    """The cluster, with hosts that hold anything, at once."""
    link = Link(bandwidth=sys.float_info.max, latency=0.0)
    nodes = tuple(node.model_copy(update={"host": link, "host_memory": math.inf}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _candidates(asked: Request, free: CostModel, relaxed: Incumbent, best: Incumbent) -> Iterator[Plan]:
    """Plans of the fastest shapes, cut into any number of micro-batches, that could be faster than the best so far."""
    fastest = sorted(relaxed.shapes.values(), key=lambda pair: pair[0])[:SHAPES]
    shapes = ((plan, zero) for _, plan in fastest for zero in free.levels(asked.zero, plan.replicas, plan.space))
    for (plan, zero), count in itertools.product(shapes, asked.micro_batches):
        varied = plan.model_copy(update={"micro_batches": count, "zero": zero})
        try:
            estimate = price(varied, free)
        except InputError:  # a micro-batch that the replicas cannot share
            continue
        if estimate.fits and estimate.seconds < best.cutoff:
            yield varied


def freely_recomputed(profile: ModelProfile) -> ModelProfile:
    """The profile, whose named tensors are computed again in no time."""

    def free(kind: LayerKind) -> LayerKind:
        tensors = tuple(tensor.model_copy(update={"flops": 0.0, "summed": False}) for tensor in kind.tensors)
        return kind.model_copy(update={"tensors": tensors})

    return profile.model_copy(update={"kinds": {name: free(kind) for name, kind in profile.kinds.items()}})


def with_names(
    plan: Plan, model: CostModel, *, host: bool = False, names: tuple[str, ...] | None = None
) -> Plan | None:
    """The plan, recomputing what is best; None: it does not fit even if it keeps nothing.

    Args:
      host: whether tensors, blocks' inputs among them, may wait on the host.
      names: with host: what is kept beside the input; None: what is best.
    """
    found = [] if names is not None else [_on_device(plan, model)]
    if host:
        found.append(_anywhere(plan, model, names))
    plans = [one for one in found if one is not None]
    if len(plans) < 2:
        return plans[0] if plans else None
    return min(plans, key=lambda one: _rank(one, model))


def _rank(plan: Plan, model: CostModel) -> tuple[bool, float]:
    estimate = price(plan, model)
    return not estimate.fits, estimate.seconds * (1 - SAME * (plan.saved is None or not plan.saved.host))


def _on_device(plan: Plan, model: CostModel) -> Plan | None:
    """With what is kept on the devices."""
    if (found := _started(plan, SavedTensors(), model)) is None:
        return None
    started, room = found
    kind = _block(model)
    forward, sums, _ = _passes(started, room, model)
    choice = choose(graph(kind.tensors, _seconds(kind, forward, sums), room.sizes(kind)), room.left * (1 - ROUNDING))
    device, _ = _names(choice, [tensor for tensor in kind.tensors if tensor.name != BLOCK_INPUT])
    return _keeping(started, SavedTensors(device=device), kind)


def _anywhere(plan: Plan, model: CostModel, names: tuple[str, ...] | None) -> Plan | None:
    """With what is kept, of given names or of all, where it is best; None: there is no room for these and the input."""
    kind, found = _block(model), _started(plan, SavedTensors(host=(BLOCK_INPUT,)), model)
    if found is None or not kind.tensors:
        return None
    started, room = found
    forward, sums, backward = _passes(started, room, model)
    seconds, sizes = _seconds(kind, forward, sums), room.sizes(kind)
    travel = {tensor.name: room.copies(tensor.name, model, plan.sequence) for tensor in kind.tensors}
    needed = {BLOCK_INPUT, *(names or ())}
    # More than anything costs that does not compute these again.
    dear = 2 * (sum(seconds.values()) + 2 * sum(travel.values())) or 1.0
    inner = [
        replace(tensor, name=None) if names is not None and tensor.name not in needed else tensor
        for tensor in graph(kind.tensors, {n: dear if n in needed else s for n, s in seconds.items()}, sizes)
    ]
    whole = sizes[BLOCK_INPUT]
    entry = [Tensor(name=BLOCK_INPUT, bytes=room.entry * whole, there=whole, seconds=dear)]
    tensors = [replace(tensor, travel=travel.get(tensor.name or "")) for tensor in inner + entry]
    beside = model.cluster.overlap
    copies = Copies(
        rate=model.cluster.nodes[0].host.bandwidth,
        forward=forward * beside,
        backward=backward * beside,
        budget=_host_room(started, sizes, model) * (1 - ROUNDING),
        sparing=True,
    )
    choice = choose(tensors, room.left * (1 - ROUNDING), copies)
    if choice.seconds >= dear:
        return None
    device, host = _names(choice, sorted(kind.tensors, key=lambda tensor: tensor.name == BLOCK_INPUT))
    if names is not None:  # also those that nothing reads, which are nowhere
        device = tuple(name for name in names if name not in host)
        return started.model_copy(update={"saved": SavedTensors(device=device, host=host)})
    return _keeping(started, SavedTensors(device=tuple(n for n in device if n != BLOCK_INPUT), host=host), kind)


def _host_room(plan: Plan, sizes: dict[str, float], model: CostModel) -> float:
    """Bytes of tensors as large as these that the fullest host has room for."""
    most = 0.0
    for name, size in sizes.items():
        by_device = waiting_bytes(plan, model.profile, SavedTensors(host=(name,)))
        most = max(most, fullest_host(by_device, model.places.per_node) / (size or 1.0))
    capacity = min(node.host_memory for node in model.cluster.nodes)
    return capacity / most if most else math.inf


def _started(plan: Plan, saved: SavedTensors, model: CostModel) -> "tuple[Plan, _Room] | None":
    """The plan that keeps nothing more, and the stage that has least room then; None: the devices have none."""
    started = plan.model_copy(update={"recompute": True, "saved": saved, "seconds": None, "lower_bound": None})
    estimate = price(started, model)
    if any(stage.total_bytes > stage.capacity for stage in estimate.stages):
        return None
    rooms = [_room(started, at, own, model) for at, own in enumerate(estimate.stages)]
    return started, min(rooms, key=lambda room: room.left / (room.divided or 1.0))


def _block(model: CostModel) -> LayerKind:
    return model.kinds[model.index[len(model.index) // 2]]


def _seconds(kind: LayerKind, forward: float, sums: float) -> dict[str, float]:
    """To compute every tensor again."""
    shares, summed = flops_shares(kind.tensors), sum_shares(kind.tensors)
    return {name: shares[name] * forward + summed[name] * sums for name in shares}


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What a stage has for the names of one micro-batch in the blocks of its fullest chunk.

    left: bytes.  divided, whole: samples whose tensors take that, of tensors that the tensor axis divides or not.
    entry: share of a block's input that leaves the device with it.  blocks: (tensor degree, samples) of each.
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
        middle = model.index[len(model.index) // 2]
        return sum(
            float(model.activations.copy_seconds([name], tensor, tensor if sequence else 1, local)[middle])
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
        here, there = model.activations.input_shares(
            min(max(chunk.sample_chunks), *local, samples) if max(degrees, default=1) > 1 else 1
        )
        rooms.append(
            _Room(
                stage=position,
                chunk=number,
                left=left,
                divided=divided,
                whole=whole,
                entry=here - there,
                blocks=blocks,
            )
        )
    return max(rooms, key=lambda room: room.divided)


def _keeping(plan: Plan, saved: SavedTensors, kind: LayerKind) -> Plan:
    """The plan that keeps these; without recomputation where that is everything, on the devices."""
    read = {tensor.name for tensor in kind.tensors if tensor.read and tensor.name != BLOCK_INPUT}
    if not saved.host and read.issubset(saved.device):
        return plan.model_copy(update={"recompute": False, "saved": None})
    return plan.model_copy(update={"saved": None if saved == SavedTensors() else saved})


def _passes(plan: Plan, room: _Room, model: CostModel) -> tuple[float, float, float]:
    """Seconds of the blocks in the room, all kept: forward, sums of that, backward."""
    strategy = replace(strategy_of(plan), zero=0, recompute=False, saved=None)
    chunk = plan.stages[room.stage].chunks[room.chunk]
    part = stage_layers(plan, room.stage, strategy, model)[room.chunk]
    inner = slice(int(chunk.first == 0), -1 if chunk.stop == model.num_layers else None)
    forward, sums, backward = (
        float(values[inner].sum()) for values in (part.forward, part.forward_tensor, part.backward)
    )
    return forward, sums, backward


def _names(choice: Choice, tensors: Sequence[NamedTensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of what is read: on the device, on the host."""
    fates = list(zip(tensors, choice.fates, strict=True))
    device, host = (
        tuple(tensor.name for tensor, own in fates if own == fate and tensor.read)
        for fate in (Fate.SAVED, Fate.OFFLOADED)
    )
    return device, host
