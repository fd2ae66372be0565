"""The program of every emulated host (`benchmarks.emulated.worker`).

For each model, all hosts measure or compute:

    layers     timed with the quota on, as one program runs them, and as programs of stages do
    links      timed at every rate, and the processor time of an exchange
    plans      made from both
    trials     of all candidates, compiled once, in turn at every rate: each competitor keeps its fastest
    nearby     of the planner's candidates those close to the fastest and the plans near them, in turn: it keeps the
               fastest, another one than before only if it is faster once more
    steps      of what is kept, in turn at every rate, the plan and its baselines several times in every round, and some
               layers again, of all hosts and of one alone: predictions are for hosts that compute as fast as these did
               meanwhile

While programs are compiled, quotas are lifted.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, in_turn, trial
from benchmarks.emulated.worker import take_part
from benchmarks.hybrid.bubble import run_bubble
from benchmarks.hybrid.competitors import Prices, Variant, planned, prices_by_rate, with_nearby
from benchmarks.hybrid.costs import (
    measured_exchange,
    measured_links,
    measured_meetings,
    measured_quota,
    measured_seconds,
    paces_of,
    profile_of,
    seconds_in_rotation,
)
from benchmarks.hybrid.general import Dispatch, measured_dispatch
from benchmarks.hybrid.mixed import planned_by_speed, prices_by_speed, profiles_by_share
from benchmarks.hybrid.models import SUBJECTS, Subject
from benchmarks.hybrid.pace import Pace
from benchmarks.hybrid.quota import Quota, placement
from benchmarks.hybrid.stages import stages_step
from benchmarks.hybrid.steps import on_one_host, ready, traced
from benchmarks.hybrid.task import AGAIN, BY_SPEED, DATA_PARALLEL, JUDGED, PLAN, SHORT, Task
from jhpt.core.cluster import Link
from jhpt.core.plan import Plan
from jhpt.training.trials import close, decided

PLANNED = {PLAN, BY_SPEED}
"""The planner's plan, as a competitor."""

ALONE_ROUNDS = 3
"""How often layers are timed for what a host gains by computing alone, before plans are made."""

Rows = list[dict[str, Any]]

Steps = dict[str, Call]
"""Compiled steps by `Variant.key`."""


def run_model(
    hosts: Hosts[Task], subject: Subject, links: dict[float, Link], quota: Quota, dispatch: Dispatch | None
) -> Rows:
    """Rows of one model: of its layers, of candidates that were tried, and of every competitor at every rate."""
    prices, pace, rows = _priced(hosts, subject, links, quota, dispatch)
    if quota.shares:
        mine = [variant for each in prices.values() for variant in planned_by_speed(subject, each)]
    else:
        mine = planned(subject, prices)
    # Every host has measured the links a little differently, so all use the plans of one.
    variants = of_first_host(hosts, mine)
    name = f"{subject.name} on mixed hosts" if quota.shares else subject.name
    by_rate = {rate: [one for one in variants if one.rate == rate] for rate in links}
    steps = _compiled(hosts, subject, [one for one in variants if one.name != SHORT], quota)
    kept, near = dict[float, list[Variant]](), dict[float, list[Variant]]()
    for rate, here in by_rate.items():
        kept[rate], leading, tried = fastest(hosts, here, steps)
        near[rate] = of_first_host(hosts, with_nearby(leading, prices[rate]))
        rows += [{"row": "trial", "model": name, **row} for row in tried]
    wanted = [one for rate, here in by_rate.items() for one in (*with_repeats(kept[rate], here), *near[rate])]
    steps |= _compiled(hosts, subject, [one for one in wanted if one.key not in steps], quota)
    for rate, here in by_rate.items():
        hosts.say(f"{name} at {rate / 1e6:.0f} Mbit/s")
        hosts.limit(rate)
        (led,) = (one for one in kept[rate] if one.name in PLANNED)
        closest, tried = fastest_nearby(hosts, led, near[rate], steps)
        rows += [{"row": "nearby", "model": name, **row} for row in tried]
        entries = [closest if one.name in PLANNED else one for one in kept[rate]]
        competitors = {variant.name: variant for variant in with_repeats(entries, here)}
        entered = {one: steps[variant.key] for one, variant in competitors.items()}
        samples, moment = pace.among(hosts, entered, hosts.task.rounds, dict.fromkeys(JUDGED, hosts.task.often))
        rows.append({"row": "pace", "model": name, "bits_per_s": rate, **asdict(moment)})
        meanwhile = prices[rate].at(moment)
        rows += [
            {
                "row": "step",
                "model": name,
                **meanwhile.variant(one, variant.plan).to_json(),
                "planned_s": variant.predicted,
                "samples_s": samples[one],
            }
            for one, variant in competitors.items()
        ]
    return rows


