"""A batch beside the requested one whose samples take less time, because more devices can share it evenly.

Replicas share a micro-batch evenly, so 7 devices cannot be 7 replicas at batch 64, but at 63.  A neighbour differs from
the batch by an eighth at most, and has a larger divisor in common with the number of devices; of these the nearest one
below and above with the largest such divisor.

Only plans of one stage in which all devices work are priced, without CPU offload: as many replicas as that divisor,
each of devices / replicas tensor ranks.  That takes some hundredths of a second.  A full search at that batch can find
faster plans, so the gain is at least what is said here.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jhpt.core.divisors import divisors
from jhpt.core.plan import Plan
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.grids import Grid, grid_plan
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.solve import Answer

NEARBY = 8
"""A neighbour differs from the batch by at most the batch divided by this."""

GAIN = 0.02
"""Share of a sample's seconds that a neighbour must save, compared with the batch, or with a nearer neighbour."""


@dataclass(frozen=True, kw_only=True)
class BetterBatch:
    """A neighbouring batch.  ratio: seconds per sample over those of the answer.  plan: one with this batch."""

    batch: int
    plan: Plan
    seconds: float
    ratio: float


def better_batch(answer: Answer) -> BetterBatch | None:
    """The neighbouring batch that saves at least `GAIN` of the seconds per sample; None if there is none.

    None also for space="general", whose stages need not be equal, and where state must be offloaded.
    """
    request, model, plan = answer.request, answer.model, answer.plan
    if request is None or plan.space == "general" or model.cluster.mixed or None not in request.offload:
        return None
    each = answer.estimate.seconds / plan.batch
    best, better = each, None
    for batch in _neighbours(plan.batch, model.cluster.num_devices):
        other = _request(request, batch)
        incumbent = Incumbent(seconds=best * batch * (1 - GAIN))
        for grid in _grids(other, model):
            incumbent.offer(grid_plan(grid, (), other, model), model)
        if incumbent.plan is not None:
            seconds, best = incumbent.seconds, incumbent.seconds / batch
            found = incumbent.plan.model_copy(update={"seconds": seconds, "device": plan.device})
            better = BetterBatch(batch=batch, plan=found, seconds=seconds, ratio=best / each)
    return better


def _neighbours(batch: int, devices: int) -> list[int]:
    """At most two batches, the nearer one first."""
    near = range(batch - batch // NEARBY, batch + batch // NEARBY + 1)
    most = max(math.gcd(one, devices) for one in near)
    if most == math.gcd(batch, devices):
        return []
    even = [one for one in near if math.gcd(one, devices) == most]
    sides = [one for one in even if one < batch][-1:], [one for one in even if one > batch][:1]
    return sorted((one for side in sides for one in side), key=lambda one: abs(one - batch))


def _request(request: Request, batch: int) -> Request:
    """The request for another batch.  Its numbers of micro-batches are any, or the requested ones that divide it."""
    counts = tuple(divisors(batch))
    if set(request.micro_batches) != set(divisors(request.batch)):
        counts = tuple(count for count in request.micro_batches if batch % count == 0)
    return replace(request, batch=batch, micro_batches=counts)


def _grids(request: Request, model: CostModel) -> Iterator[Grid]:
    """One stage of all devices, with as many replicas as batch and devices allow."""
    devices = model.cluster.num_devices
    data = math.gcd(request.batch, devices)
    tensor = devices // data
    if tensor not in model.common_degrees(devices):
        return
    compressions, samples = (request.compression, request.sample_chunks) if tensor > 1 else ((None,), (1,))
    counts = [count for count in request.micro_batches if request.batch // count % data == 0]
    for count in counts:
        levels = model.levels(request.zero, data, "spmd", count)
        for zero, recompute, how in itertools.product(levels, request.recompute, compressions):
            yield Grid(1, data, tensor, count, zero, recompute, "1f1b", 1, "spmd", how, samples)
