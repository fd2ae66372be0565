"""Best-first search over the first stages of plans, guided by the bounds of `suffixes`.

A prefix is the first stages of a plan, fixed.  Bounds of the stages after it give bounds of every plan that begins with
it.  A stage is fixed in three steps: first its layers and devices; then the group of its assignments of degrees
(`layer_degrees.groups` of the undominated options); and once all stages are fixed, the member of each group.  States
that cannot be part of a plan faster than the best known one are never built.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.search.general.least import Minima, Transfers
from jhpt.planner.search.general.suffixes import Choices, Suffixes, device_memory, needs, stage_choices
from jhpt.planner.search.layer_degrees import Group, Option, Question, groups, options, single
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.rows import Row
from jhpt.planner.search.stages import StageTerms, after, round_trips, stage_seconds

EXACT_STATES = 600
"""Up to so many layers x devices^2 the search visits everything.  In larger problems the limits below hold."""

STAGES, EXPANSIONS, LABELS = 16, 4000, 64
"""Numbers of stages that have bounds of their own, prefixes that the search opens, assignments of degrees per layer."""

FEW_EXPANSIONS = 1000
"""Prefixes that the search opens if all that are left have a bound that is not below that of other unvisited plans."""

ALIKE = 0.1
"""Relative.  Assignments of degrees that differ by less are distinguished only once all else in a plan is fixed."""


@dataclass(frozen=True)
class Fixed:
    """A stage whose layers and devices are fixed."""

    device: int
    devices: int
    group: Group
    transfer: float
    """Seconds of the transfer to this stage; 0 for the first."""
    head: float
    """Seconds from the start of the step to the stage's first forward pass."""
    tail: float
    """Seconds from the end of the stage's last backward pass until it and all earlier stages are updated."""

    @property
    def option(self) -> Option:
        """The stage's assignment of degrees; while several are open, their least seconds."""
        return self.group.least

    @property
    def both(self) -> float:
        """Seconds of a micro-batch's forward and backward pass."""
        return self.option.forward + self.option.backward

    @property
    def sender(self) -> tuple[int, int, int]:
        """(first device, devices, data degree) of the stage as a sender."""
        return self.device, self.devices, self.devices // self.option.degrees[-1]


@dataclass(frozen=True)
class Ahead:
    """What the stages after a prefix take at least.

    transfer: seconds of the transfer to the first of them.  trip: round trip of all of them.  near: round trips of the
    next one, the next two, ...  stages: how many there are.
    """

    transfer: float = 0.0
    trip: float = 0.0
    near: tuple[float, ...] = ()
    stages: int = 0


@dataclass(frozen=True)
class Prefix:
    """The first stages of plans.  stop, device: the first layer and the first device after them."""

    stages: tuple[Fixed, ...] = ()
    stop: int = 0
    device: int = 0

    @property
    def head(self) -> float:
        """Seconds forward through all stages, without the transfer that follows."""
        last = self.stages[-1] if self.stages else None
        return last.head + last.option.forward if last else 0.0

    @property
    def tail(self) -> float:
        """Seconds backward through all stages until they are updated, without the transfer before."""
        last = self.stages[-1] if self.stages else None
        return last.option.backward + last.tail if last else 0.0

    @property
    def open(self) -> int | None:
        """The first stage whose assignment of degrees is still open."""
        return next((at for at, stage in enumerate(self.stages) if len(stage.group.members) > 1), None)

    def grown(self, devices: int, group: Group, transfer: float, start: int | None = None) -> "Prefix":
        """The prefix with one more stage, on the next devices or, if given, on those from `start` on."""
        option, device = group.least, self.device if start is None else start
        updated = option.sync - option.backward + option.update
        stage = Fixed(device, devices, group, transfer, self.head + transfer, max(self.tail + transfer, updated))
        return Prefix((*self.stages, stage), self.stop + len(option.degrees), device + devices)

    def settled(self, at: int) -> Iterator["Prefix"]:
        """The prefix with each of the assignments of degrees that are open for stage `at`."""
        for option in self.stages[at].group.members:
            prefix = Prefix()
            for index, stage in enumerate(self.stages):
                group = single(option) if index == at else stage.group
                prefix = prefix.grown(stage.devices, group, stage.transfer, stage.device)
            yield prefix


