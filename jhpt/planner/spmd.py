"""The best plan that one SPMD program can run.

Decision set of space="spmd":

    micro-batches   every divisor M of the batch
    grid            S stages x d data x t tensor devices with S d t <= K (what is left over stays idle); d divides the
                    micro-batch; t one degree for all layers, since equal positions of all stages share one sharding.
                    With S = 1 every layer chooses its own degree among the divisors of the d t devices
    cuts            any S contiguous non-empty ranges of layers
    schedule        1f1b, gpipe; interleaved with v in 2, 3, 4 chunks per device, M divisible by S, whose S v ranges are
                    the balanced ones (`balanced`)
    ZeRO            0, 1 or 3 where d > 1
    recompute       off or on

gpipe is faster than 1f1b on the same stages only where a late stage has gradients to reduce that outlast the pipeline's
drain (tested), and it never needs less memory.

Grids are visited in the order of a bound that needs no cuts; for each the dynamic programme of `bound` gives a better
one, and best-first search over prefixes, guided by it, finds the cuts.  Where nothing below the best plan is left
unvisited the plan is optimal, which is the rule; else the least unvisited bound is reported with it.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Chunk, Plan, Run, Schedule, Stage, Zero, runs_of
from jhpt.planner.bound import StageTerms, after, own_gpipe_seconds, own_seconds
from jhpt.planner.costs import CostModel, Treatment
from jhpt.planner.mixed import Question, options
from jhpt.planner.placement import hop_seconds
from jhpt.planner.ranges import Ranges, prefix, ranges
from jhpt.planner.request import Incumbent, Request
from jhpt.planner.schedule import Array, in_flight, step_seconds

CHUNKS = (2, 3, 4)
"""Chunks per device that interleaving tries."""

LABELS, EXACT_LAYERS = 48, 24
"""Partial assignments of degrees that are kept per layer where a model has more layers than `EXACT_LAYERS`."""

EXPANSIONS = 300
"""Prefixes that the search for the cuts of one grid may open; only large models with uneven layers need as many."""


@dataclass(frozen=True)
class Grid:
    """Everything but the cuts."""

    stages: int
    data: int
    tensor: int
    micro_batches: int
    zero: Zero
    recompute: bool
    schedule: Schedule
    chunks: int = 1

    @property
    def per_stage(self) -> int:
        """Devices of a stage."""
        return self.data * self.tensor

    @property
    def devices(self) -> int:
        """Devices that work."""
        return self.stages * self.per_stage


def search_spmd(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Improves `incumbent` to the best plan of the space, and its bound."""
    grids = sorted(_bounded_grids(request, model), key=lambda pair: pair[0])
    for bound, grid in grids:
        if bound >= incumbent.cutoff:
            incumbent.leave(bound)
            break
        if grid.chunks > 1:
            _try_interleaved(grid, request, model, incumbent)
        elif grid.stages == 1:
            _try_single(grid, request, model, incumbent)
        else:
            _CutSearch(grid, request, model, incumbent).run()
    for bound, devices, m, treatment in sorted(_mixed_stages(request, model), key=lambda mixed: mixed[:3]):
        if bound >= incumbent.cutoff:
            break
        _try_mixed(bound, devices, m, treatment, request, model, incumbent)


