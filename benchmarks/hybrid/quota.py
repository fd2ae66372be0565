"""Seconds of a pipeline's step on hosts with a quota of a core, which are not slower processors.

A host with quota r computes at full speed until it has used up r times the quota's period P, and then stands still
until the period ends.  Layers are timed in long rows of calls, so a pass of p seconds needs r p of processor time.  A
host that waits for its neighbours while it would stand still loses nothing by that: it saves up processor time.  What
a period leaves is lost with it, so after a long wait a host has saved B = r (1 - r) P, in the mean over the moments of
a period.  As long as that lasts it computes as fast as its core lets it, which k hosts that compute at the same time
share:

    speed = 1 / k while anything is saved, else r;    saved grows by r - speed each second, up to B

Layers are timed while all hosts compute.  Where fewer do, each has more of the caches and of the memory to itself, and
on some machines two cores are threads of one.  `alone` says how much faster a host computes that has all of that to
itself; in between, what it gains is in proportion to the cores that stand still:

    work done in a second = speed x (1 + (alone - 1) (cores - busy) / (cores - r)),    busy = sum of the speeds

An exchange takes processor time, too, which the probe has measured.  Plans are chosen by the planner's price, which
takes a host for a processor of r times the speed: it leaves out that waits of up to a period cost less than they take.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Plan
from jhpt.core.schedule import timetable
from jhpt.planner.cost.estimate import StageTimes
from jhpt.planner.cost.schedule import Array

TICK = 1e-9
"""Seconds that are nothing."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """share: cores of a host.  period: seconds over which it holds.  exchange: processor seconds of an exchange.
    cores: on which the hosts run, host i on core i modulo their number.  shares: of `share`, what each host has; None:
    all of it.  paces: seconds of each host over those that its layers are said to take; None: the same.
    alone: seconds of layers while all hosts compute / seconds while one does."""

    share: float
    period: float
    exchange: float
    cores: int
    shares: tuple[float, ...] | None = None
    paces: tuple[float, ...] | None = None
    alone: float = 1.0

    def of(self, host: int) -> float:
        """Cores of one host."""
        return self.share * self.shares[host] if self.shares else self.share

    def pace(self, host: int) -> float:
        """Seconds that one host takes over those that layers are said to take."""
        return self.paces[host] if self.paces else 1.0

    def gain(self, busy: float) -> float:
        """Times as fast as while all hosts compute, where so many cores are busy."""
        least = self.of(0)
        return (
            1 + (self.alone - 1) * min(1.0, (self.cores - busy) / (self.cores - least)) if self.cores > least else 1.0
        )


def placement(stages: int, replicas: int, quota: Quota) -> list[int]:
    """The host of every rank, ranks by stage and then by replica; hosts that differ have the numbers of the plan.

    Stage s of a pipeline runs on core s modulo `cores` where it can, so that the partners of an exchange do not share
    a core.  Otherwise a host whose message has come may still have to wait for the time slice of its partner, 4 ms
    here, which is no property of a cluster.  Ranks of a single stage take the hosts in order.
    """
    free, order = list(range(stages * replicas)), list[int]()
    if stages == 1 or quota.shares:
        return free
    for stage in (rank // replicas for rank in range(stages * replicas)):
        order.append(min(free, key=lambda host: ((host - stage) % quota.cores, host)))
        free.remove(order[-1])
    return order


class Host:
    """One host: its core, share and pace, the time until which it is busy, and the processor seconds that it saved."""

    def __init__(self, quota: Quota, number: int) -> None:
        self.quota, self.share, self.pace, self.core = quota, quota.of(number), quota.pace(number), number % quota.cores
        self.time, self.saved, self.most = 0.0, 0.0, self.share * max(0.0, 1 - self.share) * quota.period

    def wait(self, until: float) -> None:
        """An exchange that is over then, if its processor time allows."""
        used = self.quota.exchange
        taken = max(until - self.time, (used - self.saved) / self.share, 0.0)
        self.spend(taken, used)

    def spend(self, taken: float, used: float) -> None:
        """Lets seconds pass in which so many processor seconds are used."""
        self.saved = min(self.most, max(0.0, self.saved + self.share * taken - used))
        self.time += taken


def compute(hosts: Sequence[Host], seconds: Sequence[float]) -> None:
    """Lets hosts compute passes that take so many seconds on the slowest host, which has its share all the time, while
    all compute."""
    left = {host: host.share * host.pace * work for host, work in zip(hosts, seconds, strict=True) if work > 0}
    while left:
        now = min(host.time for host in left)
        at_work = [host for host in left if host.time <= now + TICK]
        crowd = Counter(host.core for host in at_work)
        speed = {
            host: 1 / crowd[host.core] if host.saved > TICK else min(host.share, 1 / crowd[host.core])
            for host in at_work
        }
        gain = at_work[0].quota.gain(sum(speed.values()))
        ends = [left[host] / (speed[host] * gain) for host in at_work]
        spent = [host.saved / (speed[host] - host.share) for host in at_work if speed[host] > host.share]
        joins = [host.time - now for host in left if host not in at_work]
        step = max(TICK, min([*ends, *spent, *joins]))
        for host in at_work:
            host.spend(step, min(left[host] / gain, speed[host] * step))
            left[host] -= speed[host] * step * gain
            if left[host] <= TICK * speed[host]:
                del left[host]


def pipeline_seconds(plan: Plan, times: StageTimes, quota: Quota) -> float:
    """Seconds of the ticks of `jhpt.planner.cost.schedule` without overlap, of gradients and of the update."""
    stages, chunks = times.forward.shape
    replicas = plan.devices // stages
    numbers = placement(stages, replicas, quota)
    hosts = [[Host(quota, number) for number in numbers[s * replicas : (s + 1) * replicas]] for s in range(stages)]
    edges = np.append(times.cut, 0.0).reshape(chunks, stages).max(axis=0)
    if chunks == 1:
        edges[-1] = -np.inf  # the last stage has no successor
    started = np.zeros(stages)  # of the last backward pass

    def exchange(edges: Array = edges) -> None:
        free = np.array([[host.time for host in row] for row in hosts])
        done = np.maximum(free, np.roll(free, -1, axis=0)) + edges[:, None]
        for row, ends in zip(hosts, np.maximum(done, np.roll(done, 1, axis=0)), strict=True):
            for host, until in zip(row, ends, strict=True):
                if until > -np.inf:  # it takes part
                    host.wait(float(until))

    def run(passes: npt.NDArray[np.int32], seconds: Array) -> None:
        work = [seconds[s, chunk] if micro_batch >= 0 else 0.0 for s, (micro_batch, chunk, _) in enumerate(passes)]
        compute([host for row in hosts for host in row], [float(work[s]) for s in range(stages) for _ in hosts[s]])

    table = timetable(plan.schedule, stages, chunks, plan.micro_batches)
    for tick in range(table.ticks) if table.in_turn else ():
        run(table.forward[tick], times.forward)
        back = table.backward[tick, :, 0] >= 0
        started = np.where(back, [max(host.time for host in row) for row in hosts], started)
        run(table.backward[tick], times.backward)
        exchange(np.where((tick - np.arange(stages)) % 2, -np.inf, edges))
    for phase in () if table.in_turn else table.phases():
        for forward, backward in zip(table.forward[phase.ticks], table.backward[phase.ticks], strict=True):
            if phase.backward:
                exchange()
            run(forward, times.forward)
            if phase.forward:
                exchange()
            started = np.where(backward[:, 0] >= 0, [max(host.time for host in row) for row in hosts], started)
            run(backward, times.backward)
    ends = np.maximum([max(host.time for host in row) for row in hosts], started + times.sync)
    return float((ends + times.update).max())
