"""Measurements for both tables: calls compiled for all hosts, seconds of work, bytes, and seconds of the processor."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.comms.costs import sent_bytes
from benchmarks.comms.task import Task
from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, typical_seconds

Programs = dict[str, tuple[Callable[[], jax.stages.Lowered], Callable[[], Any]]]
"""By name: a function that lowers a program, and one that makes its arguments."""

Seconds = dict[str, dict[str, float]]
"""Seconds by what is computed and by the name of its call."""


def ready(hosts: Hosts[Task], programs: Programs, mesh: Mesh, call: Callable[..., Call] = partial) -> dict[str, Call]:
    """Calls, compiled for the devices of this mesh.  call: makes a call from a program and its arguments."""
    compiled = hosts.compiled({name: lower for name, (lower, _) in programs.items()}, list(mesh.devices.flat))
    return {name: call(compiled[name], *make()) for name, (_, make) in programs.items()}


def work_seconds(hosts: Hosts[Task], calls: Mapping[str, Callable[[], Mapping[str, Call]]]) -> Seconds:
    """Typical seconds of calls that need no other host, with the quota on.

    Every host times a share of them, so that all are busy at the same time.  If there are fewer calls than hosts,
    several hosts time the same one.
    """
    keys = list(calls)
    keys_here = keys[hosts.rank :: hosts.count] or [keys[hosts.rank % len(keys)]]
    mine = {key: calls[key]() for key in keys_here}
    hosts.limit(None)
    named = {f"{key}|{which}": call for key, each in mine.items() for which, call in each.items()}
    samples: dict[str, list[float]] = {}
    for one in hosts.everyone(typical_seconds(named, hosts.task.parts_rounds)):
        for name, value in one.items():
            samples.setdefault(name, []).append(value)
    means: Seconds = {}
    for name, values in samples.items():
        key, _, which = name.partition("|")
        means.setdefault(key, {})[which] = statistics.mean(values)
    return means


def counted_bytes(hosts: Hosts[Task], steps: dict[str, Call]) -> tuple[dict[str, float], float]:
    """(bytes that a host sends in each step, bytes that waiting for each other takes), both means over the hosts.

    The bytes of waiting are subtracted from those of the steps; on a busy machine waiting may take fewer or more.
    """

    def sent(call: Call) -> int:
        hosts.wait()
        before = sent_bytes()
        jax.block_until_ready(call())
        hosts.wait()
        return sent_bytes() - before

    waiting = statistics.mean(hosts.everyone(min(sent(lambda: ()) for _ in range(3))))
    everyone = hosts.everyone({name: sent(call) for name, call in steps.items()})
    return {name: statistics.mean(one[name] for one in everyone) - waiting for name in steps}, waiting


def processor_seconds(hosts: Hosts[Task], calls: dict[str, Call]) -> dict[str, float]:
    """Seconds of the processor that each call takes on a host, means over the hosts."""

    def spent(call: Call) -> float:
        hosts.wait()
        before = time.process_time()
        jax.block_until_ready(call())
        return time.process_time() - before

    mine = {name: min(spent(call) for _ in range(3)) for name, call in calls.items()}
    everyone = hosts.everyone(mine)
    return {name: sum(one[name] for one in everyone) / len(everyone) for name in mine}
