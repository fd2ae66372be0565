"""Seconds of a pipeline's step on hosts with a quota of a core, which are not slower processors.

A host with quota r computes at full speed until it has used up r times the quota's period, and then stands still
until the period ends.  Layers are timed in long rows of calls, so a pass of p seconds needs r p of processor time.  A
host that has waited for its neighbours has saved up to a period's share B = r x period, and computes at full speed as
long as that lasts:

    a pass of p seconds takes r p, if r p (1 - r) <= saved;    (r p - saved) / r otherwise

An exchange takes processor time, too, which the probe has measured.  Plans are chosen by the planner's price, which
takes a host for a processor of r times the speed: it leaves out that waits of up to a period cost less than they take.
"""

from dataclasses import dataclass

import numpy as np

from jhpt.core.plan import Plan
from jhpt.core.schedule import timetable
from jhpt.planner.cost.estimate import StageTimes


@dataclass(frozen=True, kw_only=True)
class Quota:
    """share: cores of a host.  period: seconds over which it holds.  exchange: processor seconds of an exchange."""

    share: float
    period: float
    exchange: float


class _Host:
    """One host: the time until which it is busy, and the processor seconds that it has saved."""

    def __init__(self, quota: Quota) -> None:
        self.quota, self.time, self.saved = quota, 0.0, 0.0

    def compute(self, seconds: float) -> None:
        """A pass that takes so many seconds if nothing is saved."""
        share, used = self.quota.share, self.quota.share * seconds
        taken = used if used * (1 - share) <= self.saved else (used - self.saved) / share
        self._spend(taken, used)

    def wait(self, until: float) -> None:
        """An exchange that is over then, if its processor time allows."""
        share, used = self.quota.share, self.quota.exchange
        taken = max(until - self.time, (used - self.saved) / share, 0.0)
        self._spend(taken, used)

    def _spend(self, taken: float, used: float) -> None:
        share = self.quota.share
        self.saved = min(share * self.quota.period, max(0.0, self.saved + share * taken - used))
        self.time += taken


def pipeline_seconds(plan: Plan, times: StageTimes, quota: Quota) -> float:
    """Seconds of the ticks of `jhpt.planner.cost.schedule` without overlap, and of the update."""
    hosts = [_Host(quota) for _ in plan.stages]
    stages, chunks = times.forward.shape
    edges = np.append(times.cut, 0.0).reshape(chunks, stages).max(axis=0)
    if chunks == 1:
        edges[-1] = -np.inf  # the last stage has no successor

    def exchange() -> None:
        free = np.array([host.time for host in hosts])
        done = np.maximum(free, np.roll(free, -1)) + edges
        for host, until in zip(hosts, np.maximum(done, np.roll(done, 1)), strict=True):
            host.wait(float(until))

    table = timetable(plan.schedule, stages, chunks, plan.micro_batches)
    for phase in table.phases():
        for forward, backward in zip(table.forward[phase.ticks], table.backward[phase.ticks], strict=True):
            if phase.backward:
                exchange()
            for host, (micro_batch, chunk, _), seconds in zip(hosts, forward, times.forward, strict=True):
                if micro_batch >= 0:
                    host.compute(float(seconds[chunk]))
            if phase.forward:
                exchange()
            for host, (micro_batch, chunk, _), seconds in zip(hosts, backward, times.backward, strict=True):
                if micro_batch >= 0:
                    host.compute(float(seconds[chunk]))
    return max(host.time + update for host, update in zip(hosts, times.update.tolist(), strict=True))
