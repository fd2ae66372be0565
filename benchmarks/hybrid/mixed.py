"""Hosts with quotas that differ: the plan by the speed of each against the best equal split of the layers or rows.

    data parallel, gpipe, 1f1b, equal grid    the plan of each that is predicted to be the best (`baselines`)
    samples by speed                          one stage, on which faster hosts have more samples
    by speed                                  the planner's plan (space=general): layers or samples by the speed of each
                                              host

All but the last two are one SPMD program on all hosts.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.hybrid.baselines import ANY_GRID, equal_splits
from benchmarks.hybrid.competitors import Prices, Variant, general_variants, tried
from benchmarks.hybrid.costs import Rows, cluster_of, kind_name, profile_of
from benchmarks.hybrid.general import Dispatch
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.quota import Quota
from benchmarks.hybrid.task import BY_SPEED, SAMPLES, TRIALS
from jhpt.core.cluster import Link
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.model import CostModel


def profiles_by_share(
    subject: Subject, by_host: Sequence[dict[str, float]], shares: Sequence[float], *, piped: bool = False
) -> tuple[dict[float, ModelProfile], Rows]:
    """(the profile of the hosts with each share of the quota, the seconds of their layers as rows).

    piped: as of `profile_of`.
    """
    profiles, rows = dict[float, ModelProfile](), Rows()
    for share in dict.fromkeys(shares):
        same = [seconds for seconds, its in zip(by_host, shares, strict=True) if its == share]
        profile, layers = profile_of(subject, same, piped=piped)
        profiles[share] = profile.model_copy(update={"device": kind_name(share)})
        rows += [{**row, "share": share} for row in layers]
    return profiles, rows


def prices_by_speed(
    profiles: tuple[dict[float, ModelProfile], dict[float, ModelProfile], dict[float, ModelProfile]],
    link: Link,
    rate: float,
    quota: Quota,
    dispatch: Dispatch,
) -> Prices:
    """Prices at one rate.

    profiles: by share, of layers as one program of one stage runs them, as passes of a pipeline do, and as programs of
      stages do.
    """
    shares = quota.shares
    assert shares is not None
    cluster = cluster_of(link, len(shares), shares)
    rates = {node.device.name: node.device.rates for node in cluster.nodes}
    first, *rest = dict.fromkeys(shares)
    model, pipeline, general = (
        CostModel(its[first], cluster, others={rates[kind_name(share)]: its[share] for share in rest})
        for its in profiles
    )
    return Prices(rate=rate, quota=quota, model=model, pipeline=pipeline, general=general, dispatch=dispatch)


def planned_by_speed(subject: Subject, prices: Prices) -> list[Variant]:
    """The competitors at one rate, the candidates of the plan by speed last."""
    variants = [
        one
        for name, plans in equal_splits(subject, prices.model).items()
        for one in sorted((prices.variant(name, plan) for plan in plans), key=lambda variant: variant.predicted)[
            : TRIALS if name == ANY_GRID else 1
        ]
    ]
    found = general_variants(subject, prices)
    samples = [replace(one, name=SAMPLES) for one in found if one.plan.by_speed]
    return [*variants, *samples[:1], *tried(found, BY_SPEED, TRIALS)]