def _treatments(request: Request, micro_batches: int) -> Iterator[Treatment]:
    for zero, recompute in itertools.product(request.zero, request.recompute):
        yield Treatment(request.batch // micro_batches, zero, recompute)


def _bounded_grids(request: Request, model: CostModel) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time, whatever its cuts."""
    if model.cluster.mixed:
        return
    available = model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in (d for d in range(1, min(b, available // tensor) + 1) if b % d == 0):
                for treatment in _treatments(request, m):
                    if treatment.zero and data == 1 and 0 in request.zero:
                        continue
                    yield from _stage_counts(request, model, m, data, tensor, treatment)


def _stage_counts(
    request: Request, model: CostModel, m: int, data: int, tensor: int, treatment: Treatment
) -> Iterator[tuple[float, Grid]]:
    """Bounds for S = 1, 2, ...: the stages cannot all be faster than the work allows.

    With t_s the time of stage s per micro-batch and W their sum, T >= max over s of (t_0 + .. + t_{s-1} + M t_s), which
    is least where all terms are equal: t_s = (M-1)/M t_{s-1}, T = M W / sum of ((M-1)/M)^s.  And the largest of the
    stages' finishing times is at least their mean.  Memory: the mean over the stages must fit, too.
    """
    place, size = model.places.at(0, data * tensor), data * tensor
    offsets = range(0, model.cluster.num_devices - size + 1, size)
    tables = [model.layer_costs(p, tensor, treatment) for p in {model.places.at(o, size) for o in offsets}]
    forwards = np.array([c.forward + c.forward_tensor for c in tables])
    backwards = np.array([c.backward + c.backward_tensor for c in tables])
    if not np.isfinite(forwards).all():
        return
    work = float((forwards + backwards).min(axis=0).sum())
    once = float((np.array([c.gradients + c.update for c in tables]) - backwards + 0.0).min(axis=0).sum())
    costs = tables[0]
    state, activations = float(costs.state.sum()), float(costs.activations.sum())
    ratio = (m - 1) / m
    most = min(model.num_layers, model.cluster.num_devices // (data * tensor), request.max_stages)
    for s in range(1, most + 1):
        ramp = sum(ratio**i for i in range(s))
        schedules: list[tuple[Schedule, int, float]] = []
        if s == 1:
            schedules = [("1f1b", 1, m * work)]
        else:
            schedules += [(name, 1, m * work / ramp) for name in ("1f1b", "gpipe") if name in request.schedules]
            if "interleaved" in request.schedules and m % s == 0:
                schedules += [("interleaved", v, m * work / s) for v in CHUNKS if s * v <= model.num_layers]
        for name, v, bound in schedules:
            kept = in_flight(name, s, 0, v, m)
            if state + kept * activations / v > s * place.memory:
                continue
            grid = Grid(s, data, tensor, m, treatment.zero, treatment.recompute, name, v)
            yield max(bound, (m * work + once) / s), grid


def _plan(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> Plan:
    """`cuts`: the first layer of every chunk after the first, in order."""
    edges = (0, *cuts, model.num_layers)
    chunks = [
        Chunk(first=first, runs=(Run(layers=stop - first, tensor=grid.tensor),))
        for first, stop in itertools.pairwise(edges)
    ]
    stages = tuple(
        Stage(device=s * grid.per_stage, devices=grid.per_stage, chunks=tuple(chunks[s :: grid.stages]))
        for s in range(grid.stages)
    )
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space="spmd",
        batch=request.batch,
        micro_batches=grid.micro_batches,
        schedule=grid.schedule,
        zero=grid.zero,
        recompute=grid.recompute,
        stages=stages,
    )


def _treatment(grid: Grid, request: Request) -> Treatment:
    return Treatment(request.batch // grid.micro_batches, grid.zero, grid.recompute)


def _try_single(grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
    incumbent.offer(_plan(grid, (), request, model), model)


def _try_interleaved(grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
    place = model.places.at(0, grid.per_stage)
    costs = model.layer_costs(place, grid.tensor, _treatment(grid, request))
    work = costs.forward + costs.forward_tensor + costs.backward + costs.backward_tensor
    incumbent.offer(_plan(grid, balanced(work, grid.stages * grid.chunks), request, model), model)


def balanced(work: Array, parts: int) -> tuple[int, ...]:
    """First layers of parts 2, 3, ... of the contiguous partition whose largest part is smallest.

    Among several: every part, from the first, takes as many layers as stay below that largest part and leave one for
    each part to come.
    """
    n, total = len(work), prefix(work)
    least = total[1:].copy()  # least[j]: smallest largest part of layers 0..j
    for part in range(1, parts):
        best = np.full(n, np.inf)
        for j in range(part, n):
            best[j] = np.min(np.maximum(least[part - 1 : j], total[j + 1] - total[part : j + 1]))
        least = best
    limit, cuts, start = least[-1] * (1 + 1e-12), [], 0
    for left in range(parts - 1, 0, -1):
        stop = int(np.searchsorted(total, total[start] + limit, side="right")) - 1
        start = max(start + 1, min(stop, n - left))
        cuts.append(start)
    return tuple(cuts)


def _mixed_stages(request: Request, model: CostModel) -> Iterator[tuple[float, int, int, Treatment]]:
    """One stage whose layers choose their own degree, with a bound: every layer takes what is best for itself."""
    if model.cluster.mixed:
        return
    for devices in range(2, model.cluster.num_devices + 1):
        degrees = model.degrees(devices)
        for m in request.micro_batches:
            b = request.batch // m
            even = [t for t in degrees if b % (devices // t) == 0]
            if len(even) < 2:
                continue
            for treatment in _treatments(request, m):
                place = model.places.at(0, devices)
                tables = [model.layer_costs(place, t, treatment) for t in even]
                forward = np.array([c.forward + c.forward_tensor for c in tables])
                backward = np.array([c.backward + c.backward_tensor for c in tables])
                once = np.array([c.gradients + c.update for c in tables])
                busy = (m * (forward + backward)).min(axis=0).sum()
                reduced = (m * forward + (m - 1) * backward + once).min(axis=0).sum()
                kept = np.array([c.state + c.activations for c in tables]).min(axis=0).sum()
                if kept <= place.memory:
                    yield max(float(busy), float(reduced)), devices, m, treatment


def _try_mixed(
    bound: float, devices: int, m: int, treatment: Treatment, request: Request, model: CostModel, incumbent: Incumbent
) -> None:
    place = model.places.at(0, devices)
    question = Question(place, treatment, 0, model.num_layers, 1, m, even=True, piped=False)
    cap = LABELS if model.num_layers > EXACT_LAYERS else 1 << 20
    found, missing = options(question, model, cap, incumbent.cutoff)
    incumbent.leave(max(bound, missing))
    for option in found:
        seconds = m * (option.forward + option.backward) - option.backward + option.sync + option.update
        if seconds < incumbent.cutoff:
            chunk = Chunk(first=0, runs=runs_of(list(option.degrees)))
            grid = Grid(1, 1, devices, m, treatment.zero, treatment.recompute, "1f1b")
            plan = _plan(grid, (), request, model)
            incumbent.offer(
                plan.model_copy(update={"stages": (Stage(device=0, devices=devices, chunks=(chunk,)),)}), model
            )


class _CutSearch:
    """Best cuts of one grid with several stages and one chunk each."""

    def __init__(self, grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
        self.grid, self.request, self.model, self.incumbent = grid, request, model, incumbent
        self.n, self.s, self.m = model.num_layers, grid.stages, grid.micro_batches
        treatment = _treatment(grid, request)
        slots = in_flight(grid.schedule, self.s, 0, 1, self.m)
        tables: dict[int, Ranges] = {}
        self.stage: list[Ranges] = []
        self.cut = np.zeros(
            (self.s, self.n + 1)
        )  # [s, stop]: seconds from stage s to the next when it ends before stop
        for s in range(self.s):
            first = s * grid.per_stage
            kind = model.places.offset_class(first)
            if kind not in tables:
                place = model.places.at(first, grid.per_stage)
                costs = model.layer_costs(place, grid.tensor, treatment)
                found = ranges(costs, model, treatment.micro_batch // grid.data, piped=True)
                fits = found.bytes(slots) <= place.memory
                tables[kind] = replace(found, forward=np.where(fits, found.forward, np.inf))
            self.stage.append(tables[kind])
            if s + 1 < self.s:
                hop = model.places.hop(first, grid.per_stage, first + grid.per_stage, grid.per_stage)
                local = treatment.micro_batch // grid.data
                self.cut[s, 1:-1] = [hop_seconds(hop, size * local) for size in model.boundary[:-1]]
        self.window = [in_flight(grid.schedule, self.s, s, 1, self.m) for s in range(self.s)]
        self._tables()

    def _choices(self, s: int) -> tuple[StageTerms, Array, slice]:
        """Terms [i, stop] of stage s, stops that leave one layer for each later stage, and the hops."""
        stops = slice(s + 1, self.n - (self.s - 1 - s) + 1) if s + 1 < self.s else slice(self.n, self.n + 1)
        columns = slice(stops.start - 1, stops.stop - 1)
        table = self.stage[s]
        terms = StageTerms(*(a[:, columns] for a in (table.forward, table.backward, table.sync, table.update)))
        return terms, self.cut[s, stops], stops

    def _tables(self) -> None:
        """V, Z, D [S + 1, N + 1] of the suffix that stages s.. hold when it starts at layer i."""
        shape = (self.s + 1, self.n + 1)
        self.back, self.done, self.trip = (np.full(shape, np.inf) for _ in range(3))
        self.back[-1, -1] = self.done[-1, -1] = self.trip[-1, -1] = 0.0
        started = np.arange(self.n)[:, None]
        for s in reversed(range(self.s)):
            terms, hop, stops = self._choices(s)
            # inf where the range is empty: i must be below stop
            forward = np.where(started < np.arange(stops.start, stops.stop)[None, :], terms.forward, np.inf)
            terms = replace(terms, forward=forward)
            both = forward + terms.backward + 2 * hop
            back = np.maximum(self._own(s, terms, hop, stops), both + self.back[s + 1, stops])
            done = np.maximum(back + after(terms), forward + hop + self.done[s + 1, stops])
            self.trip[s, :-1] = (both + self.trip[s + 1, stops]).min(axis=1)
            self.back[s, :-1], self.done[s, :-1] = back.min(axis=1), done.min(axis=1)

    def _own(self, s: int, terms: StageTerms, hop: Array, stops: slice | npt.NDArray[np.int64]) -> Array:
        beyond = self.trip[s + 1, stops]
        own = own_seconds(terms, hop, beyond, self.window[s], self.m)
        if self.grid.schedule == "gpipe":
            own = np.maximum(own, own_gpipe_seconds(terms, hop, beyond, self.m))
        return own

    def run(self) -> None:
        """Best-first over prefixes of stages; exact when it ends before `EXPANSIONS`."""
        bound = float(max(self.back[0, 0], self.done[0, 0]))
        heap: list[tuple[float, int, tuple[int, ...], float, float]] = [(bound, 0, (), 0.0, 0.0)]
        for _ in range(EXPANSIONS):
            if not heap or heap[0][0] >= self.incumbent.cutoff:
                break
            bound, _, cuts, head, tail = heapq.heappop(heap)
            if len(cuts) == self.s - 2:
                self._leaves(cuts)
                continue
            for child in self._children(bound, cuts, head, tail):
                heapq.heappush(heap, child)
        if heap:
            self.incumbent.leave(heap[0][0])

    def _children(
        self, bound: float, cuts: tuple[int, ...], head: float, tail: float
    ) -> Iterator[tuple[float, int, tuple[int, ...], float, float]]:
        s, i = len(cuts), cuts[-1] if cuts else 0
        terms, hop, stops = self._choices(s)
        keep = np.arange(stops.start, stops.stop) > i
        row = StageTerms(*(a[i][keep] for a in (terms.forward, terms.backward, terms.sync, terms.update)))
        hop, stop = hop[keep], np.arange(stops.start, stops.stop)[keep]
        back = np.maximum(tail, after(row))
        heads, tails = head + row.forward + hop, back + row.backward + hop
        bounds = np.maximum.reduce(
            [
                np.full(len(stop), bound),
                head + self._own(s, row, hop, stop) + back,
                heads + tails + self.back[s + 1, stop],
                heads + self.done[s + 1, stop],
            ]
        )
        for at in np.flatnonzero(bounds < self.incumbent.cutoff):
            yield float(bounds[at]), -s, (*cuts, int(stop[at])), float(heads[at]), float(tails[at])

    def _leaves(self, cuts: tuple[int, ...]) -> None:
        """All ways to place the last cut, priced exactly and together."""
        start = cuts[-1] if cuts else 0
        lasts = np.arange(start + 1, self.n)
        edges = np.array([(0, *cuts, int(last), self.n) for last in lasts]).reshape(len(lasts), self.s + 1)
        at, stop = edges[:, :-1], edges[:, 1:] - 1
        pick = [
            np.stack([getattr(self.stage[s], name)[at[:, s], stop[:, s]] for s in range(self.s)], axis=1)
            for name in ("forward", "backward", "sync", "update")
        ]
        fits = np.isfinite(pick[0]).all(axis=1)
        if not fits.any():
            return
        forward, backward, sync, update = (a[fits] for a in pick)
        cut = np.stack([self.cut[s, edges[fits, s + 1]] for s in range(self.s - 1)], axis=1)
        times = forward[..., None], backward[..., None], cut, sync, update
        seconds = step_seconds(self.grid.schedule, self.m, *times, overlap=self.model.cluster.overlap)
        best = int(np.argmin(seconds))
        if seconds[best] < self.incumbent.cutoff:
            chosen = tuple(int(c) for c in edges[fits][best, 1:-1])
            self.incumbent.offer(_plan(self.grid, chosen, self.request, self.model), self.model)
