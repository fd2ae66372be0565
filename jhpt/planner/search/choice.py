"""Which plan to run: the simplest of the plans that are about as fast as the fastest, or a plan by hand that is made to
fit.

A predicted gain has an error, that of two predictions of one model on the same devices (`calibration.order_error`).  A
plan that promises less is not worth its stages and degrees: the gain may not exist, but the complication does.

A plan by hand keeps the settings of `parallel`, with one exception: on one data rank weights may be rounded when they
are used (ZeRO-3), which shards nothing there.  If the plan does not fit, the decisions that `memory` leaves open
(`auto`) become those of the fastest plan that fits.  Blocks are then recomputed either completely or not at all; only
the full search chooses activations by name.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from jhpt.core.calibration import order_error
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.core.plan_check import check_stages_run, stages_run
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloads
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.by_speed import with_micro_batches
from jhpt.planner.search.request import Request, offload_kinds
from jhpt.planner.search.solve import Answer


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan to try.  nearby: what is tried next to it, should it be one of the fastest (`nearby`)."""

    plan: Plan
    nearby: tuple[Plan, ...] = ()


UNLIKE = 1.5
"""A trial leaves out plans of another kind that are predicted to take longer than this times the fastest."""


def plan_to_run(answer: Answer, request: Request, devices: int | None = None) -> Plan:
    """The simplest of the answer's plans and the baselines.

    devices: how many devices have to take part, where possible; None: any number.

    Raises:
      InputError: programs of stages (space=general) can run none of the plans.
    """
    return plainest(_that_run(answer, request, devices))


def plans_to_try(answers: Collection[tuple[Answer, Request]], devices: int | None, count: int) -> tuple[Candidate, ...]:
    """So many different plans (`first_to_try`), the first of which is the one that `plan_to_run` chooses.

    answers: of one space, or of both; a general plan of one stage is then one that an SPMD program runs, too, unless
    it has samples by speed.
    """
    alone = len(answers) == 1
    models = [
        (plan, answer.model)
        for answer, request in answers
        for plan in _that_run(answer, request, devices)
        if alone or answer.plan.space == "spmd" or len(plan.stages) > 1 or plan.by_speed
    ]
    plans = [plan for plan, _ in models]
    chosen = [models[plans.index(plan)] for plan in first_to_try(plans, count)]
    return tuple(Candidate(plan=plan, nearby=nearby(plan, model)) for plan, model in chosen)


