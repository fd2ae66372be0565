"""Which named tensors the blocks of a plan keep: what computes least again in the memory that is left.

One set of names for all blocks, for one program runs them.  A plan that recomputes everything leaves every stage some
memory; what a name takes of it is its bytes in all blocks of the stage's fullest chunk, times the micro-batches in
flight.  The stage that has least room decides, by the integer programme of `block`.

Which plans are worth it is asked of the search itself: of a model whose tensors are computed again in no time, its
plans are as fast as if they kept everything and as small as if they kept nothing.  So no choice of names is faster than
the fastest of them, and the best of every shape are those to choose names for.  (Where a block's input goes to the
host, which only `with_names` does, a plan may be smaller.)
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jhpt.core.config import BLOCK_INPUT
from jhpt.core.errors import InputError
from jhpt.core.plan import Kept, Plan
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.costs import CostModel
from jhpt.planner.estimate import StageEstimate, price, stage_layers
from jhpt.planner.recompute.block import Choice, Copies, Fate, choose
from jhpt.planner.recompute.names import flops_shares, graph, sum_shares
from jhpt.planner.request import Incumbent, Request
from jhpt.planner.spmd import search_spmd
from jhpt.planner.tables import treatment_of

SHAPES = 8
"""Of plans, the fastest ones, to choose names for."""

ROUNDING = 1e-6
"""By how much, relative, the integer programme may exceed a budget."""


def improve(asked: Request, model: CostModel, best: Incumbent) -> None:
    """Offers plans that keep some names where the request leaves recomputation open, and lowers the bound to theirs."""
    if len(asked.recompute) < 2 or not any(kind.tensors for kind in model.kinds):
        return
    free = CostModel(freely_recomputed(model.profile), model.cluster, model.gradient_compression)
    relaxed = Incumbent()
    search_spmd(replace(asked, recompute=(True,)), free, relaxed)
    best.leave(relaxed.lower_bound)
    for plan in _candidates(asked, free, relaxed, best):
        named = with_names(plan, model)
        if named is not None:
            best.offer(named, model)


def _candidates(asked: Request, free: CostModel, relaxed: Incumbent, best: Incumbent) -> Iterator[Plan]:
    """Plans of the fastest shapes, cut into any number of micro-batches, that could be faster than the best so far."""
    fastest = sorted(relaxed.shapes.values(), key=lambda pair: pair[0])[:SHAPES]
    for (_, plan), count, zero in itertools.product(fastest, asked.micro_batches, asked.zero):
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


def with_names(plan: Plan, model: CostModel, *, host: bool = False) -> Plan | None:
    """The plan, recomputing what is best; None: it does not fit even if it keeps nothing.

    Args:
      host: whether tensors may wait on the host; the blocks' inputs do where nothing else fits.
    """
    kind = model.kinds[model.index[len(model.index) // 2]]
    for start in (Kept(), Kept(host=(BLOCK_INPUT,))) if host else (Kept(),):
        started = plan.model_copy(update={"recompute": True, "kept": start, "seconds": None, "lower_bound": None})
        estimate = price(started, model)
        if estimate.fits:
            rooms = [_room(started, at, own, model) for at, own in enumerate(estimate.stages)]
            room = min(rooms, key=lambda room: room.left / (room.divided or 1.0))
            return _named(started, room, kind, model, host=host)
    return None


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What a stage has for the names of one micro-batch in the blocks of its fullest chunk.

    left: bytes.  divided, whole: samples whose tensors take that, of tensors that the tensor axis divides or not.
    """

    stage: int
    chunk: int
    left: float
    divided: float
    whole: float


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
        rooms.append(_Room(stage=position, chunk=number, left=left, divided=divided, whole=whole))
    return max(rooms, key=lambda room: room.divided)


def _named(plan: Plan, room: _Room, kind: LayerKind, model: CostModel, *, host: bool) -> Plan:
    """The plan with the best names that the room has space for."""
    start = plan.kept or Kept()
    forward, sums, backward = _passes(plan, room, model)
    shares, summed = flops_shares(kind.tensors), sum_shares(kind.tensors)
    seconds = {name: shares[name] * forward + summed[name] * sums for name in shares}
    sizes = {tensor.name: tensor.bytes * (room.divided if tensor.sharded else room.whole) for tensor in kind.tensors}
    copies = None
    if host:
        rate = model.cluster.nodes[0].host.bandwidth
        away = sum(sizes[name] for name in start.host) / rate
        copies = Copies(rate=rate, forward=forward - away, backward=backward - away)
    choice = choose(graph(kind.tensors, seconds, sizes), room.left * (1 - ROUNDING), copies)
    kept = _kept(choice, kind, start)
    read = {tensor.name for tensor in kind.tensors if tensor.read and tensor.name != BLOCK_INPUT}
    if not kept.host and read.issubset(kept.device):
        return plan.model_copy(update={"recompute": False, "kept": None})
    return plan.model_copy(update={"kept": None if kept == Kept() else kept})


def _passes(plan: Plan, room: _Room, model: CostModel) -> tuple[float, float, float]:
    """Seconds of the blocks in the room, all kept: forward, sums of that, backward."""
    treatment = replace(treatment_of(plan), zero=0, recompute=False, kept=None)
    chunk = plan.stages[room.stage].chunks[room.chunk]
    part = stage_layers(plan, room.stage, treatment, model)[room.chunk]
    inner = slice(int(chunk.first == 0), -1 if chunk.stop == model.num_layers else None)
    forward, sums, backward = (
        float(values[inner].sum()) for values in (part.forward, part.forward_tensor, part.backward)
    )
    return forward, sums, backward


def _kept(choice: Choice, kind: LayerKind, start: Kept) -> Kept:
    inner = [tensor for tensor in kind.tensors if tensor.name != BLOCK_INPUT]
    fates = list(zip(inner, choice.fates, strict=True))
    device, host = (
        tuple(tensor.name for tensor, own in fates if own == fate and tensor.read)
        for fate in (Fate.SAVED, Fate.OFFLOADED)
    )
    return Kept(device=device, host=(*start.host, *host))
