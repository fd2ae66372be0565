"""The program of every emulated host (`benchmarks.emulated.worker`).

For each model, all hosts measure or compute:

    layers     timed with the quota on
    links      timed at every rate, and the processor time of an exchange
    plans      made from both
    steps      of all plans, compiled once, run in turn at every rate

While programs are compiled, quotas are lifted.
"""

from dataclasses import asdict
from typing import Any

import jax

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, in_turn
from benchmarks.emulated.worker import take_part
from benchmarks.hybrid.bubble import run_bubble
from benchmarks.hybrid.costs import (
    Variant,
    measured_links,
    measured_profile,
    measured_quota,
    measured_seconds,
    planned,
)
from benchmarks.hybrid.general import Dispatch, measured_dispatch
from benchmarks.hybrid.mixed import planned_by_speed, profiles_by_share
from benchmarks.hybrid.models import SUBJECTS, Subject
from benchmarks.hybrid.quota import Quota, placement
from benchmarks.hybrid.stages import stages_step
from benchmarks.hybrid.steps import ready, traced
from benchmarks.hybrid.task import Task
from jhpt.core.cluster import Link
from jhpt.core.plan import Plan


def run_model(
    hosts: Hosts[Task], subject: Subject, links: dict[float, Link], quota: Quota, dispatch: Dispatch | None
) -> list[dict[str, Any]]:
    """Rows of one model: of its layers, and of every competitor at every rate."""
    if quota.shares:
        assert dispatch is not None, "on mixed hosts a general plan competes"
        name = f"{subject.name} on mixed hosts"
        profiles, rows = profiles_by_share(subject, measured_seconds(hosts, subject), quota.shares)
        mine = [
            one
            for rate, link in links.items()
            for one in planned_by_speed(subject, profiles, link, rate, quota, dispatch)
        ]
    else:
        name = subject.name
        profile, rows = measured_profile(hosts, subject)
        mine = [
            one
            for rate, link in links.items()
            for one in planned(subject, profile, link, rate, quota, hosts.count, dispatch)
        ]
        update = profile.update_seconds * profile.parameters
        rows.append({"row": "update", "model": subject.name, "seconds": update})
    # Every host has measured the links a little differently, so all use the plans of host 0.
    variants = [Variant.from_json(tree) for tree in hosts.everyone([one.to_json() for one in mine])[0]]
    steps = _steps(hosts, subject, {variant.key: variant.plan for variant in variants}, quota)
    for rate in links:
        hosts.limit(rate)
        hosts.say(f"{name} at {rate / 1e6:.0f} Mbit/s")
        competitors = {variant.name: variant for variant in variants if variant.rate == rate}
        samples = in_turn(hosts, {one: steps[variant.key] for one, variant in competitors.items()}, hosts.task.rounds)
        rows += [
            {"row": "step", "model": name, **variant.to_json(), "samples_s": samples[one]}
            for one, variant in competitors.items()
        ]
    return rows


def _steps(hosts: Hosts[Task], subject: Subject, plans: dict[str, Plan], quota: Quota) -> dict[str, Call]:
    """The steps of all plans, compiled while quotas are lifted."""
    hosts.free()
    hosts.say(f"{subject.name}: {len(plans)} steps")
    spmd = {key: plan for key, plan in plans.items() if plan.space == "spmd"}
    steps = ready(hosts, {key: traced(subject, plan, placed(plan, quota)) for key, plan in spmd.items()})
    for key, plan in plans.items():
        if key not in spmd:
            steps[key] = stages_step(subject, plan, jax.devices())
            jax.block_until_ready(steps[key]())
    return steps


def placed(plan: Plan, quota: Quota) -> list[jax.Device]:
    """The devices of a plan's ranks, one on every host."""
    stages = len(plan.stages)
    return [jax.devices()[host] for host in placement(stages, plan.devices // stages, quota)]


def run(hosts: Hosts[Task]) -> list[dict[str, Any]]:
    """All rows of a task."""
    rows = run_bubble(hosts) if hosts.task.bubble else []
    links = measured_links(hosts) if hosts.task.models else {}
    for rate, link in links.items():
        rows.append({"row": "link", "bits_per_s": rate, **link.model_dump(mode="json", exclude_none=True)})
    if hosts.task.models:
        quota = measured_quota(hosts)
        rows.append({"row": "quota", **asdict(quota)})
        dispatch = measured_dispatch(hosts) if hosts.task.general else None
        if dispatch is not None:
            rows.append({"row": "dispatch", **asdict(dispatch)})
        for name in hosts.task.models:
            rows += run_model(hosts, SUBJECTS[name](), links, quota, dispatch)
    return rows


if __name__ == "__main__":
    take_part(Task, run)
