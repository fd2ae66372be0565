"""Plans whose stages have equally many devices: grids of stages x data x tensor devices, and where to cut the layers.

A grid is every decision of an SPMD plan except where the layers are cut into stages.  `bounds` has a lower bound of
every grid that holds for all cuts.

`CutSearch` finds the cuts of one grid, best-first over prefixes of stages.  The dynamic programme of `stages` gives a
lower bound for every suffix of the layers.  A prefix of fixed stages and the bound of the suffix that follows give a
lower bound of the whole step.  The search always extends the prefix with the least bound, and it prices the last cut of
a prefix exactly for all layers at once.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from jhpt.core.config import Compression
from jhpt.core.plan import Chunk, OtherBlocks, Plan, SavedTensors, Schedule, Space, Stage, Zero, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.communication import transfer_seconds
from jhpt.planner.cost.layers import LayerStrategy, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array, step_seconds
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.stages import (
    NEAR,
    Ranges,
    StageTerms,
    after,
    pair_seconds_in_line,
    prefix_sums,
    range_sums,
    ranges,
    round_trip_seconds,
    stage_seconds,
    stage_seconds_gpipe,
    stage_seconds_in_line,
    stage_seconds_in_turn,
)

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
    zero_ranks: int | None = None
    """With hybrid sharding the number of neighbouring data ranks over which ZeRO shards."""
    saved: SavedTensors | None = None
    """With recomputation: what blocks save beside their inputs; None: nothing, or what is still to be chosen."""
    other_blocks: OtherBlocks | None = None
    """With recomputation: the blocks that save more; None: none."""

    @property
    def per_stage(self) -> int:
        """Devices of one stage."""
        return self.data * self.tensor

    def strategy(self, batch: int) -> LayerStrategy:
        """The strategy that all layers share."""
        return layer_strategy(
            self.space,
            self.stages,
            batch,
            self.micro_batches,
            self.zero,
            self.recompute,
            self.sequence,
            compression=self.compression,
            sample_chunks=self.sample_chunks,
            saved=self.saved,
            zero_ranks=self.zero_ranks,
        )


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
    saved = grid.saved or model.saved
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space=grid.space,
        batch=request.batch,
        micro_batches=grid.micro_batches,
        schedule=grid.schedule,
        zero=grid.zero,
        zero_ranks=grid.zero_ranks,
        sequence=grid.sequence,
        recompute=grid.recompute,
        saved=saved if grid.recompute and saved != SavedTensors() else None,
        other_blocks=grid.other_blocks,
        compression=grid.compression or Compression(),
        stages=stages,
    )


@lru_cache(maxsize=4096)
def partitions(work: bytes, parts: int) -> tuple[tuple[int, ...], ...]:
    """The cuts that interleaved plans try, for layers of these float64 seconds."""
    values = np.frombuffer(work)
    return balanced(values, parts), evenest(values, parts)


def balanced(work: Array, parts: int) -> tuple[int, ...]:
    """First layers of parts 2, 3, ... of the contiguous partition with the smallest largest part.

    Among equal partitions, each part in turn takes as many layers as it can: its sum must not exceed the largest part,
    and at least one layer must remain for each later part.
    """
    n, total = len(work), prefix_sums(work)
    limit, cuts, start = _largest_parts(work.tobytes())[parts - 1] * (1 + 1e-12), [], 0
    for remaining in range(parts - 1, 0, -1):
        stop = int(np.searchsorted(total, total[start] + limit, side="right")) - 1
        start = max(start + 1, min(stop, n - remaining))
        cuts.append(start)
    return tuple(cuts)


@lru_cache(maxsize=1024)
def _largest_parts(work: bytes) -> Array:
    """[N] the smallest largest part of contiguous partitions of float64 values into 1, 2, ... N parts."""
    values = np.frombuffer(work)
    n, total, sums = len(values), prefix_sums(values), range_sums(values)
    sums = np.where(np.tri(n, k=-1, dtype=bool), np.inf, sums)  # [i, j] of layers i..j
    least = [total[1:]]  # of layers 0..j
    for _ in range(1, n):
        least.append(np.append(np.inf, np.maximum(least[-1][:-1, None], sums[1:]).min(axis=0)[1:]))
    return np.array([row[-1] for row in least])


def evenest(work: Array, parts: int) -> tuple[int, ...]:
    """First layers of parts 2, 3, ... of the contiguous partition with the least sum of squared parts.

    Among equal partitions, each part from the last one takes as many layers as it can.
    """
    squares, least = range_sums(work) ** 2, _least_squares(work.tobytes())
    cuts, stop = [], len(work)
    for before in range(parts - 1, 0, -1):
        sums = least[before - 1][before - 1 : stop - 1] + squares[before:stop, stop - 1]
        stop = before + int(np.flatnonzero(sums <= sums.min() * (1 + 1e-12))[0])
        cuts.append(stop)
    return tuple(reversed(cuts))


@lru_cache(maxsize=1024)
def _least_squares(work: bytes) -> Array:
    """[parts - 1, stop - 1] the least sum of squared parts of contiguous partitions of the first float64 values."""
    squares = range_sums(np.frombuffer(work)) ** 2
    n = len(squares)
    squares = np.where(np.tri(n, k=-1, dtype=bool), np.inf, squares)  # [i, j] of layers i..j
    least = [squares[0]]
    for _ in range(1, n):
        least.append(np.append(np.inf, (least[-1][:-1, None] + squares[1:, 1:]).min(axis=0)))
    return np.array(least)


class CutSearch:
    """The best cuts of one grid with several stages of one chunk each."""

    def __init__(self, grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
        self.grid, self.request, self.model, self.incumbent = grid, request, model, incumbent
        self.n, self.s, self.m = model.num_layers, grid.stages, grid.micro_batches
        strategy = grid.strategy(request.batch)
        # Samples between layers on a device; with sequence parallelism a share of each.
        local = strategy.micro_batch // grid.data / (grid.tensor if grid.sequence else 1)
        slots = in_flight(grid.schedule, self.s, 0, 1, self.m)
        ways = model.ways(grid.schedule, grid.space)
        tables: dict[int, Ranges] = {}
        sizes, which = np.unique(model.boundary[:-1], return_inverse=True)  # those of blocks are all the same
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
                seconds = np.array([ways * transfer_seconds(transfer, size * local) for size in sizes])
                self.cut[s, 1:-1] = seconds[which]
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
        for s in reversed(range(self.s)):
            terms, transfer, stops = self._choices(s)
            # Where stage s can start: at least one layer is left for each stage before it, this one and each after it.
            starts = slice(s, stops.stop - 1) if s else slice(0, 1)
            terms = StageTerms(*(a[starts] for a in (terms.forward, terms.backward, terms.sync, terms.update)))
            # A start must be below its stop: an empty range is infinite.
            nonempty = np.arange(starts.start, starts.stop)[:, None] < np.arange(stops.start, stops.stop)
            forward = np.where(nonempty, terms.forward, np.inf)
            terms = replace(terms, forward=forward)
            passes = forward + terms.backward
            both = passes + 2 * transfer
            before = self.cut[s - 1, starts, None] if s else 0.0
            back = np.maximum(self._stage_bound(s, terms, transfer, stops, before), both + self.back[s + 1, stops])
            done = np.maximum(back + after(terms), forward + transfer + self.done[s + 1, stops])
            self.trip[s, starts] = (both + self.trip[s + 1, stops]).min(axis=1)
            for table, ahead in zip(self.near, (None, *self.near), strict=False):
                table[s, starts] = (passes if ahead is None else both + ahead[s + 1, stops]).min(axis=1)
            self.back[s, starts], self.done[s, starts] = back.min(axis=1), done.min(axis=1)

    def _stage_bound(
        self,
        s: int,
        terms: StageTerms,
        transfer: Array,
        stops: slice | npt.NDArray[np.int64],
        before: Array | float,
    ) -> Array:
        """Least seconds from the start of stage s to the end of its last backward pass; before: as `stage_seconds`."""
        beyond = self.trip[s + 1, stops]
        if self.grid.schedule == "1f1b":
            return stage_seconds_in_turn(terms, transfer, beyond, self.window[s], self.m, before)
        seconds = stage_seconds(terms, transfer, beyond, self.window[s], self.m, before)
        if self.grid.schedule == "gpipe":
            seconds = np.maximum(seconds, stage_seconds_gpipe(terms, transfer, beyond, self.m, before))
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
                head + self._stage_bound(s, row, transfer, stop, self.cut[s - 1, i] if s else 0.0) + back,
                heads + tails + self.back[s + 1, stop],
                heads + self.done[s + 1, stop],
            ]
        )
        if s and not self.model.cluster.overlap and self.grid.schedule != "1f1b":
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
