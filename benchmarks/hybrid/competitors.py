"""The plans of all competitors at every rate, and what they are predicted to take.

A competitor with several plans at a rate has candidates, of which a trial on the hosts keeps the fastest.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.hybrid.baselines import swept
from benchmarks.hybrid.costs import cluster_of, counts_of
from benchmarks.hybrid.general import Dispatch, general_seconds
from benchmarks.hybrid.meetings import lost_seconds
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.pace import Moment
from benchmarks.hybrid.quota import Quota, pipeline_seconds
from benchmarks.hybrid.task import DATA_PARALLEL, GENERAL, PLAN, SHORT, SPMD, TRIALS, run_key
from jhpt.core.cluster import Link
from jhpt.core.plan import Plan
from jhpt.core.plan_check import stages_run
from jhpt.core.profile import ModelProfile, Timing
from jhpt.planner.cost.estimate import StageTimes, stage_layers, stage_times
from jhpt.planner.cost.layers import strategy_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.choice import first_to_try, nearby
from jhpt.planner.search.request import Request, request
from jhpt.planner.search.solve import solve


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A competitor at one rate: its plan, or one of its candidates, and the predicted seconds."""

    rate: float
    name: str
    plan: Plan
    predicted: float

    @property
    def key(self) -> str:
        """A key that is equal for what runs the same."""
        return run_key(self.name, self.plan)

    def to_json(self) -> dict[str, Any]:
        """The variant as a row without samples."""
        plan = self.plan.model_dump(mode="json", exclude_none=True)
        return {"bits_per_s": self.rate, "competitor": self.name, "plan": plan, "predicted_s": self.predicted}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> "Variant":
        """The inverse of `to_json`."""
        plan = Plan.model_validate(tree["plan"])
        return Variant(rate=tree["bits_per_s"], name=tree["competitor"], plan=plan, predicted=tree["predicted_s"])


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What plans take at one rate.

    model: prices those of one program.  pipeline: of these, such with several stages; None: `model` does.
    general, dispatch: those with a program for each stage; None: there are none.  alone: `Quota.alone` by the number
    of rows of a pass; empty: 1.
    """

    rate: float
    quota: Quota
    model: CostModel
    pipeline: CostModel | None = None
    general: CostModel | None = None
    dispatch: Dispatch | None = None
    alone: Mapping[int, float] = field(default_factory=dict)

    def at(self, moment: Moment) -> "Prices":
        """The same on hosts that compute as fast as at that moment."""
        slower = [None if model is None else _at(moment.pace, model) for model in (self.pipeline, self.general)]
        model = _at(moment.pace, self.model)
        return replace(self, alone=moment.alone, model=model, pipeline=slower[0], general=slower[1])

    def variant(self, name: str, plan: Plan) -> Variant:
        """The variant of a plan."""
        return Variant(rate=self.rate, name=name, plan=plan, predicted=self._seconds(name, plan))

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of a step."""
        return self._seconds(PLAN, plan)

    def _seconds(self, name: str, plan: Plan) -> float:
        if plan.space == "general":
            assert self.general is not None
            return predicted_seconds(plan, self.general, self._quota(plan), self.dispatch)
        model = self.pipeline if self.pipeline is not None and len(plan.stages) > 1 else self.model
        if name == SHORT:
            profile = model.profile.model_copy(update={"bytes_per_weight": 2})
            model = CostModel(profile, model.cluster, others=model.others)
        return predicted_seconds(plan, model, self._quota(plan))

    def _quota(self, plan: Plan) -> Quota:
        """The quota of hosts that compute the rows of a replica."""
        if not self.alone:
            return self.quota
        rows = plan.batch / plan.micro_batches * len(plan.stages) / plan.devices
        return replace(self.quota, alone=between(self.alone, rows))


def between(known: Mapping[int, float], rows: float) -> float:
    """What is known of some numbers of rows, for any: linear between them."""
    return float(np.interp(rows, sorted(known), [known[each] for each in sorted(known)]))


