"""The fastest plan with CPU offload: the state of the blocks lies on the host and is streamed to the devices.

Such plans have one stage and no tensor parallelism, so there are few of them.  Every combination of

    devices (any number that divides the batch evenly)      kind of offloaded state, and how many blocks stay resident
    micro-batches                                           recomputation

is priced, except those that a bound rules out: computation alone, or the step without any recomputation.  Where the
request leaves open which activations to save, a plan takes the first set that fits.  The sets are those that no other
set beats in both bytes and recomputed seconds, ordered by bytes; fewer bytes mean a longer step.  So the result is the
fastest plan there is.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.divisors import divisors
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import Chunk, Plan, SavedTensors, Stage, Zero, runs_of
from jhpt.core.rules import conflict
from jhpt.core.work import size_of
from jhpt.planner.cost.activations import NOTHING, repeated
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import blocks_of, offloaded_step, offloads
from jhpt.planner.search.request import Incumbent, Request


def search_offloaded(request: Request, model: CostModel, best: Incumbent) -> None:
    """Offers all plans with CPU offload to `best`, except those whose bound is above its seconds."""
    for shape in _shapes(request, model):
        bound = _least_seconds(shape, request, model)
        if bound >= best.cutoff:
            best.note_unexplored_bound(bound)
            continue
        names = _names(request, model) if shape.recompute else []
        for plan in _plans(shape, request, model):
            if names and (least := offloaded_step(_saving(plan, None), model).seconds) >= best.cutoff:
                best.note_unexplored_bound(least)
                continue
            best.offer(_least_recomputed(plan, names, model), model)


def offloaded_plans(request: Request, model: CostModel) -> Iterator[Plan]:
    """All plans with CPU offload that the request leaves open; none if the state of the blocks cannot be offloaded."""
    return (plan for shape in _shapes(request, model) for plan in _plans(shape, request, model))


class _Shape(NamedTuple):
    devices: int
    micro_batches: int
    recompute: bool


def _shapes(request: Request, model: CostModel) -> Iterator[_Shape]:
    plain = None in request.compression and not request.gradient_compression.on
    alike = conflict(blocks_of(model)) is None
    if set(request.offload) == {None} or not _levels(request) or not plain or model.cluster.mixed or not alike:
        return
    for choice in itertools.product(divisors(model.cluster.num_devices), request.micro_batches, request.recompute):
        shape = _Shape(*choice)
        if request.batch // shape.micro_batches % shape.devices == 0:
            yield shape


def _plans(shape: _Shape, request: Request, model: CostModel) -> Iterator[Plan]:
    layers = model.num_layers
    chunk = Chunk(first=0, runs=runs_of((1,) * layers))
    for offload in offloads(
        layers - 2, tuple(kind for kind in request.offload if kind is not None), request.update_in_backward
    ):
        yield Plan(
            model=model.profile.name,
            cluster=model.cluster.name,
            batch=request.batch,
            micro_batches=shape.micro_batches,
            schedule="gpipe",
            zero=_levels(request)[0],
            recompute=shape.recompute,
            saved=request.saved if shape.recompute else None,
            offload=offload,
            stages=(Stage(device=0, devices=shape.devices, chunks=(chunk,)),),
        )


def _names(request: Request, model: CostModel) -> list[SavedTensors]:
    """Sets of activations that a block may save, most bytes first; none where the request leaves nothing open."""
    tensors = model.kinds[model.index[1]].tensors
    names = [tensor.name for tensor in tensors if tensor.read and tensor.name != BLOCK_INPUT]
    if len(request.recompute) < 2 or request.saved is not None:
        return []
    sets = [SavedTensors(device=part) for size in range(len(names)) for part in itertools.combinations(names, size)]
    costs = {saved: (repeated(tensors, saved).seconds, size_of(tensors, saved.device).on(1, 1)) for saved in sets}
    best, least = list[SavedTensors](), math.inf
    for saved in sorted(sets, key=lambda saved: costs[saved]):
        if costs[saved][1] < least:
            best, least = [*best, saved], costs[saved][1]
    return best


def _least_recomputed(plan: Plan, names: list[SavedTensors], model: CostModel) -> Plan:
    """The plan with the first of these sets that fits, or the plan itself if none does."""
    first = bisect.bisect_left(names, True, key=lambda saved: price(_saving(plan, saved), model).fits)
    return _saving(plan, names[first]) if first < len(names) else plan


def _saving(plan: Plan, saved: SavedTensors | None) -> Plan:
    """The plan that saves these activations; None: all of them, so it recomputes nothing."""
    if saved is None:
        return plan.model_copy(update={"recompute": False, "saved": None})
    return plan.model_copy(update={"saved": saved if saved.device else None})


def _levels(request: Request) -> list[Zero]:
    return [level for level in request.zero if level < 2]


def _least_seconds(shape: _Shape, request: Request, model: CostModel) -> float:
    """Seconds of computation alone, with only the recomputation that no choice of saved activations avoids."""
    kinds = model.places.at(0, shape.devices).kinds
    forward, backward = model.compute_seconds(kinds, request.batch // shape.micro_batches // shape.devices, 1)
    blocks, again = model.index[1:-1], 0.0
    if shape.recompute and request.recompute == (True,):
        again = (forward * model.activations.repeated(request.saved or NOTHING)[0])[blocks].sum()
    return shape.micro_batches * float((forward + backward)[model.index].sum() + again)


def nearest_offloaded(request: Request, model: CostModel) -> list[str]:
    """What would have to be larger for a plan with CPU offload to fit; empty if there is no such plan."""
    priced = [price(plan, model).stages[0] for plan in offloaded_plans(request, model)]
    if not priced:
        return []
    device, host = model.cluster.nodes[0].device, priced[0].host_capacity
    lines = [
        f"nor with CPU offload: devices have {gib(device.memory)}, and each host has {gib(host)} for offloaded state"
    ]
    if device_bytes := [stage.total_bytes for stage in priced if stage.total_host_bytes <= host]:
        least = min(device_bytes) / (1 - device.reserve)
        lines.append(f"with CPU offload it would fit with {enough_gib(least)} per device")
    if host_bytes := [stage.total_host_bytes for stage in priced if stage.total_bytes <= device.usable]:
        lines.append(f"with CPU offload it would fit with {enough_gib(min(host_bytes))} for offloaded state per host")
    if batch := _largest_batch(request, model):
        lines.append(f"with CPU offload a batch of {batch} would fit")
    return lines


def _largest_batch(request: Request, model: CostModel) -> int | None:
    """The largest divisor of the batch that would fit, with any number of micro-batches."""
    for batch in reversed(divisors(request.batch)[:-1]):
        smaller = replace(request, batch=batch, micro_batches=tuple(divisors(batch)))
        if any(price(plan, model).fits for plan in offloaded_plans(smaller, model)):
            return batch
    return None
