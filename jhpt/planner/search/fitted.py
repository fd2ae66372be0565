"""A plan by hand that does not fit: adds the recomputation and CPU offload that make it fit.

The settings of `parallel` stay, with one exception: on one data rank weights may be rounded when they are used
(ZeRO-3), which shards nothing there.  The decisions that `memory` leaves open (`auto`) become those of the fastest plan
that fits. Blocks are recomputed either completely or not at all; only the full search chooses activations by name.
"""

import itertools
from collections.abc import Iterator

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloads
from jhpt.planner.search.request import offload_kinds


def fitted(plan: Plan, model: CostModel, config: Config) -> Plan:
    """The plan itself if it fits the whole memory or if nothing fits; else one that fits and leaves the reserve."""
    reserve = model.cluster.nodes[0].device.reserve
    if all((1 - reserve) * stage.total_bytes <= stage.capacity for stage in price(plan, model).stages):
        return plan
    priced = [
        (estimate.seconds, candidate)
        for candidate in _open(plan, model, config)
        if (estimate := _priced(candidate, model))
    ]
    return min(priced, key=lambda pair: pair[0])[1] if priced else plan


def _open(plan: Plan, model: CostModel, config: Config) -> Iterator[Plan]:
    recompute = (False, True) if config.memory.recompute == "auto" else (plan.recompute,)
    blocks, kinds = plan.stages[-1].chunks[-1].stop - 2, offload_kinds(config)
    more = (
        offloads(blocks, tuple(kind for kind in kinds if kind), config.optimizer.update_in_backward)
        if config.memory.offload == "auto"
        else []
    )
    for choice, offload in itertools.product(recompute, [plan.offload, *more]):
        yield plan.model_copy(update={"recompute": choice, "offload": offload})
    if plan.replicas == 1 and plan.offload is None:
        for choice, zero in itertools.product(recompute, model.levels((3,), 1, plan.space)):
            yield plan.model_copy(update={"recompute": choice, "zero": zero})


def _priced(plan: Plan, model: CostModel) -> Estimate | None:
    """The estimate; None if the plan does not fit or cannot be run."""
    try:
        estimate = price(plan, model)
    except InputError:
        return None
    return estimate if estimate.fits else None
