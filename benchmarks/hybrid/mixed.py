"""Hosts with quotas that differ: the plan by the speed of each against the best equal split of the layers or rows.

    data parallel    equally many rows on every host
    gpipe            equally many layers on every host, GPipe's schedule
    1f1b             the same with eager 1F1B
    equal grid       whatever grid of stages, replicas and tensor ranks with equal layers is predicted to be the best
    by speed         the planner's plan (space=general): layers by the speed of each host

All but the last are one SPMD program on all hosts; each has the number of micro-batches that is predicted to be its
best.
"""

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.hybrid.costs import (
    Rows,
    Variant,
    best_general,
    cluster_of,
    counts_of,
    kind_name,
    profile_of,
    unpriced_messages,
)
from benchmarks.hybrid.general import Dispatch
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.quota import Quota, pipeline_seconds
from benchmarks.hybrid.task import BY_SPEED
from jhpt.core.cluster import Link
from jhpt.core.divisors import divisors
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.estimate import stage_times
from jhpt.planner.cost.model import CostModel


def profiles_by_share(
    subject: Subject, by_host: Sequence[dict[str, float]], shares: Sequence[float]
) -> tuple[dict[float, ModelProfile], Rows]:
    """(the profile of the hosts with each share of the quota, the seconds of their layers as rows)."""
    profiles, rows = dict[float, ModelProfile](), Rows()
    for share in dict.fromkeys(shares):
        same = [seconds for seconds, its in zip(by_host, shares, strict=True) if its == share]
        profile, layers = profile_of(subject, same)
        profiles[share] = profile.model_copy(update={"device": kind_name(share)})
        rows += [{**row, "share": share} for row in layers]
    return profiles, rows


def planned_by_speed(
    subject: Subject,
    profiles: dict[float, ModelProfile],
    link: Link,
    rate: float,
    quota: Quota,
    dispatch: Dispatch,
) -> list[Variant]:
    """The competitors at one rate, the plan by speed last."""
    shares = quota.shares
    assert shares is not None
    cluster = cluster_of(link, len(shares), shares)
    rates = {node.device.name: node.device.rates for node in cluster.nodes}
    first, *rest = dict.fromkeys(shares)
    others = {rates[kind_name(share)]: profiles[share] for share in rest}
    model = CostModel(profiles[first], cluster, others=others)
    variants = [
        min(
            (Variant(rate=rate, name=name, plan=plan, predicted=_predicted(plan, model, quota)) for plan in plans),
            key=lambda variant: variant.predicted,
        )
        for name, plans in equal_splits(subject, model).items()
    ]
    by_speed = best_general(subject, model, rate, quota, dispatch, BY_SPEED)
    assert by_speed is not None
    return [*variants, by_speed]


def _predicted(plan: Plan, model: CostModel, quota: Quota) -> float:
    times, one_stage = stage_times(plan, model), len(plan.stages) == 1
    seconds = times.step_seconds(plan, overlap=False) if one_stage else pipeline_seconds(plan, times, quota)
    return seconds + unpriced_messages(plan) * model.cluster.network.latency


def equal_splits(subject: Subject, model: CostModel) -> dict[str, list[Plan]]:
    """The plans of every kind of equal split, on all hosts."""
    hosts = model.cluster.num_devices
    grids = list(_grids(subject, model))
    kinds = {
        "data parallel": [plan for plan in grids if len(plan.stages) == 1 and plan.degrees == (1,)],
        "gpipe": [plan for plan in grids if len(plan.stages) == hosts and plan.schedule == "gpipe"],
        "1f1b": [plan for plan in grids if len(plan.stages) == hosts and plan.schedule == "eager-1f1b"],
        "equal grid": grids,
    }
    return {name: plans for name, plans in kinds.items() if plans}


def _grids(subject: Subject, model: CostModel) -> Iterator[Plan]:
    hosts, layers = model.cluster.num_devices, model.num_layers
    for stages in divisors(hosts) if subject.piped else (1,):
        each = hosts // stages
        edges = [s * (layers // stages) + min(s, layers % stages) for s in range(stages + 1)]
        schedules: tuple[Schedule, ...] = ("gpipe", "eager-1f1b") if stages > 1 else ("1f1b",)
        degrees = [tensor for tensor in model.common_degrees(each) if each % tensor == 0]
        for tensor, count, schedule in itertools.product(degrees, counts_of(subject), schedules):
            if subject.batch // count % (each // tensor) == 0:
                yield Plan(
                    model=subject.name,
                    cluster=model.cluster.name,
                    batch=subject.batch,
                    micro_batches=count,
                    schedule=schedule,
                    stages=tuple(
                        Stage(
                            device=s * each,
                            devices=each,
                            chunks=(Chunk(first=first, runs=runs_of([tensor] * (stop - first))),),
                        )
                        for s, (first, stop) in enumerate(itertools.pairwise(edges))
                    ),
                )