def _priced(
    hosts: Hosts[Task], subject: Subject, links: Mapping[float, Link], quota: Quota, dispatch: Dispatch | None
) -> tuple[dict[float, Prices], Pace, Rows]:
    """(this host's prices at every rate, how fast hosts computed when layers were timed, rows of layers)."""
    by_host, pace = measured_seconds(hosts, subject)
    _, moment = pace.among(hosts, {}, ALONE_ROUNDS)
    alone = moment.alone
    of_stages = seconds_in_rotation(hosts, subject) if dispatch is not None else None
    if quota.shares:
        assert dispatch is not None and of_stages is not None, "on mixed hosts general plans compete"
        profiles, rows = profiles_by_share(subject, by_host, quota.shares)
        passed, _ = profiles_by_share(subject, by_host, quota.shares, piped=True)
        apart, more = profiles_by_share(subject, of_stages, quota.shares)
        rows += [*_in_rotation(more), {"row": "paces", "model": subject.name, "alone": alone}]
        kinds = profiles, passed, apart
        found = {rate: prices_by_speed(kinds, link, rate, quota, dispatch) for rate, link in links.items()}
        return {rate: replace(prices, alone=alone) for rate, prices in found.items()}, pace, rows
    profile, rows = profile_of(subject, by_host)
    quota = replace(quota, paces=paces_of(by_host))
    rows.append({"row": "update", "model": subject.name, "seconds": profile.update_seconds * profile.parameters})
    rows.append({"row": "paces", "model": subject.name, "paces": quota.paces, "alone": alone})
    general = None
    if dispatch is not None and of_stages is not None:
        passes, more = profile_of(subject, of_stages)
        rows += _in_rotation(more)
        general = passes, dispatch
    pipeline, _ = profile_of(subject, by_host, piped=True)
    found = prices_by_rate(profile, links, quota, hosts.count, general, pipeline)
    return {rate: replace(prices, alone=alone) for rate, prices in found.items()}, pace, rows


def _in_rotation(rows: Rows) -> Rows:
    """Rows of layers, as those of layers in rotation."""
    return [{**row, "row": "layer in rotation"} for row in rows]


def of_first_host(hosts: Hosts[Task], mine: Sequence[Variant]) -> list[Variant]:
    """The first host's variants.  All hosts must call this."""
    return [Variant.from_json(tree) for tree in hosts.everyone([one.to_json() for one in mine])[0]]


def fastest(hosts: Hosts[Task], variants: Sequence[Variant], steps: Steps) -> tuple[list[Variant], list[Variant], Rows]:
    """(of every competitor at one rate the fastest candidate of a trial, the planner's candidates that are close to its
    fastest, rows of all candidates that were tried)."""
    candidates: dict[str, dict[str, Variant]] = {}
    for one in variants:
        if one.key in steps:
            candidates.setdefault(one.name, {})[one.key] = one
    rate = variants[0].rate
    hosts.limit(rate)
    hosts.say(f"trials at {rate / 1e6:.0f} Mbit/s")
    found = trial(hosts, candidates, steps, hosts.task.trial_rounds)
    rows = [
        {**variant.to_json(), "samples_s": found.samples[key]}
        for its in candidates.values()
        for key, variant in its.items()
        if len(its) > 1
    ]
    kept, (name,) = dict(found.fastest), PLANNED & candidates.keys()
    its = list(candidates[name].values())
    if len(its) == 1:
        leading = its
    else:
        kept[name] = _decided(its, found.samples).key
        leading = [its[at] for at in close(_medians(its, found.samples))]
    return [its[kept[name]] for name, its in candidates.items()], leading, rows


