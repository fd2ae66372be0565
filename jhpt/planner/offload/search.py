"""The fastest plan whose blocks live on the host.

There are few: one stage without tensor parallelism, and of these every combination of

    devices, those that share the batch evenly      kind of rows on the host, and how many blocks stay behind each
    micro-batches                                   recomputation

is priced, but for what computation alone rules out.  So what is found is the fastest there is.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jhpt.core.config import divisors
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Stage, Zero, runs_of
from jhpt.planner.costs import CostModel
from jhpt.planner.estimate import price
from jhpt.planner.offload.hosted import check_blocks, offloads
from jhpt.planner.request import Incumbent, Request


def search_hosted(asked: Request, model: CostModel, best: Incumbent) -> None:
    """Offers them to `best`, but for those whose computation alone takes longer than what is there."""
    for shape in _shapes(asked, model):
        bound = _least_seconds(shape, asked, model)
        if bound >= best.cutoff:
            best.leave(bound)
            continue
        for plan in _plans(shape, asked, model):
            best.offer(plan, model)


def check_hosted(asked: Request, model: CostModel) -> None:
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


def hosted_plans(asked: Request, model: CostModel) -> Iterator[Plan]:
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
    for offload in offloads(layers - 2, tuple(kind for kind in asked.offload if kind is not None), asked.at_once):
        yield Plan(
            model=model.profile.name,
            cluster=model.cluster.name,
            batch=asked.batch,
            micro_batches=shape.micro_batches,
            schedule="gpipe",
            zero=_levels(asked)[0],
            recompute=shape.recompute,
            kept=asked.kept if shape.recompute else None,
            offload=offload,
            stages=(Stage(device=0, devices=shape.devices, chunks=(chunk,)),),
        )


def _levels(asked: Request) -> list[Zero]:
    return [level for level in asked.zero if level < 3]


def _least_seconds(shape: _Shape, asked: Request, model: CostModel) -> float:
    """Computation alone."""
    forward, backward = model.compute_seconds(asked.batch // shape.micro_batches // shape.devices, 1)
    again = forward[model.index[1:-1]].sum() if shape.recompute else 0.0
    return shape.micro_batches * float((forward + backward)[model.index].sum() + again)


def nearest_hosted(asked: Request, model: CostModel) -> list[str]:
    """What would have to be larger for any of them to fit; empty: there are none."""
    priced = [price(plan, model).stages[0] for plan in hosted_plans(asked, model)]
    if not priced:
        return []
    device, host = priced[0].capacity, priced[0].host_capacity
    lines = [f"nor with blocks on the host: devices have {_gib(device)}, each host {_gib(host)} for them"]
    if fitting := [one.total_bytes for one in priced if one.total_host_bytes <= host]:
        lines.append(f"with blocks on the host it would fit with {_gib(min(fitting))} per device")
    if fitting := [one.total_host_bytes for one in priced if one.total_bytes <= device]:
        lines.append(f"with blocks on the host it would fit with {_gib(min(fitting))} for them on each host")
    if batch := _largest_batch(asked, model):
        lines.append(f"with blocks on the host a batch of {batch} would fit")
    return lines


def _largest_batch(asked: Request, model: CostModel) -> int | None:
    """That divides the batch, with any number of micro-batches."""
    for batch in reversed(divisors(asked.batch)[:-1]):
        smaller = replace(asked, batch=batch, micro_batches=tuple(divisors(batch)))
        if any(price(plan, model).fits for plan in hosted_plans(smaller, model)):
            return batch
    return None


def _has_blocks(model: CostModel) -> bool:
    try:
        check_blocks(model)
    except InputError:
        return False
    return True


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
