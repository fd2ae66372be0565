"""Grids of stages x data x tensor devices: every decision of an SPMD plan except its cuts, with a lower bound each.

A grid leaves open only where the layers are cut into stages.  The bounds here hold for all cuts, so the search can
visit the most promising grids first and stop as soon as no other grid can be faster than the best plan.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jhpt.core.config import Compression
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, Zero, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.communication import Place
from jhpt.planner.cost.layers import LayerStrategy, Space, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Request

CHUNKS = (2, 3, 4)
"""Numbers of chunks per device that interleaved schedules may have."""

SLACK = 1e-9
"""Relative tolerance for sums of the same numbers in a different order."""


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

    @property
    def per_stage(self) -> int:
        """Devices of one stage."""
        return self.data * self.tensor

    @property
    def devices(self) -> int:
        """Devices that the plan uses."""
        return self.stages * self.per_stage

    def strategy(self, batch: int) -> LayerStrategy:
        """The strategy that all layers share."""
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


def bounded_grids(request: Request, model: CostModel, space: Space) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time that holds for all cuts."""
    if model.cluster.mixed:
        return
    available = model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in (d for d in range(1, min(b, available // tensor) + 1) if b % d == 0):
                levels = model.levels(request.zero, data, space)
                for zero, recompute in itertools.product(levels, request.recompute):
                    # One tensor rank has no all-reduce to compress or to hide.
                    for compression in request.compression if tensor > 1 else (None,):
                        cuts = request.sample_chunks if tensor > 1 else (1,)
                        grid = Grid(1, data, tensor, m, zero, recompute, "1f1b", 1, space, compression, cuts)
                        yield from _single(grid, request, model)
                        yield from _pipelines(replace(grid, stages=2), request, model)


@dataclass(frozen=True)
class _Work:
    """Least costs of all layers together.

    passes: seconds of one micro-batch, forward and backward.  once: further seconds per step.
    state, activations: bytes.
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
    """The grid with one stage, if it can fit."""
    place = model.places.at(0, grid.per_stage)
    work = _work([place], grid.tensor, grid.strategy(request.batch), model)
    if work.state + work.activations <= place.memory * (1 + SLACK):
        yield grid.micro_batches * work.passes + work.once, grid


def _pipelines(grid: Grid, request: Request, model: CostModel) -> Iterator[tuple[float, Grid]]:
    """Bounds for S = 2, 3, ... stages.

    Let t_s be the seconds of stage s per micro-batch and W their sum.  Then T >= max over s of
    (t_0 + .. + t_{s-1} + M t_s).  This is least where all terms are equal: t_s = (M-1)/M t_{s-1} and
    T = M W / sum of ((M-1)/M)^s; the first stage then still updates its slot.  A second bound: the largest finishing
    time of the stages is at least their mean.  The mean of the bytes over the stages must fit, too.
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
        bounds: list[tuple[Schedule, int, float]] = []
        bounds += [(name, 1, m * work.passes / ramp + used) for name in ("1f1b", "gpipe") if name in request.schedules]
        if "interleaved" in request.schedules and m % s == 0:
            bounds += [("interleaved", v, mean) for v in CHUNKS if s * v <= model.num_layers]
        for name, v, bound in bounds:
            saved = in_flight(name, s, 0, v, m) * (work.activations / v + s * slots[0].output)
            if work.state + s * slots[0].state + saved <= s * memory:
                shape = s, grid.data, grid.tensor, m, grid.zero, grid.recompute
                yield max(bound, mean), Grid(*shape, name, v, grid.space, grid.compression, grid.sample_chunks)


def grid_plan(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> Plan:
    """The plan of a grid.  cuts: the first layer of every chunk after the first, in order."""
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
