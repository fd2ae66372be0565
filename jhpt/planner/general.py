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

from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.planner.bound import StageTerms, finished, own_seconds
from jhpt.planner.costs import CostModel, Treatment
from jhpt.planner.mixed import Option, Question, options
from jhpt.planner.placement import Place, hop_seconds
from jhpt.planner.ranges import prefix
from jhpt.planner.request import Incumbent, Request
from jhpt.planner.schedule import Array, in_flight, step_seconds

EXACT_STATES = 400
"""Up to so many layers x devices everything is visited; beyond, the limits below hold."""

STAGES, EXPANSIONS, LABELS = 12, 1500, 8
"""Stages that are told apart, prefixes that are opened, assignments of degrees that are kept per layer."""


def search_general(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Improves `incumbent` to the best plan of the space, and its bound."""
    minima = Minima(model)
    _seed(request, model, incumbent)
    for bound, schedule, m, treatment in sorted(_bounded(request, model, minima), key=lambda entry: entry[:3]):
        if bound >= incumbent.cutoff:
            incumbent.leave(bound)
            break
        Search(schedule, m, treatment, request, model, minima, incumbent).run()


def _bounded(request: Request, model: CostModel, minima: "Minima") -> Iterator[tuple[float, Schedule, int, Treatment]]:
    """Bounds without cuts: K devices cannot do the work faster than if all were as busy as the best-used one."""
    schedules: tuple[Schedule, ...] = tuple(s for s in request.schedules if s != "interleaved") or ("1f1b",)
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        treatment = Treatment(request.batch // m, zero, recompute)
        work = minima.device_seconds(treatment)
        for schedule in schedules:
            yield m * float(work.sum()) / model.cluster.num_devices, schedule, m, treatment


def _seed(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """A first plan: everything data parallel in one stage, so that the search has something to beat."""
    n, k = model.num_layers, model.cluster.num_devices
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        for s in sorted({min(s, n, k) for s in (1, 2, 4, 8)}):
            edges = [n * i // s for i in range(s + 1)]
            stages = tuple(
                Stage(device=i * (k // s), devices=k // s, chunks=(Chunk(first=a, runs=runs_of([1] * (b - a))),))
                for i, (a, b) in enumerate(itertools.pairwise(edges))
            )
            incumbent.offer(
                _plan(stages, "1f1b", m, Treatment(request.batch // m, zero, recompute), request, model), model
            )


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
class Least:
    """Prefix sums [N + 1] of the least that a layer can cost at a place, quantity by quantity."""

    forward: Array
    backward: Array
    both: Array
    until_reduced: Array
    """(M-1) (forward + backward) + forward + gradients + update: all of a device's work but the last backward."""
    update: Array
    state: Array
    activations: Array
    working: Array
    """[N], not summed."""


class Minima:
    """`Least` of every place, computed once."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._cache: dict[tuple[Place, Treatment, int], Least] = {}

    def at(self, place: Place, treatment: Treatment, m: int) -> Least:
        """Least costs at `place`."""
        key = (place, treatment, m)
        if key not in self._cache:
            tables = [self.model.layer_costs(place, t, treatment) for t in self.model.degrees(place.devices)]
            f = np.array([c.forward + c.forward_tensor for c in tables])
            b = np.array([c.backward + c.backward_tensor for c in tables])
            once = np.array([c.gradients + c.update for c in tables])
            self._cache[key] = Least(
                forward=prefix(f.min(axis=0)),
                backward=prefix(b.min(axis=0)),
                both=prefix((f + b).min(axis=0)),
                until_reduced=prefix((m * f + (m - 1) * b + once).min(axis=0)),
                update=prefix(np.array([c.update for c in tables]).min(axis=0)),
                state=prefix(np.array([c.state for c in tables]).min(axis=0)),
                activations=prefix(np.array([c.activations for c in tables]).min(axis=0)),
                working=np.array([c.working for c in tables]).min(axis=0),
            )
        return self._cache[key]

    def device_seconds(self, treatment: Treatment) -> Array:
        """[N] least k x seconds of a layer on any number k of devices."""
        model, total = self.model, self.model.cluster.num_devices
        least = np.full(model.num_layers, np.inf)
        kinds = range(total) if model.cluster.mixed else range(min(total, model.places.per_node))
        for devices in range(1, total + 1):
            for place in {model.places.at(o, devices) for o in kinds if o + devices <= total}:
                for t in model.degrees(devices):
                    costs = model.layer_costs(place, t, treatment)
                    busy = costs.forward + costs.forward_tensor + costs.backward + costs.backward_tensor
                    least = np.minimum(least, devices * busy)
        return least


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


@dataclass(frozen=True)
class Prefix:
    """Stages that are fixed.  head, tail: seconds forward and back through them, without the hop that follows."""

    stages: tuple[tuple[int, int, Option], ...]
    """(first device, devices, option) of each."""
    stop: int
    device: int
    head: float
    tail: float


class Search:
    """One schedule, number of micro-batches and treatment."""

    def __init__(
        self,
        schedule: Schedule,
        m: int,
        treatment: Treatment,
        request: Request,
        model: CostModel,
        minima: Minima,
        incumbent: Incumbent,
    ) -> None:
        self.schedule, self.m, self.treatment, self.request = schedule, m, treatment, request
        self.model, self.minima, self.incumbent = model, minima, incumbent
        self.n, self.k = model.num_layers, model.cluster.num_devices
        self.exact = self.n * self.k <= EXACT_STATES
        self.most = min(self.n, self.k, request.max_stages)
        self.told = self.most if self.exact else min(self.most, STAGES)
        self.work = minima.device_seconds(treatment)
        self._options: dict[tuple[Place, int, int, int], list[Option]] = {}
        self.choices: list[Choices] = []

    def run(self) -> None:
        """Bounds of all suffixes, then best-first over prefixes."""
        self._tables()
        heap: list[tuple[float, int, int, int, Prefix, tuple[int, int] | None]] = []
        count = itertools.count()
        start = Prefix((), 0, 0, 0.0, 0.0)
        for s in range(1, self.told + 1):
            bound = float(max(self.back[s, 0, 0], self.done[s, 0, 0]))
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
        suffix = self.m * (self.work.sum() - prefix(self.work))
        before = self.m * prefix(self.work)
        for offset in reversed(range(self.k)):
            choices = self._stage_choices(offset, before, suffix)
            self.choices.append(choices)
            if len(choices.i):
                for p in range(1, self.told + 1):
                    self._fill(p, offset, choices)
        self.choices.reverse()

    def _stage_choices(self, offset: int, before: Array, suffix: Array) -> Choices:
        limit = self.incumbent.seconds * (1 + 1e-9)
        starts = np.flatnonzero(before <= limit * offset) if offset else np.array([0])
        starts = starts[starts < self.n]
        parts = [
            self._with_devices(offset, devices, starts, suffix, limit) for devices in range(1, self.k - offset + 1)
        ]
        joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return Choices(*(a[order] for a in joined))

    def _with_devices(
        self, offset: int, devices: int, starts: npt.NDArray[np.int64], suffix: Array, limit: float
    ) -> tuple[npt.NDArray[np.generic], ...]:
        """All stages of `devices` at `offset` that leave the rest a chance."""
        place = self.model.places.at(offset, devices)
        least = self.minima.at(place, self.treatment, self.m)
        rest = self.k - offset - devices
        low = int(np.searchsorted(-suffix, -limit * rest)) if rest else self.n
        high = np.searchsorted(least.both, least.both[starts] + limit / self.m, side="right") - 1
        first = np.maximum(starts + 1, low)
        counts = np.maximum(0, np.minimum(high, self.n) - first + 1)
        i = np.repeat(starts, counts)
        stop = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        local = -(-self.treatment.micro_batch // devices)
        hop = np.array([self._least_hop(offset, devices, size * local) for size in self.model.boundary])
        hop[-1] = 0.0
        working = np.maximum(least.working[i], least.working[stop - 1])
        return (
            i,
            stop,
            np.full(len(i), devices),
            *(
                table[stop] - table[i]
                for table in (least.forward, least.backward, least.both, least.until_reduced, least.update)
            ),
            hop[stop - 1],
            least.state[stop] - least.state[i] + working,
            least.activations[stop] - least.activations[i],
            np.full(len(i), place.memory),
        )

    def _least_hop(self, offset: int, devices: int, size: float) -> float:
        """A bound of the hop to a next stage that is not known yet: one sender, the better link."""
        last = offset + devices - 1
        seconds = hop_seconds((self.model.cluster.network, 1), size)
        if last + 1 < self.k and self.model.places.same_node(offset, last + 2):
            node = self.model.places.nodes[self.model.places.node_of[offset]]
            seconds = min(seconds, hop_seconds((node.inside, 1), size))
        return seconds

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
        end = np.maximum(finished(terms, own), c.until_reduced)
        both = np.where(fits, c.both, np.inf) + 2 * hop
        return both + trip, np.maximum(own, both + back), np.maximum(end, forward + hop + done)

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
        c = Choices(*(getattr(c, name)[low:high] for name in Choices.__dataclass_fields__))
        trip, back, done = self._bounds(p, fixed.device, c)
        del trip
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
        for option in self._stage_options(place, fixed.stop, stop, window, piped=s > 1):
            hop = self._exact_hop(fixed, first, devices, option)
            head, tail = fixed.head + hop, fixed.tail + hop
            grown = Prefix(
                (*fixed.stages, (first, devices, option)),
                stop,
                first + devices,
                head + option.forward,
                tail + option.backward,
            )
            if p == 1:
                self._price(grown)
                continue
            on = self._pending_hop(grown)
            terms = StageTerms(*(np.array(x) for x in (option.forward, option.backward, option.sync, option.update)))
            own = own_seconds(terms, np.array(on), self.trip[to], window, self.m)
            child = max(
                bound,
                head + float(own) + tail,
                head + float(finished(terms, own)),
                grown.head + on + grown.tail + on + float(self.back[to]),
                grown.head + on + float(self.done[to]),
            )
            if child < self.incumbent.cutoff:
                yield child, grown, None

    def _exact_hop(self, fixed: Prefix, first: int, devices: int, option: Option) -> float:
        if not fixed.stages:
            return 0.0
        before, others, last = fixed.stages[-1]
        sides = ((others, others // last.degrees[-1]), (devices, devices // option.degrees[0]))
        return self.model.cut_seconds(fixed.stop - 1, before, sides, self.treatment.micro_batch)

    def _stage_options(self, place: Place, first: int, stop: int, window: int, *, piped: bool) -> list[Option]:
        key = (place, first, stop, window)
        if key not in self._options:
            question = Question(place, self.treatment, first, stop, window, self.m, even=False, piped=piped)
            self._options[key], complete = options(question, self.model, cap=1 << 20 if self.exact else LABELS)
            if not complete:
                self.truncated = True
        return self._options[key]

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
                    a[0],
                    ((a[1], a[1] // a[2].degrees[-1]), (b[1], b[1] // b[2].degrees[0])),
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
