"""Known models on usual clusters: the plan compared with the layouts that are usual without a planner."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.planner.settings import BATCHES, Settings, in_parallel, planned_seconds
from jhpt.bench.ratios import ratio_unit, speed_claims, times_as_fast
from jhpt.bench.results import Claim, print_table
from jhpt.core.catalogue import cluster_named
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan, Space
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.networks import TABLES, network_profile
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A baseline.  ratio: its seconds / the plan's."""

    seconds: float | None
    ratio: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorthRow:
    """One model on one cluster.  reason: why nothing fits; empty if there is a plan."""

    part: str = "worth"
    model: str
    cluster: str
    batch: int
    space: Space
    plan: str
    seconds: float | None
    lower_bound: float | None
    gap: float | None
    reason: str
    others: Mapping[str, Alternative]
    search_s: float

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """A row of a file; ratios are computed again."""
        ours = row["seconds"]
        others = {
            name: Alternative(seconds=one["seconds"], ratio=_ratio_of(one["seconds"], ours), reason=one["reason"])
            for name, one in row["others"].items()
        }
        return cls(**{**row, "others": others})

    @property
    def best(self) -> float | None:
        """Seconds of the fastest baseline / the plan's."""
        return min(
            (alternative.ratio for alternative in self.others.values() if alternative.ratio is not None), default=None
        )


SHORT = {
    "data parallel": "data",
    "tensor parallel": "tensor",
    "gpipe, equal layers": "gpipe",
    "1f1b, equal layers": "1f1b",
    "best 3-D grid": "3-D",
}
"""Names of the baselines in the table's columns."""


def worth(settings: Settings) -> tuple[list[WorthRow], dict[str, Claim]]:
    """Plans known models for usual clusters, and prints the plans with their baselines."""
    tasks = list(itertools.product(settings.models, settings.clusters, settings.spaces))
    rows = in_parallel(weigh, tasks, settings.workers)
    lines = [
        (
            f"{row.model} x {row.batch}, {row.cluster}",
            row.space,
            row.plan or row.reason,
            f"{row.seconds:.4g}" if row.seconds else "-",
            *(_ratio(row.others[name].ratio) for name in SHORT),
            _ratio(row.best),
            f"{row.gap:.2%}" if row.gap is not None else "-",
        )
        for row in rows
    ]
    columns = ("model x batch, cluster", "space", "plan", "seconds", *SHORT.values(), "best", "gap")
    print_table(f"the plan, and {_unit('each baseline')}", columns, lines, words=3)
    return rows, worth_claims(rows)


def worth_claims(rows: list[WorthRow]) -> dict[str, Claim]:
    """How much faster plans are than every baseline, and than the best one of each entry."""
    claims = dict[str, Claim]()
    for claim, name in (("vs_data_parallel", "data parallel"), ("vs_gpipe", "gpipe, equal layers")):
        ratios = {_setup(row): ratio for row in rows if (ratio := row.others[name].ratio) is not None}
        claims |= speed_claims(claim, ratios, unit=_unit(name), place=f"against {name}")
    ratios = {_setup(row): row.best for row in rows if row.best is not None}
    return claims | speed_claims("vs_best_baseline", ratios, unit=_unit("the best baseline"), place="every baseline")


def _unit(baseline: str) -> str:
    return ratio_unit(baseline, "the plan", kind="predicted")


def _setup(row: WorthRow) -> str:
    return f"{row.model}, batch {row.batch}, on {row.cluster}, space {row.space}, {row.plan}"


def _ratio_of(baseline: float | None, plan: float | None) -> float | None:
    """None if either does not fit."""
    return times_as_fast([baseline], [plan]) if baseline and plan else None


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def weigh(task: tuple[str, str, Space]) -> WorthRow:
    """One model on one cluster, planned and compared."""
    name, place, space = task
    cluster, batch = cluster_named(place), BATCHES[name]
    profile, wanted = profile_of(name, cluster.nodes[0].device), request(batch)
    start = time.perf_counter()
    seconds = bound = gap = None
    plan = reason = ""
    try:
        answer = solve(profile, cluster, wanted, space)
        seconds, bound = planned_seconds(answer)
        gap, plan = answer.gap, described(answer.plan)
    except InputError as error:
        reason = str(error).splitlines()[0]
    end = time.perf_counter()
    others = {
        alternative.name: Alternative(
            seconds=alternative.seconds,
            ratio=_ratio_of(alternative.seconds, seconds),
            reason=alternative.reason,
        )
        for alternative in baselines(wanted, CostModel(profile, cluster), space)
    }
    return WorthRow(
        model=name,
        cluster=place,
        batch=batch,
        space=space,
        plan=plan,
        seconds=seconds,
        lower_bound=bound,
        gap=gap,
        reason=reason,
        others=others,
        search_s=end - start,
    )


def profile_of(name: str, device: Device) -> ModelProfile:
    """Costs of a preset or of a classic network."""
    return network_profile(name, device) if name in TABLES else analytic_profile(load_config(name), device)


def described(plan: Plan) -> str:
    """The plan in a few words: devices and tensor degrees of every stage, and what all share."""
    stages = []
    for stage in plan.stages:
        degrees = sorted({run.tensor for chunk in stage.chunks for run in chunk.runs})
        stages.append(f"{stage.devices}" + (f" (tensor {', '.join(map(str, degrees))})" if degrees != [1] else ""))
    runs = [(key, len(list(group))) for key, group in itertools.groupby(stages)]
    devices = " | ".join(f"{count} x {key}" if count > 1 else key for key, count in runs)
    extras = [f"M {plan.micro_batches}"]
    extras += [plan.schedule] if len(plan.stages) > 1 else []
    extras += [f"ZeRO-{plan.zero}" + (f" over {plan.zero_ranks}" if plan.zero_ranks else "")] if plan.zero else []
    extras += ["recompute"] if plan.recompute else []
    return f"{devices} devices, " + ", ".join(extras)
