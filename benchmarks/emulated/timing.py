"""Times calls that all hosts make at the same time, one call after the other."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.emulated.hosts import Hosts

Call = Callable[[], Any]


def in_turn(hosts: Hosts[Any], steps: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step until the last host has finished it.

    All hosts begin at the same time; every other round runs the steps in reverse order.
    """
    names, samples = list(steps), {name: list[float]() for name in steps}
    for name in names:
        hosts.say(f"first step of {name}")
        jax.block_until_ready(steps[name]())
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            hosts.wait()
            start = time.perf_counter()
            jax.block_until_ready(steps[name]())
            samples[name].append(time.perf_counter() - start)
    everyone = hosts.everyone(samples)
    return {name: [max(times) for times in zip(*(one[name] for one in everyone), strict=True)] for name in names}