def nearby(plan: Plan, model: CostModel) -> tuple[Plan, ...]:
    """The plan with half and with twice as many micro-batches, as far as these run and fit.

    How long a small micro-batch takes, and how much of a transfer hides behind the next one, are what predictions know
    least.  Also on one stage: data parallelism with two micro-batches, predicted to take 2 % longer than with one, took
    4 to 5 % less (gpt2-like on emulated hosts, 2,000 Mbit/s: 495 ms against 513 and 521).
    """
    counts = [plan.micro_batches // 2] if plan.micro_batches % 2 == 0 else []
    counts.append(2 * plan.micro_batches)
    changed = filter(None, (with_micro_batches(plan, count, model) for count in counts))
    priced = [(one, _fitting_estimate(one, model)) for one in changed]
    return tuple(one.model_copy(update={"seconds": found.seconds}) for one, found in priced if found)


def first_to_try(plans: Collection[Plan], count: int) -> tuple[Plan, ...]:
    """So many different plans of these: the simplest (`plainest`), the one predicted to be the fastest, the fastest of
    every other kind, and then the fastest of all others.

    Predictions of like plans err alike: if links are slower than the profile says, all pipelines are.  So several plans
    of one kind would find out less than plans of different kinds.
    """
    by_seconds = sorted(plans, key=seconds_of)
    first = [plainest(plans), by_seconds[0]]
    kinds = {_kind(plan) for plan in first}
    for plan in by_seconds:
        if _kind(plan) not in kinds and seconds_of(plan) <= UNLIKE * seconds_of(by_seconds[0]):
            first.append(plan)
            kinds.add(_kind(plan))
    return different([*first, *by_seconds])[:count]


def different(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """The plans without those that run the same as one before them."""
    found = dict[str, Plan]()
    for plan in plans:
        found.setdefault(plan.model_dump_json(exclude={"device", "seconds", "lower_bound"}), plan)
    return tuple(found.values())


def _kind(plan: Plan) -> tuple[bool, ...]:
    """Whether the plan has a program for each stage, several stages, GPipe's passes in one program, tensor parallelism,
    CPU offload: of what its predicted seconds consist.

    The stages of GPipe wait for each other in one direction at a time, those of other schedules in both throughout,
    which predictions leave out.
    """
    general, pipelined = plan.space == "general", len(plan.stages) > 1
    in_one_direction = pipelined and not general and plan.schedule == "gpipe"
    return general, pipelined, in_one_direction, plan.degrees[-1] > 1, _on_host(plan)


def _on_host(plan: Plan) -> bool:
    """Whether a part of the state or of the saved activations is offloaded."""
    return plan.offload is not None or (plan.saved is not None and bool(plan.saved.host))


def _that_run(answer: Answer, request: Request, devices: int | None) -> list[Plan]:
    """The answer's plans and the baselines, as far as the runtime can run them."""
    known = baselines(request, answer.model)
    simple = [baseline.plan for baseline in known if baseline.plan is not None and None in request.offload]
    priced = [plan.model_copy(update={"seconds": price(plan, answer.model).seconds}) for plan in simple]
    plans = [answer.plan, *answer.alternatives, *priced]
    if answer.plan.space == "general" and not (plans := list(filter(stages_run, plans))):
        check_stages_run(answer.plan)
    whole = [plan for plan in plans if devices is None or plan.devices == devices]
    same = {"device": answer.plan.device, "lower_bound": answer.plan.lower_bound}
    return [plan.model_copy(update=same) for plan in whole or plans]


def plainest(plans: Iterable[Plan], error: float | None = None) -> Plan:
    """The simplest of the plans that are not clearly slower than the fastest: by more than `error` (None: that of
    predictions, `calibration.order_error`).  Of equally simple plans (`complexity`) the fastest wins."""
    candidates = list(plans)
    limit = (1 + (order_error() if error is None else error)) * min(map(seconds_of, candidates))
    as_fast = (plan for plan in candidates if seconds_of(plan) <= limit)
    return min(as_fast, key=lambda plan: (complexity(plan), seconds_of(plan)))


def complexity(plan: Plan) -> tuple[bool | int, ...]:
    """Lower for simpler plans.

    Simpler means, in this order: no CPU offload, no compression, one program for all stages, one stage, fewer kinds of
    parallelism, fewer tensor degrees, fewer chunks, no recomputation, no sequence parallelism, a lower ZeRO level, no
    hybrid sharding, a smaller tensor degree, gpipe.  Micro-batches do not count.

    GPipe comes before 1F1B where it fits.  Both are predicted to take the same time, but with 1F1B the stages wait for
    each other in both directions throughout, and it took 4 % longer (mlp at 100 Mbit/s on emulated hosts: 744 ms
    against 716 ms).
    """
    late = len(plan.stages) > 1 and plan.schedule != "gpipe"
    pipelined, tensor = len(plan.stages) > 1, plan.degrees[-1]
    kinds = pipelined + (tensor > 1) + (plan.stages[0].devices > plan.degrees[0])
    exact = _on_host(plan), plan.compression.on, plan.space == "general"
    shape = pipelined, kinds, len(plan.degrees), plan.chunks
    recompute = plan.recompute + (plan.other_blocks is not None)
    sharded = plan.zero, plan.zero_ranks is not None
    return *exact, *shape, recompute, plan.sequence, *sharded, tensor, late


def seconds_of(plan: Plan) -> float:
    """What a step of the plan, which the planner has priced, is predicted to take."""
    assert plan.seconds is not None
    return plan.seconds


def fitted(plan: Plan, model: CostModel, config: Config) -> Plan:
    """The plan itself if it fits the whole memory or if nothing fits; else the fastest that fits beside the reserve."""
    reserve = max(node.device.reserve for node in model.cluster.nodes)
    if all((1 - reserve) * stage.total_bytes <= stage.capacity for stage in price(plan, model).stages):
        return plan
    priced = [
        (estimate.seconds, candidate)
        for candidate in _variants(plan, model, config)
        if (estimate := _fitting_estimate(candidate, model))
    ]
    return min(priced, key=lambda pair: pair[0])[1] if priced else plan


def _variants(plan: Plan, model: CostModel, config: Config) -> Iterator[Plan]:
    """The plan with every choice that `memory` leaves open."""
    recompute = (False, True) if config.memory.recompute == "auto" else (plan.recompute,)
    blocks, kinds = plan.stages[-1].chunks[-1].stop - 2, offload_kinds(config)
    more = (
        offloads(blocks, tuple(kind for kind in kinds if kind), config.optimizer.update_in_backward)
        if config.memory.offload == "auto"
        else []
    )
    for choice, offload in itertools.product(recompute, [plan.offload, *more]):
        yield plan.model_copy(update={"recompute": choice, "offload": offload})
    if plan.replicas == 1 and plan.offload is None:
        for choice, zero in itertools.product(recompute, model.levels((3,), 1, plan.space, plan.micro_batches)):
            yield plan.model_copy(update={"recompute": choice, "zero": zero})


def _fitting_estimate(plan: Plan, model: CostModel) -> Estimate | None:
    """The estimate; None if the plan does not fit or cannot be run."""
    try:
        estimate = price(plan, model)
    except InputError:
        return None
    return estimate if estimate.fits else None
