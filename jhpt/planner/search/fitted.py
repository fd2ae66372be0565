"""A plan by hand that does not fit, with as much computed again and on the host as makes it fit.

What `parallel` says stays, but that over one data rank, which shares nothing out, weights may be rounded where they are
used (ZeRO-3).  Of what `memory` leaves open (`auto`) the fastest that fits is taken: with blocks recomputed wholly or
not at all, for names are chosen where all of a plan is.
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
    """The plan itself where it fits all of the memory, or where nothing fits; what takes its place leaves a reserve."""
    reserve = model.cluster.nodes[0].device.reserve
    if all((1 - reserve) * stage.total_bytes <= stage.capacity for stage in price(plan, model).stages):
        return plan
    priced = [(estimate.seconds, own) for own in _open(plan, model, config) if (estimate := _priced(own, model))]
    return min(priced, key=lambda pair: pair[0])[1] if priced else plan


def _open(plan: Plan, model: CostModel, config: Config) -> Iterator[Plan]:
    recompute = (False, True) if config.memory.recompute == "auto" else (plan.recompute,)
    blocks, kinds = plan.stages[-1].chunks[-1].stop - 2, offload_kinds(config)
    more = (
        offloads(blocks, tuple(kind for kind in kinds if kind), config.optimizer.update_in_backward)
        if config.memory.offload == "auto"
        else []
    )
    hosts = [plan.offload, *more]
    for again, offload in itertools.product(recompute, hosts):
        yield plan.model_copy(update={"recompute": again, "offload": offload})
    if plan.replicas == 1 and plan.offload is None:
        for again, zero in itertools.product(recompute, model.levels((3,), 1, plan.space)):
            yield plan.model_copy(update={"recompute": again, "zero": zero})


def _priced(plan: Plan, model: CostModel) -> Estimate | None:
    """None: it does not fit, or cannot be run."""
    try:
        estimate = price(plan, model)
    except InputError:
        return None
    return estimate if estimate.fits else None