def _at(pace: Mapping[int, float], model: CostModel) -> CostModel:
    """The model of a machine on which layers take so many times as long, and the update as the mean of them."""
    mean = statistics.geometric_mean(pace.values())

    def slower(profile: ModelProfile) -> ModelProfile:
        kinds = {
            name: kind.model_copy(update={"timings": tuple(_slower(timing, pace) for timing in kind.timings)})
            for name, kind in profile.kinds.items()
        }
        return profile.model_copy(update={"kinds": kinds, "update_seconds": mean * profile.update_seconds})

    others = {rates: slower(profile) for rates, profile in model.others.items()}
    return CostModel(slower(model.profile), model.cluster, others=others)


def _slower(timing: Timing, pace: Mapping[int, float]) -> Timing:
    ratios = np.array([between(pace, rows) for rows in timing.batches])
    passes = {way: tuple(map(float, ratios * getattr(timing, way))) for way in ("forward", "backward")}
    return timing.model_copy(update=passes)


def prices_by_rate(
    profile: ModelProfile,
    links: Mapping[float, Link],
    quota: Quota,
    hosts: int,
    general: tuple[ModelProfile, Dispatch] | None = None,
    pipeline: ModelProfile | None = None,
) -> dict[float, Prices]:
    """Prices at every rate.

    Args:
      profile: layers as one program of one stage runs them.
      pipeline: layers as passes of pipelines of one program do; None: the same.
      general: layers as stages with programs of their own run them, and the dispatch of these; None: no general plan
        competes.
    """
    found = dict[float, Prices]()
    for rate, link in links.items():
        cluster = cluster_of(link, hosts)
        prices = Prices(rate=rate, quota=quota, model=CostModel(profile, cluster))
        if pipeline is not None:
            prices = replace(prices, pipeline=CostModel(pipeline, cluster))
        if general is not None:
            prices = replace(prices, general=CostModel(general[0], cluster), dispatch=general[1])
        found[rate] = prices
    return found


def planned(subject: Subject, by_rate: Mapping[float, Prices]) -> list[Variant]:
    """Competitors at every rate, baselines with all plans that are tried.

    Data parallelism in 16 bits has the plans of data parallelism.
    """
    first, *_ = by_rate.values()
    sweeps = swept(subject, first.model, lambda plan: [prices.seconds(plan) for prices in by_rate.values()])
    variants = []
    for prices in by_rate.values():
        found = [prices.variant(name, plan) for name, plans in sweeps.items() for plan in plans]
        found += [prices.variant(SHORT, plan) for plan in sweeps[DATA_PARALLEL]]
        spmd, apart = spmd_variants(subject, prices), general_variants(subject, prices) if prices.general else []
        variants += [*found, *tried(spmd, SPMD, 1), *apart[:1], *tried([*spmd, *apart], PLAN, TRIALS)]
    return variants


def spmd_variants(subject: Subject, prices: Prices) -> list[Variant]:
    """The planner's plans of one program on all hosts, and its baselines."""
    model, wanted = prices.model, request_of(subject)
    answer = solve(model.profile, model.cluster, wanted, "spmd")
    candidates = [answer.plan, *answer.alternatives, *(one.plan for one in baselines(wanted, model))]
    return [
        prices.variant(SPMD, plan)
        for plan in candidates
        if plan is not None and plan.devices == model.cluster.num_devices and len(plan.stages) <= wanted.max_stages
    ]


