"""The best plan where stages may own different numbers of devices: Zeng et al. 2021's search space.

Decision set of space="general":

    micro-batches   every divisor M of the batch
    cuts            any contiguous non-empty ranges of layers
    devices         every stage owns any number of the next devices in order (what is left over at the end stays idle)
    layers          each layer of a stage of k devices chooses its own tensor degree among the divisors of k that it
                    allows; the other devices are data parallel; uneven samples are priced at the fullest device
    schedule        1f1b, gpipe
    ZeRO            0, 1 or 3, for the whole plan
    recompute       off or on, for the whole plan

The dynamic programme runs over (layers, devices) suffixes, O(N^2 K^2) for each number of stages left, with the terms of
`bound` and every layer at its own best degree.  Best-first search over prefixes, guided by it, then fixes stage after
stage: first its layers and devices, then (`mixed`) the undominated assignments of degrees.  States that cannot be part
of a plan faster than the best one known are never built.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.core.cluster import Link
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.planner.bound import StageTerms, after, own_gpipe_seconds, own_seconds
from jhpt.planner.costs import CostModel, Treatment
from jhpt.planner.least import Least, Minima
from jhpt.planner.mixed import Option, Question, options
from jhpt.planner.placement import Place, hop_seconds
from jhpt.planner.ranges import prefix
from jhpt.planner.request import Incumbent, Request
from jhpt.planner.schedule import Array, in_flight, step_seconds

EXACT_STATES = 600
"""Up to so many layers x devices^2 everything is visited; beyond, the limits below hold."""

STAGES, EXPANSIONS, LABELS = 12, 400, 64
"""Stages that are told apart, prefixes that are opened, assignments of degrees that are kept per layer."""


def search_general(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Improves `incumbent` to the best plan of the space, and its bound."""
    minima = Minima(model)
    if incumbent.plan is None:
        _seed(request, model, incumbent)
    for bound, m, treatment in sorted(_bounded(request, model, minima), key=lambda entry: entry[:2]):
        if bound >= incumbent.cutoff:
            incumbent.leave(bound)
            break
        Search(m, treatment, request, model, minima, incumbent).run()


def pipelines(request: Request) -> list[Schedule]:
    """Schedules of the space: interleaved is for stages of equal size."""
    return [name for name in request.schedules if name != "interleaved"]


