"""Which plan to run: the simplest of the plans that are about as fast as the fastest.

Predicted seconds are off by more than a few percent (`jhpt bench hybrid`, `jhpt bench predict`).  A plan that promises
less than that is not worth its stages and degrees: the gain may not exist, the complication does.
"""

from collections.abc import Iterable

from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import price
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import Request
from jhpt.planner.search.solve import Answer

MARGIN = 0.05
"""Relative.  A plan that is predicted to be slower than the fastest by more than this is not run."""


def plan_to_run(answer: Answer, request: Request, devices: int | None = None) -> Plan:
    """The simplest of the answer's plans and the baselines.

    devices: how many devices have to take part, where possible; None: any number.
    """
    known = baselines(request, answer.model)
    simple = [baseline.plan for baseline in known if baseline.plan is not None and None in request.offload]
    priced = [plan.model_copy(update={"seconds": price(plan, answer.model).seconds}) for plan in simple]
    plans = [answer.plan, *answer.alternatives, *priced]
    whole = [plan for plan in plans if devices is None or plan.devices == devices]
    same = {"device": answer.plan.device, "lower_bound": answer.plan.lower_bound}
    return plainest(whole or plans).model_copy(update=same)


def plainest(plans: Iterable[Plan], margin: float = MARGIN) -> Plan:
    """The simplest of the plans whose seconds are within `margin` of the fastest.

    Simpler means, in this order: no CPU offload, no compression, one stage, fewer kinds of parallelism, fewer tensor
    degrees, fewer chunks, no recomputation, a lower ZeRO level, a smaller tensor degree, gpipe.  Of equally simple
    plans the fastest wins.

    GPipe comes before 1F1B where it fits.  Both are predicted to take the same time, but with 1F1B the stages wait for
    each other in both directions throughout, and it took 4 % longer (mlp at 100 Mbit/s on emulated hosts: 744 ms
    against 716 ms).
    """
    candidates = list(plans)
    limit = (1 + margin) * min(map(_seconds, candidates))

    def complexity(plan: Plan) -> tuple[float, ...]:
        late = len(plan.stages) > 1 and plan.schedule != "gpipe"
        piped, tensor = len(plan.stages) > 1, plan.degrees[-1]
        kinds = piped + (tensor > 1) + (plan.stages[0].devices > plan.degrees[0])
        on_host = plan.offload is not None or (plan.saved is not None and bool(plan.saved.host))
        exact = on_host, plan.compression.on
        order = *exact, piped, kinds, len(plan.degrees), plan.chunks, plan.recompute, plan.zero, tensor
        return *order, late, _seconds(plan)

    return min((plan for plan in candidates if _seconds(plan) <= limit), key=complexity)


def _seconds(plan: Plan) -> float:
    assert plan.seconds is not None
    return plan.seconds
