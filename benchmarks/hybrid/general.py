"""What general plans cost on the hosts: what it takes to dispatch a program for each stage, and seconds of steps.

A process dispatches every pass and every transfer of its stage from Python, and XLA's client and Gloo take processor
time, too.  It is measured where programs compute next to nothing:

    passes      both passes of a micro-batch, on one device alone
    transfer    one transfer, from or to a neighbour, of a few bytes: what a stage of a pipeline takes beyond its passes
    step        what remains of a step without micro-batches

In a step all programs of a process run in line, in the order of `jhpt.sharding.stages.walk`.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call
from benchmarks.hybrid.models import ClassSubject, Subject
from benchmarks.hybrid.quota import Host, Quota, compute
from benchmarks.hybrid.stages import stages_step
from benchmarks.hybrid.task import Task
from benchmarks.networks.mlp import MLP
from jhpt.core.framework import IDEAL
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.profile import ModelProfile
from jhpt.core.schedule import timetable
from jhpt.planner.cost.estimate import StageTimes
from jhpt.sharding.stages.walk import in_two_turns, passes_of

FEW, MANY = 4, 20
"""Micro-batches of the two steps whose difference is that of so many micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Processor seconds of a process: of both passes of a micro-batch, of a transfer, and once a step."""

    passes: float
    transfer: float
    step: float

    def of(self, profile: ModelProfile, share: float) -> ModelProfile:
        """The profile with the dispatch of a pass, which receives and sends, on a host of so many cores."""
        seconds = (self.passes / 2 + 2 * self.transfer) / share
        return profile.model_copy(update={"framework": IDEAL.model_copy(update={"stage_dispatch": seconds})})


def measured_dispatch(hosts: Hosts[Task]) -> Dispatch:
    """Typical processor seconds, of the host that needs most."""
    hosts.free()
    hosts.say("dispatch")
    steps: dict[tuple[int, int], Call] = {}
    for count in (FEW, MANY):
        for stages, devices in ((1, jax.local_devices()), (hosts.count, jax.devices())):
            steps[stages, count] = stages_step(_small(count), _line(stages, count), devices)
            jax.block_until_ready(steps[stages, count]())
    hosts.limit(max(hosts.task.rates))
    seconds = {key: _processor_seconds(hosts, step) for key, step in steps.items()}
    each = {stages: (seconds[stages, MANY] - seconds[stages, FEW]) / (MANY - FEW) for stages in (1, hosts.count)}
    # The first and the last stage have one neighbour.
    transfers = 2 if hosts.rank in (0, hosts.count - 1) else 4
    mine = [each[1], (each[hosts.count] - each[1]) / transfers, seconds[hosts.count, FEW] - FEW * each[hosts.count]]
    passes, transfer, step = (max(0.0, *every) for every in zip(*hosts.everyone(mine), strict=True))
    return Dispatch(passes=passes, transfer=transfer, step=step)


def _processor_seconds(hosts: Hosts[Task], step: Call) -> float:
    samples = []
    for _ in range(hosts.task.link_rounds):
        hosts.wait()
        start = time.process_time()
        jax.block_until_ready(step())
        samples.append(time.process_time() - start)
    return statistics.median(samples)


def _small(count: int) -> Subject:
    network = MLP(inputs=4, width=4, hidden=4, num_blocks=6, classes=4)
    return ClassSubject(name="small", batch=count, network=network)


def _line(stages: int, count: int) -> Plan:
    """Stages of one device and about equally many of eight layers."""
    edges = [8 * at // stages for at in range(stages + 1)]
    made = tuple(
        Stage(device=at, devices=1, chunks=(Chunk(first=first, runs=runs_of([1] * (stop - first))),))
        for at, (first, stop) in enumerate(itertools.pairwise(edges))
    )
    return Plan(
        model="small",
        cluster="hosts",
        space="general",
        batch=count,
        micro_batches=count,
        schedule="eager-1f1b",
        stages=made,
    )


def general_seconds(plan: Plan, times: StageTimes, quota: Quota, dispatch: Dispatch) -> float:
    """Seconds of a step of a plan with one chunk per stage, device n of which is host n.

    times: without dispatch.
    """
    return _Step(plan, times, quota, dispatch).run()


class _Step:
    """One step: when every host is free, and when the input of every pass has come."""

    def __init__(self, plan: Plan, times: StageTimes, quota: Quota, dispatch: Dispatch) -> None:
        quota = replace(quota, exchange=dispatch.transfer)
        self.plan, self.times, self.quota, self.dispatch = plan, times, quota, dispatch
        self.hosts = [[Host(quota, number) for number in stage.members] for stage in plan.stages]
        self.started = [0.0] * len(plan.stages)

    def run(self) -> float:
        plan, stages = self.plan, len(self.plan.stages)
        table = timetable(plan.schedule, stages, 1, plan.micro_batches)
        for tick in range(table.ticks):
            on = passes_of(table.forward, tick)
            self._passes(on, self.times.forward[:, 0])
            for stage, _ in in_two_turns(on, stages - 1):
                if stage + 1 < stages:
                    self._transfer(stage, stage + 1)
            on = passes_of(table.backward, tick)
            for stage, _ in on:
                self.started[stage] = self._free(stage)
            self._passes(on, self.times.backward[:, 0])
            for stage, _ in in_two_turns(on, stages - 1):
                if stage > 0:
                    self._transfer(stage - 1, stage)
        ends = np.array([self._free(stage) for stage in range(stages)])
        reduced = np.maximum(ends, np.array(self.started) + self.times.sync)
        step = max(self.dispatch.step / host.share for row in self.hosts for host in row)
        return float((reduced + self.times.update).max()) + step

    def _passes(self, on: Sequence[tuple[int, int]], seconds: np.ndarray) -> None:
        """Passes of these stages at the same time."""
        here = [
            (host, seconds[stage] + self.dispatch.passes / 2 / host.share)
            for stage, _ in on
            for host in self.hosts[stage]
        ]
        compute([host for host, _ in here], [float(each) for _, each in here])

    def _transfer(self, first: int, second: int) -> None:
        """One between neighbours, for which all their hosts wait."""
        both = [*self.hosts[first], *self.hosts[second]]
        done = max(host.time for host in both) + float(self.times.cut[first])
        for host in both:
            host.wait(done)

    def _free(self, stage: int) -> float:
        return max(host.time for host in self.hosts[stage])