def loop_bound(prefix: Prefix, ahead: Ahead, schedule: Schedule, m: int) -> float:
    """Least seconds of a step, by the round trips of micro-batches through the prefix and the stages after it.

    1f1b: `stages.round_trips` from every stage to the last fixed one, to the next stages after it, and to the last.
    gpipe: a round trip, and in each direction M - 1 times the slowest stage on the way, its exchanges included.
    """
    if schedule == "gpipe":
        return _gpipe_loop_bound(prefix, ahead, m)
    beyond = 2 * ahead.transfer + ahead.trip
    targets = [(0, 0.0)]
    if ahead.stages:
        targets += [(j, 2 * ahead.transfer + near) for j, near in enumerate(ahead.near, 1) if j < ahead.stages]
        targets.append((ahead.stages, beyond))
    worst = 0.0
    for further, trip in targets:
        transfer = 0.0
        for distance, stage in enumerate(reversed(prefix.stages)):
            trip += 2 * transfer + stage.both
            transfer, j, left = stage.transfer, distance + further, distance + ahead.stages + 1
            if j and (k := round_trips(m, left, j)):
                seconds = (k + 1) * trip + (m - 1 - k * (2 * j + 1)) * stage.both
                worst = max(worst, stage.head + seconds + stage.tail)
    return worst


def _gpipe_loop_bound(prefix: Prefix, ahead: Ahead, m: int) -> float:
    forward = backward = transfer = ahead.transfer
    trip, worst = ahead.trip, 0.0
    for stage in reversed(prefix.stages):
        exchange = max(transfer, stage.transfer)
        forward, backward = (
            max(slowest, seconds + exchange)
            for slowest, seconds in ((forward, stage.option.forward), (backward, stage.option.backward))
        )
        trip += 2 * transfer + stage.both
        transfer = stage.transfer
        worst = max(worst, stage.head + trip + (m - 1) * (forward + backward) + stage.tail)
    return worst


@dataclass(frozen=True)
class Ways:
    """Assignments of degrees with which a step of a stage takes less than `limit` seconds.

    missing: a lower bound of those that are not listed.
    """

    groups: list[Group]
    missing: float
    limit: float


@dataclass(frozen=True)
class Problem:
    """One number of micro-batches, one layer strategy and one row of devices."""

    m: int
    strategy: LayerStrategy
    request: Request
    row: Row
    minima: Minima
    share: float = 1.0
    """Of `EXPANSIONS`: all rows of a cluster together have so many."""
    ways: dict[tuple[Place, int, int, int], Ways] = field(default_factory=dict, repr=False)
    """Of the stages visited so far, by place, first layer, stop and micro-batches in flight."""

    @property
    def model(self) -> CostModel:
        """The costs on the row."""
        return self.row.model

    @property
    def most(self) -> int:
        """Most stages that a plan can have."""
        return min(self.model.num_layers, self.model.cluster.num_devices, self.request.max_stages)

    @property
    def exact(self) -> bool:
        """Whether it is small enough to visit everything."""
        return self.model.num_layers * self.model.cluster.num_devices**2 <= EXACT_STATES

    def starts(self, device: int, before: int | None = None) -> Sequence[int]:
        """The devices that a stage may begin on if `device` is the next one (`Places.starts`)."""
        return (device,) if self.request.whole else self.model.places.starts(device, before)

    @cached_property
    def transfers(self) -> Transfers:
        """Transfers of a micro-batch."""
        return Transfers(self.model, self.strategy.micro_batch)

    def choices(self, incumbent: Incumbent) -> list[Choices]:
        """For every first device, the stages that can be part of a faster plan; empty if no plan can be faster."""
        model, minima = self.model, self.minima
        leasts, memory = minima.of(self.strategy, self.m), device_memory(model)
        needed = needs(leasts, minima.spans, minima.device_bytes(self.strategy))
        if (bound := needed.bound(self.m)) >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            return []
        return [
            stage_choices(
                offset, least, self.transfers.rows(offset), minima.spans, needed, self.m, incumbent.seconds, memory
            )
            for offset, least in enumerate(leasts)
        ]

    def plan(self, stages: tuple[Stage, ...], schedule: Schedule) -> Plan:
        """The plan of these stages."""
        return Plan(
            model=self.model.profile.name,
            cluster=self.model.cluster.name,
            space="general",
            batch=self.request.batch,
            micro_batches=self.m,
            schedule=schedule,
            zero=self.strategy.zero,
            recompute=self.strategy.recompute,
            stages=stages,
        )