def _bounded(request: Request, model: CostModel, minima: Minima) -> Iterator[tuple[float, int, Treatment]]:
    """Bounds without cuts: K devices cannot compute faster than if each were as busy as the best-used one."""
    for m, recompute in itertools.product(request.micro_batches, request.recompute):
        work = minima.device_seconds(Treatment(request.batch // m, 0, recompute))
        bound = m * float(work.sum()) / model.cluster.num_devices
        for zero in request.zero:
            yield bound, m, Treatment(request.batch // m, zero, recompute)


def _seed(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """A first plan where there is none yet, so that the search has something to beat: equal stages, data parallel."""
    n, k = model.num_layers, model.cluster.num_devices
    schedule = pipelines(request)[0]
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        for s in sorted({min(s, n, k, request.max_stages) for s in (1, 2, 4, 8)}):
            edges = [n * i // s for i in range(s + 1)]
            stages = tuple(
                Stage(device=i * (k // s), devices=k // s, chunks=(Chunk(first=a, runs=runs_of([1] * (b - a))),))
                for i, (a, b) in enumerate(itertools.pairwise(edges))
            )
            treatment = Treatment(request.batch // m, zero, recompute)
            incumbent.offer(_plan(stages, schedule, m, treatment, request, model), model)


def _plan(
    stages: tuple[Stage, ...], schedule: Schedule, m: int, treatment: Treatment, request: Request, model: CostModel
) -> Plan:
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space="general",
        batch=request.batch,
        micro_batches=m,
        schedule=schedule,
        zero=treatment.zero,
        recompute=treatment.recompute,
        stages=stages,
    )


@dataclass(frozen=True)
class Choices:
    """Stages [i, stop) on `devices` from one offset: flat arrays, sorted by i."""

    i: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    devices: npt.NDArray[np.int64]
    forward: Array
    backward: Array
    both: Array
    until_reduced: Array
    update: Array
    hop: Array
    state: Array
    activations: Array
    memory: Array

    def slice(self, low: int, high: int) -> "Choices":
        """Some of them."""
        return Choices(*(getattr(self, name)[low:high] for name in Choices.__dataclass_fields__))


@dataclass(frozen=True)
class Prefix:
    """Stages that are fixed.

    head: seconds forward through them; tail: back through them until all they hold is updated; both without the hop
    that follows.
    """

    stages: tuple[tuple[int, int, Option], ...]
    """(first device, devices, option) of each."""
    stop: int
    device: int
    head: float
    tail: float


class Search:
    """One number of micro-batches and treatment, every schedule."""

    def __init__(
        self,
        m: int,
        treatment: Treatment,
        request: Request,
        model: CostModel,
        minima: Minima,
        incumbent: Incumbent,
    ) -> None:
        self.m, self.treatment, self.request = m, treatment, request
        self.model, self.minima, self.incumbent = model, minima, incumbent
        self.n, self.k = model.num_layers, model.cluster.num_devices
        self.exact = self.n * self.k**2 <= EXACT_STATES
        self.most = min(self.n, self.k, request.max_stages)
        self._options: dict[tuple[Place, int, int, int], tuple[list[Option], float]] = {}
        self._hops: dict[tuple[int, Link | None], Array] = {}

    def run(self) -> None:
        """Bounds of all suffixes, then best-first over prefixes."""
        least = self._leasts()
        if (bound := self._work_bound(least)) >= self.incumbent.cutoff:
            self.incumbent.leave(bound)
            return
        self.choices = [self._stage_choices(offset, least[offset]) for offset in range(self.k)]
        for schedule in pipelines(self.request):
            self.schedule: Schedule = schedule
            for told in (self.most,) if self.exact else (2, 5, STAGES):
                self.told = min(told, self.most)
                self._tables()
                if not self.beyond or self._root(self.told) >= self.incumbent.cutoff:
                    break
            self._best_first()

    def _leasts(self) -> list[Least]:
        """By offset; offsets of one class share the arrays of the first of them."""
        kinds = [self.model.places.offset_class(offset) for offset in range(self.k)]
        by_class = {kind: self.minima.at(kind, self.treatment, self.m) for kind in dict.fromkeys(kinds)}
        return [by_class[kind] for kind in kinds]

    def _work_bound(self, leasts: list[Least]) -> float:
        """All devices together have K T seconds; a stage of k takes k times its own. Also sets what layers need."""
        self.work = np.full(self.n, np.inf)
        reduced = self.work
        for least in {id(least): least for least in leasts}.values():
            devices = np.arange(1, len(least.both) + 1)[:, None]
            self.work = np.minimum(self.work, (devices * np.diff(least.both)).min(axis=0))
            reduced = np.minimum(reduced, (devices * np.diff(least.until_reduced)).min(axis=0))
        return max(self.m * float(self.work.sum()), float(reduced.sum())) / self.k

    def _root(self, stages: int) -> float:
        return float(max(self.back[stages, 0, 0], self.done[stages, 0, 0]))

    def _best_first(self) -> None:
        heap: list[tuple[float, int, int, int, Prefix, tuple[int, int] | None]] = []
        count = itertools.count()
        start = Prefix((), 0, 0, 0.0, 0.0)
        for s in range(1, self.told + 1):
            bound = self._root(s)
            if self.beyond and s == self.told:
                self.incumbent.leave(bound)
            elif bound < self.incumbent.cutoff:
                heapq.heappush(heap, (bound, 0, next(count), s, start, None))
        opened = 0
        while heap and heap[0][0] < self.incumbent.cutoff:
            if opened >= EXPANSIONS and not self.exact:
                self.incumbent.leave(heap[0][0])
                break
            bound, _, _, s, fixed, chosen = heapq.heappop(heap)
            opened += 1
            grown = self._next_stages(bound, s, fixed) if chosen is None else self._resolved(bound, s, fixed, chosen)
            for child_bound, child, stage in grown:
                depth = -2 * len(child.stages) - (stage is not None)
                heapq.heappush(heap, (child_bound, depth, next(count), s, child, stage))

    # The dynamic programme.

    def _tables(self) -> None:
        """back, done, trip [p, i, o]: suffixes from layer i on the devices from o, with p stages (V, Z, D of `bound`).

        With more stages than are told apart, the last p stands for "so many or more": without look-ahead terms.
        """
        self.beyond = self.told < self.most
        shape = (self.told + 1, self.n + 1, self.k + 1)
        self.back, self.done, self.trip = (np.full(shape, np.inf) for _ in range(3))
        for table in (self.back, self.done, self.trip):
            table[0, self.n, :] = 0.0
        for offset in reversed(range(self.k)):
            choices = self.choices[offset]
            if len(choices.i):
                for p in range(1, self.told + 1):
                    self._fill(p, offset, choices)

    def _stage_choices(self, offset: int, least: Least) -> Choices:
        """Stages that can be part of a plan faster than the best known: what they, and what is before and after them,
        must do fits into its time.
        """
        limit = min(self.incumbent.seconds * (1 + 1e-9), np.finfo(float).max / self.k)
        total = self.m * prefix(self.work)
        counts = np.arange(1, self.k - offset + 1)
        starts = np.flatnonzero(total[:-1] <= limit * offset) if offset else np.array([0])
        low = np.searchsorted(total, total[-1] - limit * (self.k - offset - counts))
        low[-1] = self.n
        both = least.both[: len(counts)]
        high = np.array([np.searchsorted(row, row[starts] + limit / self.m, side="right") for row in both]) - 1
        first = np.maximum(starts[:, None] + 1, low[None, :])  # [starts, devices]
        many = np.maximum(0, high.T - first + 1).ravel()
        at, row = (np.repeat(index.ravel(), many) for index in np.indices(first.shape))
        stop = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first.ravel(), many)
        i = starts[at]
        hop = self._least_hops(offset, counts)
        span = [
            table[row, stop] - table[row, i]
            for table in (
                least.forward,
                least.backward,
                least.both,
                least.until_reduced,
                least.update,
                least.state,
                least.activations,
            )
        ]
        working = np.maximum(least.working[row, i], least.working[row, stop - 1])
        forward, backward, both, until_reduced, update, state, activations = span
        return Choices(
            i=i,
            stop=stop,
            devices=row + 1,
            forward=forward,
            backward=backward,
            both=both,
            until_reduced=until_reduced,
            update=update,
            hop=hop[row, stop - 1],
            state=state + working,
            activations=activations,
            memory=least.memory[row],
        )

    def _least_hops(self, offset: int, counts: npt.NDArray[np.int64]) -> Array:
        """[devices, N]: least seconds of the hop to a next stage that is not known yet, after every layer."""
        hops = np.array([self._hop_row(offset, int(devices)) for devices in counts])
        hops[:, -1] = 0.0
        return hops

    def _hop_row(self, offset: int, devices: int) -> Array:
        local = -(-self.treatment.micro_batch // devices)
        near = self._near(offset, devices)
        key = (local, near)
        if key not in self._hops:
            self._hops[key] = np.array([self._least_hop(offset, devices, size * local) for size in self.model.boundary])
        return self._hops[key]

    def _near(self, offset: int, devices: int) -> Link | None:
        """The link inside the node, where the stage and a device more share one."""
        places = self.model.places
        if offset + devices < self.k and places.same_node(offset, offset + devices + 1):
            return places.nodes[places.node_of[offset]].inside
        return None

    def _least_hop(self, offset: int, devices: int, size: float) -> float:
        """A bound of the hop to a next stage that is not known yet: one sender, the better link."""
        seconds = hop_seconds((self.model.cluster.network, 1), size)
        near = self._near(offset, devices)
        return min(seconds, hop_seconds((near, 1), size)) if near else seconds

    def _window(self, p: int) -> int:
        """Micro-batches in flight with p stages left."""
        return in_flight(self.schedule, p, 0, 1, self.m)

    def _bounds(self, p: int, offset: int, c: Choices) -> tuple[Array, Array, Array]:
        """(round trip, back, done) of every choice as the first of p stages."""
        to = (c.stop, offset + c.devices)
        trip, back, done = (table[p - 1][to] for table in (self.trip, self.back, self.done))
        window = self._window(p)
        open_end = self.beyond and p == self.told
        if open_end:
            trip, back, done = (
                np.minimum(a, t[p][to]) for a, t in ((trip, self.trip), (back, self.back), (done, self.done))
            )
        hop = c.hop if p > 1 else np.zeros_like(c.hop)
        fits = c.state + window * c.activations <= c.memory
        forward = np.where(fits, c.forward, np.inf)
        terms = StageTerms(forward, c.backward, c.backward, c.update)
        if open_end:
            own = np.where(fits, self.m * c.both, np.inf)
        else:
            own = own_seconds(terms, hop, trip, window, self.m)
            own = np.maximum(own, self.m * c.both)
        if self.schedule == "gpipe":
            own = np.maximum(own, own_gpipe_seconds(terms, hop, trip, self.m))
        both = np.where(fits, c.both, np.inf) + 2 * hop
        back = np.maximum(own, both + back)
        done = np.maximum.reduce([back + c.update, c.until_reduced, forward + hop + done])
        return both + trip, back, done

    def _fill(self, p: int, offset: int, c: Choices) -> None:
        borders = np.flatnonzero(np.diff(c.i, prepend=-1))
        for table, values in zip((self.trip, self.back, self.done), self._bounds(p, offset, c), strict=True):
            table[p, c.i[borders], offset] = np.minimum.reduceat(values, borders)

    # Best-first search.

    def _next_stages(
        self, bound: float, s: int, fixed: Prefix
    ) -> Iterator[tuple[float, Prefix, tuple[int, int] | None]]:
        """Layers and devices of the next stage, its degrees still open."""
        c, p = self.choices[fixed.device] if fixed.device < self.k else None, s - len(fixed.stages)
        if c is None:
            return
        low, high = np.searchsorted(c.i, [fixed.stop, fixed.stop + 1])
        if low == high:
            return
        c = c.slice(int(low), int(high))
        _, back, done = self._bounds(p, fixed.device, c)
        hop = self._pending_hop(fixed)
        head, tail = fixed.head + hop, fixed.tail + hop
        bounds = np.maximum.reduce([np.full(len(back), bound), head + back + tail, head + done])
        for at in np.flatnonzero(bounds < self.incumbent.cutoff):
            yield float(bounds[at]), fixed, (int(c.stop[at]), int(c.devices[at]))

    def _pending_hop(self, fixed: Prefix) -> float:
        if not fixed.stages:
            return 0.0
        first, devices, option = fixed.stages[-1]
        local = -(-self.treatment.micro_batch // (devices // option.degrees[-1]))
        return self._least_hop(first, devices, self.model.boundary[fixed.stop - 1] * local)

    def _resolved(
        self, bound: float, s: int, fixed: Prefix, chosen: tuple[int, int]
    ) -> Iterator[tuple[float, Prefix, tuple[int, int] | None]]:
        """Every undominated assignment of degrees to the chosen stage; complete plans are priced."""
        stop, devices = chosen
        p, first = s - len(fixed.stages), fixed.device
        place = self.model.places.at(first, devices)
        window = self._window(p)
        to = (p - 1, stop, first + devices)
        for option in self._stage_options(place, fixed.stop, stop, window, s > 1, bound):
            hop = self._exact_hop(fixed, first, devices, option)
            head, tail = fixed.head + hop, fixed.tail + hop
            grown = Prefix(
                (*fixed.stages, (first, devices, option)),
                stop,
                first + devices,
                head + option.forward,
                max(tail, option.sync - option.backward + option.update) + option.backward,
            )
            if p == 1:
                self._price(grown)
                continue
            on = self._pending_hop(grown)
            terms = StageTerms(*(np.array(x) for x in (option.forward, option.backward, option.sync, option.update)))
            own = own_seconds(terms, np.array(on), self.trip[to], window, self.m)
            child = max(
                bound,
                head + float(own) + max(tail, float(after(terms))),
                grown.head + on + grown.tail + on + float(self.back[to]),
                grown.head + on + float(self.done[to]),
            )
            if child < self.incumbent.cutoff:
                yield child, grown, None

    def _exact_hop(self, fixed: Prefix, first: int, devices: int, option: Option) -> float:
        if not fixed.stages:
            return 0.0
        before, others, last = fixed.stages[-1]
        sender = before, others, others // last.degrees[-1]
        receiver = first, devices, devices // option.degrees[0]
        return self.model.cut_seconds(fixed.stop - 1, sender, receiver, self.treatment.micro_batch)

    def _stage_options(
        self, place: Place, first: int, stop: int, window: int, piped: bool, bound: float
    ) -> list[Option]:
        key = (place, first, stop, window)
        if key not in self._options:
            question = Question(place, self.treatment, first, stop, window, self.m, even=False, piped=piped)
            cap = 1 << 20 if self.exact else LABELS
            self._options[key] = options(question, self.model, cap, self.incumbent.cutoff)
        found, missing = self._options[key]
        self.incumbent.leave(max(bound, missing))
        return found

    def _price(self, whole: Prefix) -> None:
        """The exact time of a complete plan."""
        found = [option for _, _, option in whole.stages]
        forward, backward = (np.array([[getattr(o, a)] for o in found]) for a in ("forward", "backward"))
        sync, update = (np.array([getattr(o, a) for o in found]) for a in ("sync", "update"))
        edges = np.cumsum([len(option.degrees) for option in found])
        cut = np.array(
            [
                self.model.cut_seconds(
                    int(edge) - 1,
                    (a[0], a[1], a[1] // a[2].degrees[-1]),
                    (b[0], b[1], b[1] // b[2].degrees[0]),
                    self.treatment.micro_batch,
                )
                for edge, (a, b) in zip(edges, itertools.pairwise(whole.stages), strict=False)
            ]
        )
        seconds = float(step_seconds(self.schedule, self.m, forward, backward, cut, sync, update))
        if seconds < self.incumbent.cutoff:
            firsts = [0, *edges.tolist()]
            stages = tuple(
                Stage(
                    device=device,
                    devices=devices,
                    chunks=(Chunk(first=start, runs=runs_of(list(option.degrees))),),
                )
                for start, (device, devices, option) in zip(firsts, whole.stages, strict=False)
            )
            plan = _plan(stages, self.schedule, self.m, self.treatment, self.request, self.model)
            self.incumbent.offer(plan, self.model)
