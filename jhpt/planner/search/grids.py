"""Plans whose stages have equally many devices: grids of stages x data x tensor devices, and where to cut the layers.

A grid is every decision of an SPMD plan except where the layers are cut into stages.  Every grid has a lower bound that
holds for all cuts.  So the search can visit the most promising grids first and stop as soon as no other grid can be
faster than the best plan.

`CutSearch` finds the cuts of one grid, best-first over prefixes of stages.  The dynamic programme of `stages` gives a
lower bound for every suffix of the layers.  A prefix of fixed stages and the bound of the suffix that follows give a
lower bound of the whole step.  The search always extends the prefix with the least bound, and it prices the last cut of
a prefix exactly for all layers at once.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from jhpt.core.config import Compression
from jhpt.core.divisors import divisors
from jhpt.core.plan import ONE_CHUNK, Chunk, Plan, Schedule, Stage, Zero, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.activations import NOTHING
from jhpt.planner.cost.communication import Place, transfer_seconds
from jhpt.planner.cost.layers import LayerStrategy, Space, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array, step_seconds
from jhpt.planner.search.ascending import ascending
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.stages import (
    NEAR,
    SLACK,
    Ranges,
    StageTerms,
    after,
    pair_seconds_in_line,
    prefix_sums,
    ranges,
    round_trip_seconds,
    stage_seconds,
    stage_seconds_gpipe,
    stage_seconds_in_line,
)

CHUNKS = (2, 3, 4)
"""Numbers of chunks per device that interleaved schedules may have."""

TOGETHER = 100
"""About how many complete cuts are priced together."""

EXPANSIONS, FEW_EXPANSIONS = 1000, 300
"""Most prefixes that the search opens for one grid; few if no prefix that is left has a bound below that of other
unvisited plans.  Only large models with uneven layers need as many."""


@dataclass(frozen=True)
class Grid:
    """Every decision of a plan except the cuts."""

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
    """Numbers of sample chunks to choose from."""
    sequence: bool = False

    @property
    def per_stage(self) -> int:
        """Devices of one stage."""
        return self.data * self.tensor

    def strategy(self, batch: int) -> LayerStrategy:
        """The strategy that all layers share."""
        strategy = layer_strategy(
            self.space,
            self.stages,
            batch,
            self.micro_batches,
            self.zero,
            self.recompute,
            self.sequence,
            compression=self.compression,
        )
        return replace(strategy, sample_chunks=self.sample_chunks)


def bounded_grids(request: Request, model: CostModel, space: Space) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time that holds for all cuts, in ascending order of the bounds."""
    return ascending(
        (_least_of_family(grid, request, model), partial(_family, grid, request, model))
        for grid in _single_stages(request, model, space)
    )


