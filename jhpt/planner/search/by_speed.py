"""Samples by speed: data parallelism over devices of different kinds, each with as many samples as it can compute.

With equal numbers of samples the fast devices of a mixed cluster wait for the slow ones.  Here the data ranks of one
stage have n_1, n_2, ... samples of a micro-batch of b, so that the last one is done as soon as possible:

    minimize  max_r T_k(r)(n_r)   subject to   sum_r n_r = b,  n_r >= 1

T_k(n): seconds of both passes of all layers for n samples on a device of kind k, which do not fall with n.  So the
least maximum is one of the T_k(n), and bisection finds it.

Decision set, a part of that of space="general" (`jhpt.planner.search.general`):

    micro-batches   every divisor M of the batch
    devices         those of all kinds, or of any two or more; if the request is for the whole cluster, all
    layers          one stage of one tensor degree, whose tensor ranks are of one kind each
    ZeRO            0, 1 or 3;  recomputation off or on
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.rows import rows


def offer_by_speed(request: Request, schedule: Schedule, model: CostModel, best: Incumbent) -> None:
    """Offers `best` all plans of the decision set.  schedule: what plans of one stage are said to have."""
    for plan in plans_by_speed(request, schedule, model):
        best.offer(plan, model)
        if best.settled:
            return


def plans_by_speed(request: Request, schedule: Schedule, model: CostModel) -> Iterator[Plan]:
    """The plans of the decision set; none on a cluster of one kind of device."""
    levels = [level for level in request.zero if level != 2]
    for members, m, recompute in itertools.product(_devices(request, model), request.micro_batches, request.recompute):
        for tensor in model.common_degrees(len(members)):
            samples = dealt(model, members, tensor, request.batch // m, recompute=recompute)
            if samples is None or len(set(samples)) == 1:
                continue
            chunk = Chunk(first=0, runs=runs_of([tensor] * model.num_layers))
            for zero in levels:
                yield Plan(
                    model=model.profile.name,
                    cluster=model.cluster.name,
                    space="general",
                    batch=request.batch,
                    micro_batches=m,
                    schedule=schedule,
                    zero=zero,
                    recompute=recompute,
                    stages=(_stage(members, chunk, samples),),
                )


def with_micro_batches(plan: Plan, count: int, model: CostModel) -> Plan | None:
    """The plan with another number of micro-batches, their samples dealt out anew; None: there are too few."""
    changed, (stage, *others) = {"micro_batches": count}, plan.stages
    if stage.samples is None:
        return plan.model_copy(update=changed)
    micro_batch = plan.batch // count
    samples = dealt(model, stage.members, stage.degrees[0], micro_batch, recompute=plan.recompute)
    if samples is None:
        return None
    return plan.model_copy(update={**changed, "stages": (stage.model_copy(update={"samples": samples}), *others)})


def dealt(
    model: CostModel, members: Sequence[int], tensor: int, micro_batch: int, *, recompute: bool
) -> tuple[int, ...] | None:
    """Samples of every data rank, of which a slow one has no more than it computes in the time of the others.

    members: devices in the order of their ranks.  None: a data rank has devices of several kinds, or nothing to do.
    """
    if len(members) % tensor or len(members) // tensor > micro_batch:
        return None
    by_device = [model.places.kind_of(device) for device in members]
    kinds = by_device[::tensor]
    if any(kind != kinds[at // tensor] for at, kind in enumerate(by_device)):
        return None

    @cache
    def seconds(kind: int, samples: int) -> float:
        forward, backward = model.compute_seconds((kind,), samples, tensor)
        return float((backward + forward * (1 + recompute))[model.index].sum())

    def within(kind: int, limit: float) -> int:
        """The most samples that a device of this kind computes in so many seconds."""
        return _least(lambda n: n > micro_batch or seconds(kind, n) > limit, micro_batch + 1) - 1

    def enough(limit: float) -> bool:
        most = {kind: within(kind, limit) for kind in set(kinds)}
        return sum(most[kind] for kind in kinds) >= micro_batch

    def least_enough(kind: int) -> float:
        """The seconds in which a device of this kind computes as many samples as are enough."""
        return seconds(kind, _least(lambda n: enough(seconds(kind, n)), micro_batch))

    least = min(map(least_enough, set(kinds)))
    samples = [within(kind, least) for kind in kinds]
    if not min(samples):
        return None
    # What is too much comes from the ranks that would be done last, of those that have several.
    last = [(n == 1, -seconds(kind, n), rank) for rank, (kind, n) in enumerate(zip(kinds, samples, strict=True))]
    heapq.heapify(last)
    for _ in range(sum(samples) - micro_batch):
        rank = heapq.heappop(last)[2]
        samples[rank] -= 1
        heapq.heappush(last, (samples[rank] == 1, -seconds(kinds[rank], samples[rank]), rank))
    return tuple(samples)


def _least(holds: Callable[[int], bool], most: int) -> int:
    """The least number from 1 on for which it holds, as it does for `most` and for all from there on."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _devices(request: Request, model: CostModel) -> Iterator[tuple[int, ...]]:
    """The devices of several kinds, in an order that does not depend on that of the cluster's nodes."""
    order, kind_of = rows(model)[0].numbers, model.places.kind_of
    kinds = sorted({kind_of(device) for device in order})
    for size in range(len(kinds), len(kinds) - 1 if request.whole else 1, -1):
        for some in itertools.combinations(kinds, size) if size > 1 else ():
            yield tuple(device for device in order if kind_of(device) in some)


def _stage(members: tuple[int, ...], chunk: Chunk, samples: tuple[int, ...]) -> Stage:
    first, devices = members[0], len(members)
    neighbours = members == tuple(range(first, first + devices))
    return Stage(device=first, devices=devices, apart=None if neighbours else members, samples=samples, chunks=(chunk,))
