"""From a request to the fastest plan, or to a message that says what would have to change."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jhpt.core.cluster import Cluster
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan, Schedule, Zero
from jhpt.core.profile import ModelProfile
from jhpt.core.rules import check
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import check_blocks
from jhpt.planner.search.offload import search_offloaded
from jhpt.planner.search.recompute import improve
from jhpt.planner.search.refusal import refusal
from jhpt.planner.search.request import SCHEDULES, Incumbent, Request, choices_of
from jhpt.planner.search.request import request as request_of
from jhpt.planner.search.spaces import search


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The fastest plan, its estimate, and the fastest plan of every other shape that the search priced.

    on_devices: seconds of the fastest plan without CPU offload.  Infinite if none fits; None if none was requested.
    """

    plan: Plan
    estimate: Estimate
    alternatives: tuple[Plan, ...]
    model: CostModel
    on_devices: float | None = None

    @property
    def gap(self) -> float:
        """By how much a plan of the space could be faster at most, relative; 0 means proven optimal."""
        if not self.plan.lower_bound:
            return 0.0 if not self.estimate.seconds else math.inf
        return self.estimate.seconds / self.plan.lower_bound - 1


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    micro_batches: int | Iterable[int] | None = None,
    space: Space = "spmd",
    schedules: tuple[Schedule, ...] = SCHEDULES,
    zero: tuple[Zero, ...] = (0, 1, 3),
    recompute: tuple[bool, ...] = (False, True),
) -> Plan:
    """The fastest plan of `space` for a step of `batch` samples.  `solve` takes all other decisions of a `Request`.

    Args:
      batch: samples per step.
      micro_batches: into how many micro-batches the batch may be split; None: any divisor of the batch.
      schedules, zero, recompute: the choices that plans may make.

    Raises:
      InputError: no plan fits (the message gives the figures and the nearest change that would make one fit), or the
        request is impossible.
    """
    request = request_of(batch, micro_batches, schedules=schedules, zero=zero, recompute=recompute)
    return solve(profile, cluster, request, space).plan


def solve(profile: ModelProfile, cluster: Cluster, request: Request, space: Space = "spmd") -> Answer:
    """The fastest plan, with everything that explains it.

    Raises:
      InputError: as for `plan`.
    """
    model = CostModel(profile, cluster, request.gradient_compression, request.saved)
    check(choices_of(request, model, space))
    if space == "general" or model.tensor_all_reduce.stream is None:
        request = replace(request, compression=(None,))
    resident = None in request.offload
    best = search(request, model, space) if resident else Incumbent()
    if space == "spmd" and (best.plan is not None or request.host) and resident:
        improve(request, model, best)
    on_devices = best.seconds if resident else None
    if space == "spmd":
        if not resident:
            check_blocks(model)
        search_offloaded(request, model, best)
    if best.plan is None:
        raise InputError(refusal(request, model, space))
    return _answer(best, best.plan, model, on_devices)


def _answer(best: Incumbent, plan: Plan, model: CostModel, on_devices: float | None) -> Answer:
    device = None if model.cluster.mixed else model.cluster.nodes[0].device.name
    gradients = {"gradient_compression": model.gradient_compression}
    winner = plan.model_copy(
        update={"device": device, "seconds": best.seconds, "lower_bound": best.lower_bound, **gradients}
    )
    priced = [p.model_copy(update={"seconds": s, **gradients}) for s, p in best.shapes.values()]
    order = sorted((seconds, index) for index, (seconds, _) in enumerate(best.shapes.values()))
    alternatives = tuple(priced[index] for _, index in order if _differs(priced[index], winner))
    return Answer(
        plan=winner, estimate=price(winner, model), alternatives=alternatives, model=model, on_devices=on_devices
    )


def _differs(one: Plan, other: Plan) -> bool:
    return (one.stages, one.compression, one.offload) != (other.stages, other.compression, other.offload)