def _single_stages(request: Request, model: CostModel, space: Space) -> Iterator[Grid]:
    """Every grid of one stage; with more stages, other schedules and sequence parallelism each stands for a family."""
    available = 0 if model.cluster.mixed else model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in divisors(b, up_to=available // tensor):
                levels = model.levels(request.zero, data, space)
                for zero, recompute in itertools.product(levels, request.recompute):
                    # With one tensor rank there is no all-reduce to compress or to hide.
                    for compression in request.compression if tensor > 1 else (None,):
                        cuts = request.sample_chunks if tensor > 1 else (1,)
                        yield Grid(1, data, tensor, m, zero, recompute, "1f1b", 1, space, compression, cuts)


def _least_of_family(grid: Grid, request: Request, model: CostModel) -> float:
    """A bound for any number of stages: the computation alone, in as many stages as there can be.

    With interleaving, the number of stages divides the number of micro-batches.
    """
    m = grid.micro_batches
    most = min(model.num_layers, model.cluster.num_devices // grid.per_stage, request.max_stages)
    spread = max(1.0, float(_ramps(m, most)[-1]) if most > 1 else 1.0)
    if "interleaved" in request.schedules:
        spread = max(spread, min(most, m))
    work = least_work(request.batch // m // grid.data, grid.tensor, grid.recompute, model)
    return m * work / spread * (1 - SLACK)


def least_work(samples: int, tensor: int, recompute: bool, model: CostModel) -> float:
    """Seconds to compute both passes of all layers for so many samples on a device, without any communication."""
    forward, backward = model.compute_seconds(samples, tensor)
    work = float((forward + backward)[model.index].sum())
    if recompute:  # embedding and head are not recomputed
        again = model.activations.repeated(model.saved or NOTHING)[0]
        work += float((again * forward)[model.index[1:-1]].sum())
    return work * min(model.places.slowdowns)


def _family(grid: Grid, request: Request, model: CostModel) -> Iterator[tuple[float, Grid]]:
    """The grids that differ from this one in stages, schedule and sequence parallelism, by their bounds."""
    single = list(_single(grid, request, model))
    pipelines = [
        replace(grid, stages=2, sequence=sequence)
        for sequence in request.sequences(model, grid.tensor, grid.compression)
    ]
    schedules = _schedules(request)
    tables = [_pipeline_bounds(pipeline, schedules, request, model).ravel() for pipeline in pipelines]
    bounds = np.concatenate([[bound for bound, _ in single], *tables])
    for at in np.argsort(bounds, kind="stable")[: np.count_nonzero(np.isfinite(bounds))].tolist():
        if at < len(single):
            yield single[at]
            continue
        which, entry = divmod(at - len(single), len(tables[0]))
        stages, (schedule, chunks) = 2 + entry // len(schedules), schedules[entry % len(schedules)]
        yield float(bounds[at]), replace(pipelines[which], stages=stages, schedule=schedule, chunks=chunks)


@dataclass(frozen=True)
class _Work:
    """The least costs of all layers together.

    passes: seconds of one micro-batch, forward and backward.  once: further seconds per step.  state, activations:
    bytes.
    """

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
    """The grid with one stage, if it can fit; with sequence parallelism, which makes it slower, only if it has to."""
    place = model.places.at(0, grid.per_stage)
    for sequence in request.sequences(model, grid.tensor, grid.compression):
        tried = replace(grid, sequence=sequence)
        work = _work([place], grid.tensor, tried.strategy(request.batch), model)
        if work.state + work.activations <= place.memory * (1 + SLACK):
            yield grid.micro_batches * work.passes + work.once, tried
            return


def _schedules(request: Request) -> list[tuple[Schedule, int]]:
    """The schedules of pipelines, each with its number of chunks per device."""
    interleaved: list[tuple[Schedule, int]] = [("interleaved", v) for v in CHUNKS if "interleaved" in request.schedules]
    return [*((name, 1) for name in ONE_CHUNK if name in request.schedules), *interleaved]


def _pipeline_bounds(grid: Grid, schedules: list[tuple[Schedule, int]], request: Request, model: CostModel) -> Array:
    """[S - 1, schedules] bounds for S = 2, 3, ... stages; infinite where there is no such grid, or none that fits.

    Let t_s be the seconds of stage s per micro-batch and W their sum.  Then T >= max over s of
    (t_0 + .. + t_{s-1} + M t_s).  This is least if all terms are equal: t_s = (M-1)/M t_{s-1} and
    T = M W / sum of ((M-1)/M)^s; the first stage then still has to update its slot.  A second bound: the largest
    finishing time of the stages is at least their mean.  The mean of the bytes over the stages must fit, too.
    """
    size, m, available = grid.per_stage, grid.micro_batches, model.cluster.num_devices
    most = min(model.num_layers, available // size, request.max_stages)
    if most < 2 or not schedules:
        return np.zeros((0, len(schedules)))
    strategy = grid.strategy(request.batch)
    period = math.lcm(model.places.per_node, size)
    places = [model.places.at(offset, size) for offset in range(0, min(period, available - size + 1), size)]
    work = _work(places, grid.tensor, strategy, model)
    slots = [model.slot(place, grid.tensor, strategy) for place in places]
    each, used = (min(slot.seconds(used=used) for slot in slots) for used in (False, True))
    memory, s = places[0].memory * (1 + SLACK), np.arange(2, most + 1)
    mean = (m * work.passes + work.once + (s - 2) * each + 2 * used) / s
    ramped = np.maximum(m * work.passes / _ramps(m, most) + used, mean)
    columns = []
    for name, v in schedules:
        saved = _most_in_flight(name, v, m, most) * (work.activations / v + s * slots[0].output)
        possible = work.state + s * slots[0].state + saved <= s * memory
        if name == "interleaved":
            possible &= (m % s == 0) & (s * v <= model.num_layers)
        columns.append(np.where(possible, mean if name == "interleaved" else ramped, np.inf))
    return np.stack(columns, axis=1)


@cache
def _ramps(m: int, most: int) -> Array:
    """[S - 1] sum of ((M-1)/M)^s over S = 2, 3, ... stages."""
    return np.array(list(itertools.accumulate(((m - 1) / m) ** s for s in range(most)))[1:])


@cache
def _most_in_flight(schedule: Schedule, chunks: int, m: int, most: int) -> Array:
    """[S - 1] micro-batches in flight on the first of S = 2, 3, ... stages."""
    return np.array([in_flight(schedule, s, 0, chunks, m) for s in range(2, most + 1)])


def grid_plan(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> Plan:
    """The plan of a grid.  cuts: the first layer of every chunk but the first, in order."""
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
        sequence=grid.sequence,
        recompute=grid.recompute,
        saved=model.saved if grid.recompute else None,
        compression=grid.compression or Compression(),
        stages=stages,
    )


def balanced(work: Array, parts: int) -> tuple[int, ...]:
    """First layers of parts 2, 3, ... of the contiguous partition with the smallest largest part.

    Among equal partitions, each part in turn takes as many layers as it can: its sum must not exceed the largest part,
    and at least one layer must remain for each later part.
    """
    n, total = len(work), prefix_sums(work)
    first, last = np.arange(n)[:, None], np.arange(n)[None, :]
    sums = np.where(first < last, total[None, 1:] - total[1:, None], np.inf)  # [i, j] of layers i+1..j
    least = total[1:].copy()  # least[j]: the smallest largest part of layers 0..j
    for _ in range(1, parts):
        least = np.maximum(least[:, None], sums).min(axis=0)
    limit, cuts, start = least[-1] * (1 + 1e-12), [], 0
    for remaining in range(parts - 1, 0, -1):
        stop = int(np.searchsorted(total, total[start] + limit, side="right")) - 1
        start = max(start + 1, min(stop, n - remaining))
        cuts.append(start)
    return tuple(cuts)


class CutSearch:
    """The best cuts of one grid with several stages of one chunk each."""

    def __init__(self, grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
        self.grid, self.request, self.model, self.incumbent = grid, request, model, incumbent
        self.n, self.s, self.m = model.num_layers, grid.stages, grid.micro_batches
        strategy = grid.strategy(request.batch)
        # Samples between layers on a device; with sequence parallelism a share of each.
        local = strategy.micro_batch // grid.data / (grid.tensor if grid.sequence else 1)
        slots = in_flight(grid.schedule, self.s, 0, 1, self.m)
        tables: dict[int, Ranges] = {}
        self.stage: list[Ranges] = []
        # [s, stop]: seconds of the transfer from stage s to the next one if stage s ends before layer `stop`
        self.cut = np.zeros((self.s, self.n + 1))
        for s in range(self.s):
            first = s * grid.per_stage
            kind = model.places.offset_class(first)
            if kind not in tables:
                place = model.places.at(first, grid.per_stage)
                costs = model.layer_costs(place, grid.tensor, strategy)
                slot = model.slot(place, grid.tensor, strategy)
                table = ranges(costs, slot, model, local)
                fits = table.bytes(slots) <= place.memory
                tables[kind] = replace(table, forward=np.where(fits, table.forward, np.inf))
            self.stage.append(tables[kind])
            if s + 1 < self.s:
                transfer = model.places.transfer(first, grid.per_stage, first + grid.per_stage, grid.per_stage)
                self.cut[s, 1:-1] = [transfer_seconds(transfer, size * local) for size in model.boundary[:-1]]
        self.window = [in_flight(grid.schedule, self.s, s, 1, self.m) for s in range(self.s)]
        self._tables()

    def _choices(self, s: int) -> tuple[StageTerms, Array, slice]:
        """(terms [i, stop] of stage s, transfers after it, stops).  At least one layer is left for each later stage."""
        stops = slice(s + 1, self.n - (self.s - 1 - s) + 1) if s + 1 < self.s else slice(self.n, self.n + 1)
        columns = slice(stops.start - 1, stops.stop - 1)
        table = self.stage[s]
        terms = StageTerms(*(a[:, columns] for a in (table.forward, table.backward, table.sync, table.update)))
        return terms, self.cut[s, stops], stops

    def _tables(self) -> None:
        """V, Z and D of `stages`, [S + 1, N + 1]: of stages s, s + 1, ... if stage s starts at layer i.

        near[j]: the round trip through the first j + 1 of them.
        """
        shape = (self.s + 1, self.n + 1)
        self.back, self.done, self.trip, *self.near = (np.full(shape, np.inf) for _ in range(3 + NEAR))
        for table in (self.back, self.done, self.trip, *self.near):
            table[-1, -1] = 0.0
        started = np.arange(self.n)[:, None]
        for s in reversed(range(self.s)):
            terms, transfer, stops = self._choices(s)
            # i must be below stop: an empty range is infinite.
            forward = np.where(started < np.arange(stops.start, stops.stop)[None, :], terms.forward, np.inf)
            terms = replace(terms, forward=forward)
            both = forward + terms.backward + 2 * transfer
            back = np.maximum(self._stage_bound(s, terms, transfer, stops), both + self.back[s + 1, stops])
            done = np.maximum(back + after(terms), forward + transfer + self.done[s + 1, stops])
            self.trip[s, :-1] = (both + self.trip[s + 1, stops]).min(axis=1)
            for table, ahead in zip(self.near, (None, *self.near), strict=False):
                nearest = forward + terms.backward if ahead is None else both + ahead[s + 1, stops]
                table[s, :-1] = nearest.min(axis=1)
            self.back[s, :-1], self.done[s, :-1] = back.min(axis=1), done.min(axis=1)

    def _stage_bound(self, s: int, terms: StageTerms, transfer: Array, stops: slice | npt.NDArray[np.int64]) -> Array:
        """Least seconds from the start of stage s to the end of its last backward pass."""
        beyond = self.trip[s + 1, stops]
        seconds = stage_seconds(terms, transfer, beyond, self.window[s], self.m)
        if self.grid.schedule == "gpipe":
            seconds = np.maximum(seconds, stage_seconds_gpipe(terms, transfer, beyond, self.m))
        else:
            left = self.s - s
            ahead = {j: self.near[j - 1][s + 1, stops] for j in range(1, min(NEAR, left - 1) + 1)}
            seconds = np.maximum(
                seconds, round_trip_seconds(terms, transfer, {**ahead, left - 1: beyond}, self.m, left)
            )
        if not self.model.cluster.overlap:
            seconds = np.maximum(seconds, stage_seconds_in_line(terms, transfer, self.m, self.s - 1 - s))
        return seconds

    def run(self) -> None:
        """Searches best-first over prefixes of stages; exact if it opens fewer than `EXPANSIONS` of them."""
        bound = float(max(self.back[0, 0], self.done[0, 0]))
        heap: list[tuple[float, int, tuple[int, ...], float, float]] = [(bound, 0, (), 0.0, 0.0)]
        whole: list[tuple[int, ...]] = []
        opened = 0
        while heap and heap[0][0] < self.incumbent.cutoff:
            if opened >= (FEW_EXPANSIONS if heap[0][0] >= self.incumbent.unvisited else EXPANSIONS):
                break
            opened += 1
            bound, _, cuts, head, tail = heapq.heappop(heap)
            children = self._children(bound, cuts, head, tail)
            if len(cuts) == self.s - 2:
                whole += [child[2] for child in children]
            else:
                for child in children:
                    heapq.heappush(heap, child)
            if whole and (len(whole) >= TOGETHER or not heap or len(heap[0][2]) < self.s - 2):
                self._leaves(whole)
                whole = []
        self._leaves(whole)
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
                head + self._stage_bound(s, row, transfer, stop) + back,
                heads + tails + self.back[s + 1, stop],
                heads + self.done[s + 1, stop],
            ]
        )
        if s and not self.model.cluster.overlap:
            bounds = np.maximum(bounds, self._pair(cuts, row, head, tail))
        for at in np.flatnonzero(bounds < self.incumbent.cutoff):
            yield float(bounds[at]), -s, (*cuts, int(stop[at])), float(heads[at]), float(tails[at])

    def _pair(self, cuts: tuple[int, ...], row: StageTerms, head: float, tail: float) -> Array:
        """Bounds from the last two stages, if transfers between them are part of both programs."""
        s, first, stop = len(cuts) - 1, (0, *cuts)[-2], cuts[-1]
        table, transfer = self.stage[s], self.cut[s, stop]
        before = StageTerms(*(a[first, stop - 1] for a in (table.forward, table.backward, table.sync, table.update)))
        seconds = pair_seconds_in_line(before, row, transfer, self.m, self.s - 1 - s)
        return head + tail - (before.forward + before.backward + 2 * transfer) + seconds

    def _leaves(self, leaves: list[tuple[int, ...]]) -> None:
        """Prices all these cuts at once and exactly; offers the best one."""
        if not leaves:
            return
        edges = np.array([(0, *cuts, self.n) for cuts in leaves])
        at, stop = edges[:, :-1], edges[:, 1:] - 1
        terms = [
            np.stack([getattr(self.stage[s], name)[at[:, s], stop[:, s]] for s in range(self.s)], axis=1)
            for name in ("forward", "backward", "sync", "update")
        ]
        fits = np.isfinite(terms[0]).all(axis=1)
        if not fits.any():
            return
        forward, backward, sync, update = (a[fits] for a in terms)
        cut = np.stack([self.cut[s, edges[fits, s + 1]] for s in range(self.s - 1)], axis=1)
        times = forward[..., None], backward[..., None], cut, sync, update
        seconds = step_seconds(self.grid.schedule, self.m, *times, overlap=self.model.cluster.overlap)
        best = int(np.argmin(seconds))
        if seconds[best] < self.incumbent.cutoff:
            chosen = tuple(int(c) for c in edges[fits][best, 1:-1])
            self.incumbent.offer(grid_plan(self.grid, chosen, self.request, self.model), self.model)
