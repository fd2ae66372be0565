"""Every way to save activations in a plan by hand."""

from jhpt.core.plan import OtherBlocks, Plan
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import request
from jhpt.planner.search.saved_sets import SavedSets


def with_every_set(plan: Plan, model: CostModel, *, host: bool = False) -> list[Plan]:
    """The plan with every set of saved activations, the device's alone or the host's too, and on one stage of one
    degree with every two sets in the first and the other blocks."""
    every = SavedSets(request(plan.batch, host=host), model, "spmd").sets
    plans = [plan.model_copy(update={"recompute": True, "saved": saved}) for saved in every]
    if len(plan.stages) > 1 or len(plan.degrees) > 1 or host:
        return plans
    others = [
        OtherBlocks(after=after, saved=saved) for after in range(1, model.num_layers - 2) for saved in (*every, None)
    ]
    return plans + [one.model_copy(update={"other_blocks": other}) for one in plans for other in others]


def fastest(plan: Plan, model: CostModel, *, host: bool = False) -> Plan:
    """The fastest of them that fits, or the plan without recomputation."""
    plans = [plan.model_copy(update={"recompute": False, "saved": None}), *with_every_set(plan, model, host=host)]
    priced = [(estimate.seconds, at) for at, each in enumerate(plans) if (estimate := price(each, model)).fits]
    return plans[min(priced)[1]]
