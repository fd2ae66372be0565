"""Times calls that all hosts make at the same time, one call after the other."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax

from benchmarks.emulated.hosts import Hosts
from jhpt.measure.timer import interleaved, steady

Call = Callable[[], Any]

SAMPLE_S = 0.06
"""Seconds of a row of calls: several periods of a quota (`benchmarks.netlab`), so that its phase hardly matters."""


def in_turn(
    hosts: Hosts[Any],
    steps: Mapping[str, Call],
    rounds: int,
    *,
    warmup: bool = True,
    times: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every step until the last host has finished it, the same on all hosts (`by_host_in_turn`)."""
    by_host = by_host_in_turn(hosts, steps, rounds, warmup=warmup, times=times)
    return {name: [max(times) for times in samples] for name, samples in by_host.items()}


def by_host_in_turn(
    hosts: Hosts[Any],
    steps: Mapping[str, Call],
    rounds: int,
    *,
    warmup: bool = True,
    times: Mapping[str, int] | None = None,
) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of every step in every round, of every host.

    All hosts begin at the same time.  Every round has an order of its own, so that no step always follows the same
    other one, which may leave more or less in caches, queues and quotas.

    Args:
      warmup: whether each step runs once before.
      times: of steps that run several times in every round, how often.
    """
    names, samples = list(steps), {name: list[float]() for name in steps}
    for name in names if warmup else ():
        hosts.say(f"first step of {name}")
        jax.block_until_ready(steps[name]())
    for order in orders(names, rounds, times):
        for name in order:
            hosts.wait()
            start = time.perf_counter()
            jax.block_until_ready(steps[name]())
            samples[name].append(time.perf_counter() - start)
    everyone = hosts.everyone(samples)
    return {name: list(zip(*(one[name] for one in everyone), strict=True)) for name in names}


def orders(names: Sequence[str], rounds: int, times: Mapping[str, int] | None = None) -> list[list[str]]:
    """The order of every round: random, never that of the round before, and the same on all hosts.

    times: as of `by_host_in_turn`.
    """
    turns = [name for name in names for _ in range((times or {}).get(name, 1))]
    random, made = Random(0), list[list[str]]()
    for _ in range(rounds):
        order = random.sample(turns, len(turns))
        while len(names) > 1 and made and order == made[-1]:
            order = random.sample(turns, len(turns))
        made.append(order)
    return made


def in_rotation(calls: Mapping[str, Call], seconds: float) -> tuple[dict[str, float], float]:
    """(typical processor seconds of every call, taken in turn for so long; seconds that pass in one of them).

    In a row of its own a call would find in the caches what it left there; here other calls have replaced it.  A host
    with a quota runs and stands still in turn, for longer than most calls take, so single calls are timed by the
    processor, and only all of them together by the clock.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    samples = {name: list[float]() for name in calls}
    begun, spent = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            samples[name].append(time.process_time() - start)
    pace = (time.perf_counter() - begun) / (time.process_time() - spent)
    return {name: statistics.median(each) for name, each in samples.items()}, pace


@dataclass(frozen=True, kw_only=True)
class Series:
    """So many calls in a row, which took `SAMPLE_S` seconds."""

    call: Call
    count: int

    def __call__(self) -> None:
        for _ in range(self.count):
            jax.block_until_ready(self.call())

    def seconds(self) -> float:
        """What a call takes now."""
        start = time.perf_counter()
        self()
        return (time.perf_counter() - start) / self.count


def series_of(call: Call) -> Series:
    """As many calls as take `SAMPLE_S` seconds."""
    jax.block_until_ready(call())
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SAMPLE_S:
        jax.block_until_ready(call())
        done += 1
    return Series(call=call, count=done)


def typical_seconds(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Typical seconds of every call on a host with a quota, each in series."""
    series = {name: series_of(call) for name, call in calls.items()}
    samples = steady(interleaved(series, rounds, warmup=0))
    return {name: seconds / series[name].count for name, seconds in samples.items()}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds of every candidate that was tried, and the fastest of every competitor, by their names."""

    samples: Mapping[str, Sequence[float]]
    fastest: Mapping[str, str]


def trial(
    hosts: Hosts[Any], competitors: Mapping[str, Collection[str]], steps: Mapping[str, Call], rounds: int
) -> Trial:
    """Runs the candidates of every competitor in turn and keeps the one with the smallest median.

    A step lasts until the slowest host has finished it (`in_turn`), so all hosts keep the same one, of equally fast
    ones the first.  The only candidate of a competitor is kept without being run.

    Args:
      competitors: names of candidates by competitor; several may have one in common, which is run once.
      steps: of the candidates, each of which has run before.
    """
    compared = [name for names in competitors.values() if len(names) > 1 for name in names]
    samples = in_turn(hosts, {name: steps[name] for name in compared}, rounds, warmup=False)
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    fastest = {one: min(names, key=lambda name: seconds.get(name, 0.0)) for one, names in competitors.items()}
    return Trial(samples=samples, fastest=fastest)