def general_variants(subject: Subject, prices: Prices) -> list[Variant]:
    """The planner's plans of several stages with a program each, or with samples by speed, on all hosts, the one
    predicted fastest first: those that `jhpt train` tries beside plans of one program."""
    model, dispatch = prices.general, prices.dispatch
    assert model is not None and dispatch is not None
    cluster, slowest = model.cluster, min(prices.quota.of(host) for host in range(model.cluster.num_devices))
    stages = 1 if cluster.mixed else 2
    wanted = request(
        subject.batch, general_counts(subject), zero=(0,), recompute=(False,), whole=True, fewest_stages=stages
    )
    answer = solve(dispatch.of(model.profile, slowest), cluster, wanted, "general", model.others)
    found = []
    for plan in (answer.plan, *answer.alternatives):
        if plan.devices == cluster.num_devices and (len(plan.stages) > 1 or plan.by_speed) and stages_run(plan):
            found.append(prices.variant(GENERAL, plan))
    return sorted(found, key=lambda variant: variant.predicted)


def tried(variants: Sequence[Variant], name: str, count: int) -> list[Variant]:
    """So many of the variants, as `parallel.trials` chooses them, as candidates of one competitor."""
    plans = [one.plan.model_copy(update={"seconds": one.predicted}) for one in variants]
    chosen = first_to_try(plans, count)
    return [replace(variants[plans.index(plan)], name=name) for plan in chosen]


def with_nearby(candidates: Sequence[Variant], prices: Prices) -> list[Variant]:
    """Candidates of one competitor, and the plans near each of them, what runs the same once."""
    near = [prices.variant(one.name, plan) for one in candidates for plan in nearby(one.plan, prices.model)]
    found = dict[str, Variant]()
    for one in (*candidates, *near):
        found.setdefault(one.key, one)
    return list(found.values())


def predicted_seconds(plan: Plan, model: CostModel, quota: Quota, dispatch: Dispatch | None = None) -> float:
    """Seconds of a step of a plan on hosts with this quota.  dispatch: of general plans."""
    times = head_in_backward(stage_times(plan, model), plan, model)
    if plan.space == "general":
        assert dispatch is not None
        seconds = general_seconds(plan, times, quota, dispatch)
    elif len(plan.stages) == 1:
        busy = sum(quota.of(host) for host in range(plan.devices))
        slower = max(quota.pace(host) for host in range(plan.devices)) / quota.gain(busy)
        seconds = slower * times.step_seconds(plan, overlap=False) + lost_seconds(plan, model, quota, slower)
    else:
        seconds = pipeline_seconds(plan, times, quota)
    return seconds + unpriced_messages(plan) * model.cluster.network.latency


def head_in_backward(times: StageTimes, plan: Plan, model: CostModel) -> StageTimes:
    """Times with the head's forward pass in the last backward pass, where pipelines compute the loss.

    To the planner a stage's passes follow each other, and nothing changes.  Here other stages' passes and transfers
    come between them.
    """
    if len(plan.stages) == 1:
        return times
    head = np.zeros_like(times.forward)
    head[-1, -1] = stage_layers(plan, len(plan.stages) - 1, strategy_of(plan), model)[-1].forward[-1]
    return replace(times, forward=times.forward - head, backward=times.backward + head)


def unpriced_messages(plan: Plan) -> int:
    """Messages in a row that the planner leaves out because they are small, as seen in compiled programs.

    A sum over K ranks takes 2 (K - 1).  There is one of the loss over all devices, and with several stages one of the
    gradient's norm.  Where t ranks share the head, every micro-batch has two, of the largest logits and of the sum of
    their exponentials, and gathers its rows, with t - 1.
    """
    tensor = plan.stages[-1].chunks[-1].tensor[-1]
    sums = (1 if len(plan.stages) == 1 else 2) * 2 * (plan.devices - 1)
    return sums + plan.micro_batches * (2 * 2 + 1) * (tensor - 1)


def general_counts(subject: Subject) -> tuple[int, ...]:
    """Numbers of micro-batches that a general plan chooses from."""
    return tuple(count for count in (1, 2, 4, 8, 16) if subject.batch % count == 0)


def request_of(subject: Subject) -> Request:
    """The request to the planner, without ZeRO and recomputation, because there is enough memory."""
    return request(
        subject.batch, counts_of(subject), zero=(0,), recompute=(False,), max_stages=1 << 30 if subject.piped else 1
    )
