"""Which plan to run: the plainest of those that are about as fast as the fastest.

Predicted seconds err by more than a few percent (`jhpt bench hybrid`, `jhpt bench predict`).  A plan that promises less
than that is not worth its stages and degrees: what it gains may not be there, what it complicates is.
"""

from collections.abc import Iterable

from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import price
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import Request
from jhpt.planner.search.solve import Answer

MARGIN = 0.05
"""By how much a plan may be slower, as predicted, than the fastest."""


def plan_to_run(answer: Answer, asked: Request, devices: int | None = None) -> Plan:
    """The plainest of the plans that were found and the baselines.  devices: all that have to take part, if they do."""
    found = [one.plan for one in baselines(asked, answer.model) if one.plan is not None and None in asked.offload]
    priced = [plan.model_copy(update={"seconds": price(plan, answer.model).seconds}) for plan in found]
    plans = [answer.plan, *answer.alternatives, *priced]
    whole = [plan for plan in plans if devices is None or plan.devices == devices]
    same = {"device": answer.plan.device, "lower_bound": answer.plan.lower_bound}
    return plainest(whole or plans).model_copy(update=same)


def plainest(plans: Iterable[Plan], margin: float = MARGIN) -> Plan:
    """Of plans within `margin` of the fastest: all on the devices before some on the host, exact sums before compressed
    ones, one stage before several, then the fewest kinds of parallelism, tensor degrees, chunks, no recomputation,
    least ZeRO, the smallest degree, gpipe; of equally plain ones the fastest.

    GPipe before 1F1B, where it fits: the two are predicted to take the same time, and 1F1B, whose stages wait for each
    other in both directions all along, took 4 % longer (mlp at 100 Mbit/s on emulated hosts: 744 against 716 ms).
    """
    candidates = list(plans)
    limit = (1 + margin) * min(map(_seconds, candidates))

    def plainness(plan: Plan) -> tuple[float, ...]:
        late = len(plan.stages) > 1 and plan.schedule != "gpipe"
        piped, tensor = len(plan.stages) > 1, plan.degrees[-1]
        kinds = piped + (tensor > 1) + (plan.stages[0].devices > plan.degrees[0])
        on_host = plan.offload is not None or (plan.saved is not None and bool(plan.saved.host))
        exact = on_host, plan.compression.on
        order = *exact, piped, kinds, len(plan.degrees), plan.chunks, plan.recompute, plan.zero, tensor
        return *order, late, _seconds(plan)

    return min((plan for plan in candidates if _seconds(plan) <= limit), key=plainness)


def _seconds(plan: Plan) -> float:
    assert plan.seconds is not None
    return plan.seconds