def suffixes_of(problem: Problem, choices: list[Choices], schedule: Schedule, incumbent: Incumbent) -> Suffixes | None:
    """The bounds of suffixes; None if no plan can be faster than the incumbent.

    They distinguish a few numbers of stages first, and more only if plans with as many stages can be faster.
    """
    if not choices:
        return None
    most = problem.most
    for distinct in (most,) if problem.exact else sorted({min(count, most) for count in (1, 5, STAGES)}):
        limit, layers, whole = incumbent.cutoff, problem.model.num_layers, problem.request.whole
        suffixes = Suffixes(choices, layers, problem.m, schedule, distinct, most, limit, problem.starts, whole)
        if suffixes.root(distinct) >= incumbent.cutoff:
            break
    if suffixes.least >= incumbent.cutoff:
        incumbent.note_unexplored_bound(suffixes.least)
        return None
    return suffixes


@dataclass(frozen=True, order=True)
class Node:
    """A prefix of plans with `stages` stages.  Nodes are visited in ascending order.

    chosen: (stop, first device, devices) of the next stage, if they are fixed but its degrees are not.
    """

    bound: float
    depth: int
    """Of equal bounds, the node with more decisions fixed comes first."""
    count: int
    stages: int
    prefix: Prefix = field(compare=False)
    chosen: tuple[int, int, int] | None = field(compare=False)


Child = tuple[float, Prefix, tuple[int, int, int] | None]
"""(bound, prefix, chosen) of a node."""