def fastest_nearby(hosts: Hosts[Task], leading: Variant, near: Sequence[Variant], steps: Steps) -> tuple[Variant, Rows]:
    """(the fastest of these candidates of the plan, of which one was `leading`, rows of all if there are several).

    If another one takes the lead, both are timed once more, and that decides between them.
    """
    if len(near) == 1:
        return near[0], []
    samples = _timed(hosts, near, steps)
    rows = [{**one.to_json(), "samples_s": samples[one.key], "leads": one.key == leading.key} for one in near]
    closest = _decided(near, samples, leading)
    if closest.key == leading.key:
        return closest, rows
    both = (leading, closest)
    again = _timed(hosts, both, steps)
    rows = [row | {"again_s": again[one.key]} if one.key in again else row for one, row in zip(near, rows, strict=True)]
    return _decided(both, again, leading), rows


def _timed(hosts: Hosts[Task], candidates: Sequence[Variant], steps: Steps) -> dict[str, list[float]]:
    """Seconds of these candidates in turn, by their keys."""
    return in_turn(hosts, {one.key: steps[one.key] for one in candidates}, hosts.task.trial_rounds, warmup=False)


def _decided(
    candidates: Sequence[Variant], samples: Mapping[str, Sequence[float]], leading: Variant | None = None
) -> Variant:
    """As `jhpt train` decides."""
    leads = next((at for at, one in enumerate(candidates) if leading is not None and one.key == leading.key), None)
    return candidates[decided([one.plan for one in candidates], _medians(candidates, samples), leads)]


def _medians(candidates: Sequence[Variant], samples: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """Seconds of the candidates by their numbers."""
    return {at: statistics.median(samples[one.key]) for at, one in enumerate(candidates)}


def with_repeats(kept: Sequence[Variant], variants: Sequence[Variant]) -> list[Variant]:
    """The competitors that were kept, with data parallelism once more, and in 16 bits with as many micro-batches."""
    repeats = list[Variant]()
    for one in kept:
        shorter = [short for short in variants if short.name == SHORT and short.plan == one.plan]
        if one.name == DATA_PARALLEL and shorter:
            repeats += [replace(one, name=AGAIN), *shorter]
    return [*kept, *repeats]


def _compiled(hosts: Hosts[Task], subject: Subject, variants: Sequence[Variant], quota: Quota) -> Steps:
    """The steps of all different variants, compiled and run once while quotas are lifted."""
    hosts.free()
    different = {one.key: one for one in variants}
    hosts.say(f"{subject.name}: {len(different)} steps")
    alone = {key: one.plan for key, one in different.items() if one.plan.devices < hosts.count}
    spmd = {key: one for key, one in different.items() if one.plan.space == "spmd" and key not in alone}
    steps = on_one_host(hosts, subject, alone)
    steps |= ready(
        hosts,
        {key: traced(subject, one.plan, placed(one.plan, quota), short=one.name == SHORT) for key, one in spmd.items()},
    )
    for key, one in different.items():
        if key not in steps:
            steps[key] = stages_step(subject, one.plan, jax.devices())
    for step in steps.values():
        jax.block_until_ready(step())
    return steps


def placed(plan: Plan, quota: Quota) -> list[jax.Device]:
    """The devices of a plan's ranks, one on every host."""
    stages = len(plan.stages)
    return [jax.devices()[host] for host in placement(stages, plan.devices // stages, quota)]


def run(hosts: Hosts[Task]) -> list[dict[str, Any]]:
    """All rows of a task."""
    rows = [row for width in hosts.task.bubbles for row in run_bubble(hosts, width)]
    links = measured_links(hosts) if hosts.task.models else {}
    for rate, link in links.items():
        rows.append({"row": "link", "bits_per_s": rate, **link.model_dump(mode="json", exclude_none=True)})
    if hosts.task.models:
        quota = measured_quota(hosts)
        rows += [{"row": "quota", **asdict(quota)}, measured_exchange(hosts), *measured_meetings(hosts)]
        dispatch = measured_dispatch(hosts) if hosts.task.general else None
        if dispatch is not None:
            rows.append({"row": "dispatch", **asdict(dispatch)})
        for name in hosts.task.models:
            rows += run_model(hosts, SUBJECTS[name](), links, quota, dispatch)
    return rows


if __name__ == "__main__":
    take_part(Task, run)
