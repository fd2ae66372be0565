"""What every emulated host runs: `python -m jhpt.bench.hybrid.worker RANK HOSTS COORDINATOR TASK`.

For each model, all hosts together:

    layers     timed with the quota on
    links      timed at every rate
    plans      made of both
    steps      of all plans, compiled once, run in turn at every rate

While programs are compiled, quotas are lifted.  Host 0 leaves the rows in the task's folder.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from jhpt.bench.hybrid.bubble import run_bubble
from jhpt.bench.hybrid.costs import Variant, measured_links, measured_profile, planned
from jhpt.bench.hybrid.hosts import Hosts
from jhpt.bench.hybrid.models import SUBJECTS, Subject
from jhpt.bench.hybrid.steps import in_turn, ready, traced
from jhpt.bench.hybrid.task import Task
from jhpt.core.cluster import Link
from jhpt.training.runtime import keep_heap


def run_model(hosts: Hosts[Task], subject: Subject, links: dict[float, Link]) -> list[dict[str, Any]]:
    """Rows of one model: of its layers, and of every competitor at every rate."""
    profile, rows = measured_profile(hosts, subject)
    mine = [one for rate, link in links.items() for one in planned(subject, profile, link, rate, hosts.count)]
    # Links have been measured a little differently everywhere: host 0's plans count.
    found = [Variant.from_json(tree) for tree in hosts.everyone([one.to_json() for one in mine])[0]]
    hosts.free()
    plans = {variant.key: variant.plan for variant in found}
    hosts.say(f"{subject.name}: {len(plans)} steps")
    steps = ready(hosts, {key: traced(subject, plan) for key, plan in plans.items()})
    for rate in links:
        hosts.limit(rate)
        hosts.say(f"{subject.name} at {rate / 1e6:.0f} Mbit/s")
        own = {variant.name: variant for variant in found if variant.rate == rate}
        samples = in_turn(hosts, {name: steps[variant.key] for name, variant in own.items()}, hosts.task.rounds)
        rows += [
            {
                "row": "step",
                "model": subject.name,
                **variant.to_json(),
                "samples_s": samples[name],
            }
            for name, variant in own.items()
        ]
    return [*rows, {"row": "update", "model": subject.name, "seconds": profile.update_seconds * profile.parameters}]


def run(task: Task) -> list[dict[str, Any]]:
    """All rows of a task."""
    hosts = Hosts(task)
    rows = run_bubble(hosts) if task.bubble else []
    links = measured_links(hosts) if task.models else {}
    for rate, link in links.items():
        rows.append({"row": "link", "bits_per_s": rate, **link.model_dump(mode="json", exclude_none=True)})
    for name in task.models:
        rows += run_model(hosts, SUBJECTS[name](), links)
    hosts.wait()
    return rows


def main(arguments: Sequence[str]) -> None:
    """Joins the other hosts, measures with them, and prints the rows."""
    rank, count, coordinator, task = arguments
    keep_heap()
    # A program that comes out of the cache cannot be written for the other hosts: it would lack functions.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(coordinator, int(count), int(rank))
    asked = Task.parse(task)
    rows = run(asked)
    if rank == "0":
        asked.leave(rows)
    jax.distributed.shutdown()  # together: a host that finds host 0 gone would end with an error


def leave(run: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> NoReturn:
    """Ends the process with what `run` does: one of jax.distributed that raises would wait for the others."""
    status = 1
    try:
        run(arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    leave(main, sys.argv[1:])