class Search:
    """The search for one number of micro-batches, layer strategy and schedule."""

    def __init__(self, problem: Problem, suffixes: Suffixes, incumbent: Incumbent) -> None:
        self.problem, self.suffixes, self.incumbent = problem, suffixes, incumbent
        self.m, self.strategy, self.model = problem.m, problem.strategy, problem.model
        self.schedule, self._count = suffixes.schedule, itertools.count()

    def dive(self) -> None:
        """Finds one plan quickly: follows the child with the least bound.  Notes no bounds of unvisited plans."""
        unvisited = self.incumbent.unvisited
        nodes = self._roots()
        while nodes:
            node = min(nodes)
            nodes = self._nodes(node)
        self.incumbent.unvisited = unvisited

    def run(self) -> None:
        """Searches best-first over prefixes."""
        heap = self._roots()
        heapq.heapify(heap)
        opened = 0
        while heap and heap[0].bound < self.incumbent.cutoff:
            enough = FEW_EXPANSIONS if heap[0].bound >= self.incumbent.unvisited else EXPANSIONS
            if opened >= enough * self.problem.share and not self.problem.exact:
                self.incumbent.note_unexplored_bound(heap[0].bound)
                break
            opened += 1
            for node in self._nodes(heapq.heappop(heap)):
                heapq.heappush(heap, node)

    def _roots(self) -> list[Node]:
        suffixes, nodes = self.suffixes, []
        for s in range(self.problem.request.fewest_stages, suffixes.distinct + 1):
            bound = suffixes.root(s)
            if suffixes.open_ended and s == suffixes.distinct:
                self.incumbent.note_unexplored_bound(bound)
            elif bound < self.incumbent.cutoff:
                nodes.append(Node(bound, 0, next(self._count), s, Prefix(), None))
        return nodes

    def _nodes(self, node: Node) -> list[Node]:
        return [
            Node(bound, -2 * len(prefix.stages) - (chosen is not None), next(self._count), node.stages, prefix, chosen)
            for bound, prefix, chosen in self._children(node)
        ]

    def _children(self, node: Node) -> Iterator[Child]:
        if node.chosen:
            return self._resolved(node)
        if len(node.prefix.stages) < node.stages:
            return self._next_stages(node)
        at = node.prefix.open
        assert at is not None
        return self._priced(list(node.prefix.settled(at)))

    def _next_stages(self, node: Node) -> Iterator[Child]:
        """Layers and devices of the next stage, whose degrees are still open."""
        prefix, left = node.prefix, node.stages - len(node.prefix.stages)
        transfer = self._pending_transfer(prefix)
        head, tail = prefix.head + transfer, prefix.tail + transfer
        before = prefix.stages[-1].device if prefix.stages else None
        for start in self.problem.starts(prefix.device, before):
            next_stages = self.suffixes.next_stages(left, prefix.stop, start)
            if next_stages is None:
                continue
            choices, back, done = next_stages
            bounds = np.maximum.reduce([np.full(len(back), node.bound), head + back + tail, head + done])
            for at in np.flatnonzero(bounds < self.incumbent.cutoff):
                yield float(bounds[at]), prefix, (int(choices.stop[at]), start, int(choices.devices[at]))

    def _pending_transfer(self, prefix: Prefix) -> float:
        return self.problem.transfers.least(*prefix.stages[-1].sender, prefix.stop - 1) if prefix.stages else 0.0

    def _resolved(self, node: Node) -> Iterator[Child]:
        """The chosen stage with each group of its undominated assignments of degrees."""
        assert node.chosen is not None
        (stop, start, devices), prefix = node.chosen, node.prefix
        left = node.stages - len(prefix.stages) - 1
        window = self.suffixes.window(left + 1)
        place = self.model.places.at(start, devices)
        whole = []
        for group in self._stage_groups(place, prefix.stop, stop, window, node.stages > 1, node.bound):
            grown = prefix.grown(devices, group, self._transfer(prefix, start, devices, group.least), start)
            bound = max(node.bound, self._bound(grown, left, window))
            if bound >= self.incumbent.cutoff:
                continue
            if left:
                yield bound, grown, None
            else:
                whole.append(grown)
        if whole:
            yield from self._priced(whole)

    def _bound(self, prefix: Prefix, left: int, window: int) -> float:
        """A bound of the plans that have these stages and `left` more."""
        last, to = prefix.stages[-1], (left, prefix.stop, prefix.device)
        suffixes = self.suffixes
        transfer = self._pending_transfer(prefix) if left else 0.0
        back, done, trip, *near = (float(t[to]) for t in (suffixes.back, suffixes.done, suffixes.trip, *suffixes.near))
        option = last.option
        terms = StageTerms(*(np.array(x) for x in (option.forward, option.backward, option.sync, option.update)))
        seconds = float(stage_seconds(terms, np.array(transfer), np.array(trip), window, self.m, last.transfer))
        return max(
            last.head + seconds + max(last.tail, float(after(terms))),
            prefix.head + transfer + prefix.tail + transfer + back,
            prefix.head + transfer + done,
            loop_bound(prefix, Ahead(transfer, trip, tuple(near), left), self.schedule, self.m),
        )

    def _transfer(self, prefix: Prefix, start: int, devices: int, option: Option) -> float:
        """Seconds of the transfer from the last stage of the prefix to a next stage with this option."""
        if not prefix.stages:
            return 0.0
        receiver = start, devices, devices // option.degrees[0]
        return self.model.cut_seconds(prefix.stop - 1, prefix.stages[-1].sender, receiver, self.strategy.micro_batch)

    def _stage_groups(
        self, place: Place, first: int, stop: int, window: int, in_pipeline: bool, bound: float
    ) -> list[Group]:
        key, cutoff = (place, first, stop, window), self.incumbent.cutoff
        ways = self.problem.ways.get(key)
        # If missing assignments could matter, a tighter limit may leave room for them.
        if ways is None or ways.missing < cutoff < ways.limit:
            degrees = tuple(self.model.degrees(place.devices))
            question = Question(place, self.strategy, first, stop, window, self.m, degrees, in_pipeline=in_pipeline)
            listed, missing = options(question, self.model, 1 << 20 if self.problem.exact else LABELS, cutoff)
            ways = self.problem.ways[key] = Ways(groups(listed, self.m, ALIKE), missing, cutoff)
        self.incumbent.note_unexplored_bound(max(bound, ways.missing))
        return ways.groups

    def _priced(self, plans: list[Prefix]) -> Iterator[Child]:
        """The exact seconds of complete plans, which are bounds of those with open degrees; offers the others."""
        rows = [[stage.option for stage in plan.stages] for plan in plans]
        forward, backward, sync, update = (
            np.array([[getattr(option, name) for option in row] for row in rows])
            for name in ("forward", "backward", "sync", "update")
        )
        cut = np.array([[stage.transfer for stage in plan.stages[1:]] for plan in plans]).reshape(len(plans), -1)
        times = forward[..., None], backward[..., None], cut, sync, update
        seconds = step_seconds(self.schedule, self.m, *times, overlap=self.model.cluster.overlap)
        for at in np.argsort(seconds, kind="stable"):
            if seconds[at] >= self.incumbent.cutoff:
                return
            if plans[at].open is None:
                self.incumbent.offer(self._plan(plans[at]), self.problem.row.listed)
            else:
                yield float(seconds[at]), plans[at], None

    def _plan(self, whole: Prefix) -> Plan:
        firsts = itertools.accumulate((len(stage.option.degrees) for stage in whole.stages), initial=0)
        stages = tuple(
            self.problem.row.stage(
                stage.device, stage.devices, Chunk(first=first, runs=runs_of(list(stage.option.degrees)))
            )
            for first, stage in zip(firsts, whole.stages, strict=False)
        )
        return self.problem.plan(stages, self.schedule)
