"""The best plan that one SPMD program can run.

Decision set of space="spmd":

    micro-batches   every divisor M of the batch
    grid            S stages x d data x t tensor devices with S d t <= K (what is left over stays idle); d divides the
                    micro-batch; t one degree for all layers, since equal positions of all stages share one sharding.
                    With S = 1 every layer chooses its own degree among the divisors of the d t devices, of which those
                    in use divide each other, for they share a mesh; two layers that share a parameter have the same
    cuts            any S contiguous non-empty ranges of layers
    schedule        1f1b, gpipe; interleaved with v in 2, 3, 4 chunks per device, M divisible by S, whose S v ranges are
                    the balanced ones (`balanced`)
    ZeRO            0, 1 or 3 where d > 1, else 0 or 3, which then has no copy of the weights to compute with
    recompute       off or on
    compression     one of those asked for, where a tensor degree is above 1

Looked up, not decided: every layer cuts its samples into as many chunks as are best for it in a row of all layers at
its degree, and all layers of a pipeline into as many as are best for them together (`costs.sample_chunks`).

What layers cost is in the head of `program`.  gpipe is faster than 1f1b on the same stages only where a late stage has
gradients to reduce that outlast the pipeline's drain (tested), and it never needs less memory.

Grids are visited in the order of a bound that needs no cuts; for each the dynamic programme of `bound` gives a better
one, and best-first search over prefixes, guided by it, finds the cuts.  Where nothing below the best plan is left
unvisited the plan is optimal, which is the rule; else the least unvisited bound is reported with it.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jhpt.core.config import Compression
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, Zero, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.communication import Place, transfer_seconds
from jhpt.planner.cost.layers import LayerStrategy, Space, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array, step_seconds
from jhpt.planner.search.bounds import (
    StageTerms,
    after,
    in_line_seconds,
    own_gpipe_seconds,
    own_seconds,
    pair_in_line_seconds,
)
from jhpt.planner.search.layer_degrees import Question, chains, costs_at, options
from jhpt.planner.search.ranges import Ranges, prefix, ranges
from jhpt.planner.search.request import Incumbent, Request

CHUNKS = (2, 3, 4)
"""Chunks per device that interleaving tries."""

LABELS, EXACT_LAYERS = 48, 24
"""Partial assignments of degrees that are kept per layer where a model has more layers than `EXACT_LAYERS`."""

SLACK = 1e-9
"""Relative; sums of the same numbers in other orders."""

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
    space: Space = "spmd"
    compression: Compression | None = None
    sample_chunks: tuple[int, ...] = (1,)
    """To choose from."""

    @property
    def per_stage(self) -> int:
        """Devices of a stage."""
        return self.data * self.tensor

    @property
    def devices(self) -> int:
        """Devices that work."""
        return self.stages * self.per_stage

    def strategy(self, batch: int) -> LayerStrategy:
        """What all layers share."""
        strategy = layer_strategy(
            self.space,
            self.stages,
            batch,
            self.micro_batches,
            self.zero,
            self.recompute,
            compression=self.compression,
        )
        return replace(strategy, sample_chunks=self.sample_chunks)


def search_spmd(request: Request, model: CostModel, incumbent: Incumbent, space: Space = "spmd") -> None:
    """Improves `incumbent` to the best plan of the space, and its bound.

    Args:
      space: "general": of the same plans, run by programs of the stages' own.
    """
    if space == "general":
        request = replace(request, sample_chunks=(1,), compression=(None,))
    grids = sorted(_bounded_grids(request, model, space), key=lambda pair: pair[0])
    for bound, grid in grids:
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            break
        if grid.chunks > 1:
            _try_interleaved(grid, request, model, incumbent)
        elif grid.stages == 1:
            _try_single(grid, request, model, incumbent)
        else:
            _CutSearch(grid, request, model, incumbent).run()
    stages = _mixed_stages(request, model, space, incumbent.cutoff)
    for bound, question in sorted(stages, key=lambda pair: pair[0]):
        if bound >= incumbent.cutoff:
            break
        _try_mixed(bound, question, space, request, model, incumbent)


def _bounded_grids(request: Request, model: CostModel, space: Space) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time, whatever its cuts."""
    if model.cluster.mixed:
        return
    available = model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in (d for d in range(1, min(b, available // tensor) + 1) if b % d == 0):
                levels = model.levels(request.zero, data, space)
                for zero, recompute in itertools.product(levels, request.recompute):
                    # A single rank sums nothing.
                    for how in request.compression if tensor > 1 else (None,):
                        cuts = request.sample_chunks if tensor > 1 else (1,)
                        grid = Grid(1, data, tensor, m, zero, recompute, "1f1b", 1, space, how, cuts)
                        yield from _single(grid, request, model)
                        yield from _pipelines(replace(grid, stages=2), request, model)


@dataclass(frozen=True)
class _Work:
    """Least seconds of all layers: of a micro-batch in both passes, and once a step beside M of these; least bytes."""

    passes: float
    once: float
    state: float
    activations: float


def _work(places: Sequence[Place], tensor: int, strategy: LayerStrategy, model: CostModel) -> _Work:
    tables = [model.layer_costs(place, tensor, strategy) for place in places]
    backwards = np.array([c.backward + c.backward_tensor for c in tables])
    passes = np.array([c.forward + c.forward_tensor for c in tables]) + backwards
    updates = np.array([c.update for c in tables])
    reduced = np.array([c.gradients for c in tables]) + updates - backwards
    return _Work(
        passes=float(passes.min(axis=0).sum()),
        once=max(float(quantity.min(axis=0).sum()) for quantity in (updates, reduced)),
        state=float(tables[0].state.sum()),
        activations=float(tables[0].activations.sum()),
    )


def _single(grid: Grid, request: Request, model: CostModel) -> Iterator[tuple[float, Grid]]:
    """One stage."""
    place = model.places.at(0, grid.per_stage)
    work = _work([place], grid.tensor, grid.strategy(request.batch), model)
    if work.state + work.activations <= place.memory * (1 + SLACK):
        yield grid.micro_batches * work.passes + work.once, grid


def _pipelines(grid: Grid, request: Request, model: CostModel) -> Iterator[tuple[float, Grid]]:
    """Bounds for S = 2, 3, ...: the stages cannot all be faster than the work allows.

    With t_s the time of stage s per micro-batch and W their sum, T >= max over s of (t_0 + .. + t_{s-1} + M t_s), which
    is least where all terms are equal: t_s = (M-1)/M t_{s-1}, T = M W / sum of ((M-1)/M)^s; and then the first stage
    has its slot to update.  And the largest of the stages' finishing times is at least their mean.  Memory: the mean
    over the stages must fit, too.
    """
    size, m, available = grid.per_stage, grid.micro_batches, model.cluster.num_devices
    most = min(model.num_layers, available // size, request.max_stages)
    if most < 2:
        return
    strategy = grid.strategy(request.batch)
    period = math.lcm(model.places.per_node, size)
    places = [model.places.at(offset, size) for offset in range(0, min(period, available - size + 1), size)]
    work = _work(places, grid.tensor, strategy, model)
    slots = [model.slot(place, grid.tensor, strategy) for place in places]
    each, used = (min(slot.seconds(used=used) for slot in slots) for used in (False, True))
    memory, ratio, ramp = places[0].memory * (1 + SLACK), (m - 1) / m, 1.0
    for s in range(2, most + 1):
        ramp += ratio ** (s - 1)
        mean = (m * work.passes + work.once + (s - 2) * each + 2 * used) / s
        found: list[tuple[Schedule, int, float]] = []
        found += [(name, 1, m * work.passes / ramp + used) for name in ("1f1b", "gpipe") if name in request.schedules]
        if "interleaved" in request.schedules and m % s == 0:
            found += [("interleaved", v, mean) for v in CHUNKS if s * v <= model.num_layers]
        for name, v, bound in found:
            saved = in_flight(name, s, 0, v, m) * (work.activations / v + s * slots[0].output)
            if work.state + s * slots[0].state + saved <= s * memory:
                shape = s, grid.data, grid.tensor, m, grid.zero, grid.recompute
                yield max(bound, mean), Grid(*shape, name, v, grid.space, grid.compression, grid.sample_chunks)


def _plan(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> Plan:
    """`cuts`: the first layer of every chunk after the first, in order."""
    edges = (0, *cuts, model.num_layers)
    degrees = (grid.tensor,) * model.num_layers
    samples = model.sample_chunks(grid.per_stage, grid.tensor, grid.strategy(request.batch))
    chunks = [
        Chunk(first=first, runs=runs_of(degrees[first:stop], samples[first:stop]))
        for first, stop in itertools.pairwise(edges)
    ]
    stages = tuple(
        Stage(device=s * grid.per_stage, devices=grid.per_stage, chunks=tuple(chunks[s :: grid.stages]))
        for s in range(grid.stages)
    )
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space=grid.space,
        batch=request.batch,
        micro_batches=grid.micro_batches,
        schedule=grid.schedule,
        zero=grid.zero,
        recompute=grid.recompute,
        saved=model.saved if grid.recompute else None,
        compression=grid.compression or Compression(),
        stages=stages,
    )


def _try_single(grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
    incumbent.offer(_plan(grid, (), request, model), model)


def _try_interleaved(grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
    place = model.places.at(0, grid.per_stage)
    costs = model.layer_costs(place, grid.tensor, grid.strategy(request.batch))
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


def _mixed_stages(request: Request, model: CostModel, space: Space, limit: float) -> Iterator[tuple[float, Question]]:
    """One stage whose layers choose their own degree, with a bound below `limit`: every layer takes what is best."""
    if model.cluster.mixed:
        return
    for devices in range(2, model.cluster.num_devices + 1):
        divisors = model.degrees(devices)
        for m in request.micro_batches:
            even = [t for t in divisors if request.batch // m % (devices // t) == 0]
            sets = [chain for chain in (chains(even) if space == "spmd" else [tuple(even)]) if len(chain) > 1]
            decided = itertools.product(sets, request.zero, request.recompute, request.compression)
            for degrees, zero, recompute, how in decided:
                strategy = layer_strategy(space, 1, request.batch, m, zero, recompute, compression=how)
                strategy = replace(strategy, sample_chunks=request.sample_chunks)
                place = model.places.at(0, devices)
                question = Question(place, strategy, 0, model.num_layers, 1, m, degrees, piped=False)
                for asked in _of_one_table(question, model, limit):
                    if (bound := _mixed_bound(asked, model)) < limit:
                        yield bound, asked


def _of_one_table(question: Question, model: CostModel, limit: float) -> Iterator[Question]:
    """Where one program has one table: for every degree of the layers that share it, if their best is good enough."""
    if model.tied_layer is None or question.strategy.program == "per_stage":
        yield question
    elif _mixed_bound(question, model) < limit:
        yield from (replace(question, shared=t) for t in question.degrees)


def _mixed_bound(question: Question, model: CostModel) -> float:
    m, tables = question.micro_batches, list(costs_at(question, model).values())
    forward = np.array([c.forward + c.forward_tensor for c in tables])
    backward = np.array([c.backward + c.backward_tensor for c in tables])
    once = np.array([c.gradients + c.update for c in tables])
    busy = (m * (forward + backward)).min(axis=0).sum()
    reduced = (m * forward + (m - 1) * backward + once).min(axis=0).sum()
    saved = np.array([c.state + c.activations for c in tables]).min(axis=0).sum()
    fits = saved <= question.place.memory * (1 + SLACK)
    return max(float(busy), float(reduced)) if fits else math.inf


def _try_mixed(
    bound: float, question: Question, space: Space, request: Request, model: CostModel, incumbent: Incumbent
) -> None:
    m, strategy, devices = question.micro_batches, question.strategy, question.place.devices
    cap = LABELS if model.num_layers > EXACT_LAYERS else 1 << 20
    found, missing = options(question, model, cap, incumbent.cutoff)
    incumbent.note_unexplored_bound(max(bound, missing))
    for option in found:
        seconds = m * (option.forward + option.backward) - option.backward + option.sync + option.update
        if seconds < incumbent.cutoff:
            cut = {t: model.sample_chunks(devices, t, strategy) for t in set(option.degrees)}
            samples = [cut[t][layer] for layer, t in enumerate(option.degrees)]
            if len(samples) > 2:  # the ends are not cut, whatever is written there
                samples[0], samples[-1] = samples[1], samples[-2]
            chunk = Chunk(first=0, runs=runs_of(option.degrees, samples))
            how = strategy.compression if max(option.degrees) > 1 else None
            grid = Grid(1, 1, devices, m, strategy.zero, strategy.recompute, "1f1b", 1, space, how)
            plan = _plan(grid, (), request, model)
            incumbent.offer(
                plan.model_copy(update={"stages": (Stage(device=0, devices=devices, chunks=(chunk,)),)}), model
            )


class _CutSearch:
    """Best cuts of one grid with several stages and one chunk each."""

    def __init__(self, grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
        self.grid, self.request, self.model, self.incumbent = grid, request, model, incumbent
        self.n, self.s, self.m = model.num_layers, grid.stages, grid.micro_batches
        strategy = grid.strategy(request.batch)
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
                costs = model.layer_costs(place, grid.tensor, strategy)
                slot = model.slot(place, grid.tensor, strategy)
                found = ranges(costs, slot, model, strategy.micro_batch // grid.data)
                fits = found.bytes(slots) <= place.memory
                tables[kind] = replace(found, forward=np.where(fits, found.forward, np.inf))
            self.stage.append(tables[kind])
            if s + 1 < self.s:
                transfer = model.places.transfer(first, grid.per_stage, first + grid.per_stage, grid.per_stage)
                local = strategy.micro_batch // grid.data
                self.cut[s, 1:-1] = [transfer_seconds(transfer, size * local) for size in model.boundary[:-1]]
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
            terms, transfer, stops = self._choices(s)
            # inf where the range is empty: i must be below stop
            forward = np.where(started < np.arange(stops.start, stops.stop)[None, :], terms.forward, np.inf)
            terms = replace(terms, forward=forward)
            both = forward + terms.backward + 2 * transfer
            back = np.maximum(self._own(s, terms, transfer, stops), both + self.back[s + 1, stops])
            done = np.maximum(back + after(terms), forward + transfer + self.done[s + 1, stops])
            self.trip[s, :-1] = (both + self.trip[s + 1, stops]).min(axis=1)
            self.back[s, :-1], self.done[s, :-1] = back.min(axis=1), done.min(axis=1)

    def _own(self, s: int, terms: StageTerms, transfer: Array, stops: slice | npt.NDArray[np.int64]) -> Array:
        beyond = self.trip[s + 1, stops]
        own = own_seconds(terms, transfer, beyond, self.window[s], self.m)
        if self.grid.schedule == "gpipe":
            own = np.maximum(own, own_gpipe_seconds(terms, transfer, beyond, self.m))
        if not self.model.cluster.overlap:
            own = np.maximum(own, in_line_seconds(terms, transfer, self.m, self.s - 1 - s))
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
            self.incumbent.note_unexplored_bound(heap[0][0])

    def _children(
        self, bound: float, cuts: tuple[int, ...], head: float, tail: float
    ) -> Iterator[tuple[float, int, tuple[int, ...], float, float]]:
        s, i = len(cuts), cuts[-1] if cuts else 0
        terms, transfer, stops = self._choices(s)
        keep = np.arange(stops.start, stops.stop) > i
        row = StageTerms(*(a[i][keep] for a in (terms.forward, terms.backward, terms.sync, terms.update)))
        transfer, stop = transfer[keep], np.arange(stops.start, stops.stop)[keep]
        back = np.maximum(tail, after(row))
        heads, tails = head + row.forward + transfer, back + row.backward + transfer
        bounds = np.maximum.reduce(
            [
                np.full(len(stop), bound),
                head + self._own(s, row, transfer, stop) + back,
                heads + tails + self.back[s + 1, stop],
                heads + self.done[s + 1, stop],
            ]
        )
        if s and not self.model.cluster.overlap:
            bounds = np.maximum(bounds, self._pair(cuts, row, head, tail))
        for at in np.flatnonzero(bounds < self.incumbent.cutoff):
            yield float(bounds[at]), -s, (*cuts, int(stop[at])), float(heads[at]), float(tails[at])

    def _pair(self, cuts: tuple[int, ...], row: StageTerms, head: float, tail: float) -> Array:
        """Bounds by the stage before the one that follows `cuts`, which exchanges with it in line."""
        s, first, stop = len(cuts) - 1, (0, *cuts)[-2], cuts[-1]
        table, transfer = self.stage[s], self.cut[s, stop]
        before = StageTerms(*(a[first, stop - 1] for a in (table.forward, table.backward, table.sync, table.update)))
        own = pair_in_line_seconds(before, row, transfer, self.m, self.s - 1 - s)
        return head + tail - (before.forward + before.backward + 2 * transfer) + own

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
