"""The fastest plan whose blocks live on the host.

There are few: one stage without tensor parallelism, and of these every combination of

    devices, those that share the batch evenly      kind of rows on the host, and how many blocks stay behind each
    micro-batches                                   recomputation

is priced, but for what computation alone rules out, or copies beside blocks that compute nothing again.  Where it is
open what a block keeps, a plan takes of the sets of names that none beats both in bytes and in what is computed again
the first that fits: the fewer bytes, the longer the step.  So what is found is the fastest there is.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.divisors import divisors
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import Chunk, Plan, SavedTensors, Stage, Zero, runs_of
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import check_blocks, offloaded_step, offloads
from jhpt.planner.cost.recompute import NOTHING, repeated, size_of
from jhpt.planner.search.request import Incumbent, Request


def search_offloaded(asked: Request, model: CostModel, best: Incumbent) -> None:
    """Offers them to `best`, but for those whose computation alone takes longer than what is there."""
    for shape in _shapes(asked, model):
        bound = _least_seconds(shape, asked, model)
        if bound >= best.cutoff:
            best.note_unexplored_bound(bound)
            continue
        names = _names(asked, model) if shape.recompute else []
        for plan in _plans(shape, asked, model):
            if names and (least := offloaded_step(_keeping(plan, None), model).seconds) >= best.cutoff:
                best.note_unexplored_bound(least)
                continue
            best.offer(_least_repeated(plan, names, model), model)


def check_offload(asked: Request, model: CostModel) -> None:
    """Refuses what no plan with blocks on the host does.

    Raises:
      InputError: compressed sums or gradients, devices of several kinds, or layers that differ.
    """
    if None not in asked.compression or asked.gradient_compression.on:
        raise InputError(
            "memory.offload puts blocks on the host, where neither sums nor gradients are compressed; set "
            "parallel.compression=off and parallel.gradient_compression=off, or memory.offload=off"
        )
    if model.cluster.mixed:
        raise InputError(
            f"{model.cluster.name} has nodes of several kinds; blocks live on hosts of one; leave out offload"
        )
    check_blocks(model)


def offloaded_plans(asked: Request, model: CostModel) -> Iterator[Plan]:
    """All plans that the request leaves open; none where blocks cannot live on the host."""
    return (plan for shape in _shapes(asked, model) for plan in _plans(shape, asked, model))


class _Shape(NamedTuple):
    devices: int
    micro_batches: int
    recompute: bool


def _shapes(asked: Request, model: CostModel) -> Iterator[_Shape]:
    plain = None in asked.compression and not asked.gradient_compression.on
    if set(asked.offload) == {None} or not _levels(asked) or not plain or model.cluster.mixed or not _has_blocks(model):
        return
    for choice in itertools.product(divisors(model.cluster.num_devices), asked.micro_batches, asked.recompute):
        shape = _Shape(*choice)
        if asked.batch // shape.micro_batches % shape.devices == 0:
            yield shape


def _plans(shape: _Shape, asked: Request, model: CostModel) -> Iterator[Plan]:
    layers = model.num_layers
    chunk = Chunk(first=0, runs=runs_of((1,) * layers))
    for offload in offloads(
        layers - 2, tuple(kind for kind in asked.offload if kind is not None), asked.update_in_backward
    ):
        yield Plan(
            model=model.profile.name,
            cluster=model.cluster.name,
            batch=asked.batch,
            micro_batches=shape.micro_batches,
            schedule="gpipe",
            zero=_levels(asked)[0],
            recompute=shape.recompute,
            saved=asked.saved if shape.recompute else None,
            offload=offload,
            stages=(Stage(device=0, devices=shape.devices, chunks=(chunk,)),),
        )


def _names(asked: Request, model: CostModel) -> list[SavedTensors]:
    """Sets of names that a block may keep, most bytes first; none where the request leaves nothing open."""
    tensors = model.kinds[model.index[1]].tensors
    names = [one.name for one in tensors if one.read and one.name != BLOCK_INPUT]
    if len(asked.recompute) < 2 or asked.saved is not None:
        return []
    sets = [SavedTensors(device=some) for size in range(len(names)) for some in itertools.combinations(names, size)]
    costs = {saved: (repeated(tensors, saved).seconds, size_of(tensors, saved.device).on(1, 1)) for saved in sets}
    best, least = list[SavedTensors](), math.inf
    for saved in sorted(sets, key=lambda saved: costs[saved]):
        if costs[saved][1] < least:
            best, least = [*best, saved], costs[saved][1]
    return best


def _least_repeated(plan: Plan, names: list[SavedTensors], model: CostModel) -> Plan:
    """The plan with the first of these sets that fits; itself where none does."""
    first = bisect.bisect_left(names, True, key=lambda saved: price(_keeping(plan, saved), model).fits)
    return _keeping(plan, names[first]) if first < len(names) else plan


def _keeping(plan: Plan, saved: SavedTensors | None) -> Plan:
    """With these names; None: all."""
    if saved is None:
        return plan.model_copy(update={"recompute": False, "saved": None})
    return plan.model_copy(update={"saved": saved if saved.device else None})


def _levels(asked: Request) -> list[Zero]:
    return [level for level in asked.zero if level < 3]


def _least_seconds(shape: _Shape, asked: Request, model: CostModel) -> float:
    """Computation alone; of what is computed again, what no choice of names spares."""
    forward, backward = model.compute_seconds(asked.batch // shape.micro_batches // shape.devices, 1)
    blocks, again = model.index[1:-1], 0.0
    if shape.recompute and asked.recompute == (True,):
        again = (forward * model.activations.repeated(asked.saved or NOTHING)[0])[blocks].sum()
    return shape.micro_batches * float((forward + backward)[model.index].sum() + again)


def nearest_offloaded(asked: Request, model: CostModel) -> list[str]:
    """What would have to be larger for any of them to fit; empty: there are none."""
    priced = [price(plan, model).stages[0] for plan in offloaded_plans(asked, model)]
    if not priced:
        return []
    device, host = model.cluster.nodes[0].device, priced[0].host_capacity
    lines = [f"nor with blocks on the host: devices have {gib(device.memory)}, each host {gib(host)} for them"]
    if fitting := [one.total_bytes for one in priced if one.total_host_bytes <= host]:
        least = min(fitting) / (1 - device.reserve)
        lines.append(f"with blocks on the host it would fit with {enough_gib(least)} per device")
    if fitting := [one.total_host_bytes for one in priced if one.total_bytes <= device.usable]:
        lines.append(f"with blocks on the host it would fit with {enough_gib(min(fitting))} for them on each host")
    if batch := _largest_batch(asked, model):
        lines.append(f"with blocks on the host a batch of {batch} would fit")
    return lines


def _largest_batch(asked: Request, model: CostModel) -> int | None:
    """That divides the batch, with any number of micro-batches."""
    for batch in reversed(divisors(asked.batch)[:-1]):
        smaller = replace(asked, batch=batch, micro_batches=tuple(divisors(batch)))
        if any(price(plan, model).fits for plan in offloaded_plans(smaller, model)):
            return batch
    return None


def _has_blocks(model: CostModel) -> bool:
    try:
        check_blocks(model)
    except InputError:
        return False
    return True
