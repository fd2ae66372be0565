"""What plans of one stage lose where hosts with quotas meet in a collective.

A host with quota r that computes for a period P of its quota, or longer, has used it up at some moment of a period.  If
that is when the others have come to a collective, they all wait for the next period of that host.  One that has
computed for a shorter time w seldom has used it up.  With B = r (1 - r) P as in `benchmarks.hybrid.quota`,

    lost = B min(1, w / P)^2    for every collective, after w seconds of computation

The formula has no fitted constant.  docs/reports/hybrid.md compares it with hosts that multiply matrices between sums.
"""

import itertools
import math
from collections.abc import Iterator

from benchmarks.hybrid.quota import Quota
from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import stage_layers
from jhpt.planner.cost.layers import strategy_of
from jhpt.planner.cost.model import CostModel


def lost_seconds(plan: Plan, model: CostModel, quota: Quota, slower: float) -> float:
    """Seconds that a step of a plan of one stage loses.  slower: seconds of computation over those of `model`."""
    before = computed_before_collectives(plan, model)
    return sum(lost_after(slower * seconds, quota, plan.devices) for seconds in before)


def lost_after(computed: float, quota: Quota, hosts: int) -> float:
    """Seconds that so many hosts lose in a collective after so many seconds of computation."""
    if quota.period == 0:
        return 0.0
    most = max(quota.of(host) * (1 - quota.of(host)) for host in range(hosts)) * quota.period
    return most * min(1.0, computed / quota.period) ** 2


def computed_before_collectives(plan: Plan, model: CostModel) -> Iterator[float]:
    """Seconds of computation between each large collective of a step and the one before, as compiled programs have
    them.

    Layers on tensor ranks sum their output, and the gradient of their input (`sums_of`).  The head's ranks also look
    for the largest logits and sum exponentials.  Between layers of different degree, rows are gathered on the way to
    the higher one, forward or backward.  XLA joins the sums of all gradients at the end.  Left out: those that no
    computation is before, of a micro-batch's rows, and of the gradients of layers of another degree.
    """
    (layers,) = stage_layers(plan, 0, strategy_of(plan), model)
    degrees = plan.stages[0].chunks[0].tensor
    sums = sums_of(model)
    since = 0.0

    def passed(seconds: float, count: int) -> Iterator[float]:
        """A pass of a layer with so many collectives, each after an equal part of it."""
        nonlocal since
        for _ in range(count):
            yield since + seconds / count
            since = 0.0
        since += 0.0 if count else seconds

    for _ in range(plan.micro_batches):
        for layer, tensor in enumerate(degrees):
            yield from passed(0.0, int(layer > 0 and tensor > degrees[layer - 1]))
            yield from passed(layers.forward[layer], sums[0][layer] if tensor > 1 else 0)
        for layer, tensor in reversed(list(enumerate(degrees))):
            yield from passed(layers.backward[layer], sums[1][layer] if tensor > 1 else 0)
            yield from passed(0.0, int(layer > 0 and tensor < degrees[layer - 1]))
    if min(degrees) < plan.devices:
        yield since


def sums_of(model: CostModel) -> tuple[list[int], list[int]]:
    """Of every layer on tensor ranks, the collectives of (a forward pass, a backward pass).

    Profiles count a gather as half a sum; it is one collective.
    """
    kinds = [model.profile.kinds[name] for name in model.profile.layers]
    forward = [math.ceil(kind.tensor_forward_bytes / kind.boundary_bytes) for kind in kinds[:-1]]
    backward = [
        math.ceil(kind.tensor_backward_bytes / before.boundary_bytes) for before, kind in itertools.pairwise(kinds)
    ]
    return [*forward, 2], [0, *backward]
