"""The plans that one would run without a planner, and that a search has to beat.

    data parallel           one stage; as many replicas as devices and micro-batch allow
    tensor parallel         one stage; the largest tensor degree that every layer allows
    gpipe, equal layers     as many stages as layers and devices allow, replicated over what is left; GPipe's schedule
    1f1b, equal layers      the same stages with 1f1b or eager-1f1b, whichever is faster
    best 3-D grid           the best stages x data x tensor grid with equal layers and 1f1b or eager-1f1b: the best
                            choice by hand

Equal layers: stages differ by at most one layer, and the longer ones come first.  Samples are not split into chunks.
All-reduces are compressed only where the request insists on it.  Each baseline has its best number of micro-batches,
ZeRO level, recomputation and sequence parallelism.  Its devices start at the first one of the cluster, on a mixed
cluster at the first one of the fastest kind (`rows`), and `estimate` prices it as any other plan.  Every baseline is in
the decision set of its space, or would be with sample chunks, which do not make it slower.  So a plan that is proven
optimal is never slower than a baseline.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jhpt.core.amounts import gib
from jhpt.core.config import Compression
from jhpt.core.divisors import divisors
from jhpt.core.plan import Chunk, Plan, Run, Schedule, Space, Zero
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.layers import LayerStrategy, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.ascending import Members, ascending
from jhpt.planner.search.bounds import least_work
from jhpt.planner.search.request import Request
from jhpt.planner.search.rows import rows
from jhpt.planner.search.stages import SLACK

Shape = tuple[int, int, int]
"""Stages, data degree, tensor degree."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The best plan of one kind and its seconds per step; without a plan, `reason` says why there is none."""

    name: str
    plan: Plan | None
    seconds: float | None
    reason: str


def baselines(request: Request, model: CostModel, space: Space | None = None) -> tuple[Baseline, ...]:
    """All baselines, in the order of the table above.  Each has its own schedules; `request.schedules` does not count.

    Args:
      space: in which they are priced; None: "spmd", but on a mixed cluster "general".
    """
    space = space or ("spmd" if model.places.uniform else "general")
    if space == "general":
        request = replace(request, sequence=False)
    table = _Table(model, space)
    one: tuple[Schedule, ...] = ("1f1b",)
    in_turn: tuple[Schedule, ...] = ("1f1b", "eager-1f1b") if space == "spmd" else ("eager-1f1b",)
    kinds: tuple[tuple[str, tuple[Schedule, ...], Callable[[int], Iterable[Shape]]], ...] = (
        ("data parallel", one, lambda b: [(1, _data(b, model.cluster.num_devices), 1)]),
        ("tensor parallel", one, lambda b: _tensor_shapes(model)),
        ("gpipe, equal layers", ("gpipe",), lambda b: _pipe_shapes(request, model, b)),
        ("1f1b, equal layers", in_turn, lambda b: _pipe_shapes(request, model, b)),
        ("best 3-D grid", in_turn, lambda b: _grid_shapes(request, model, b)),
    )
    return tuple(
        _best(
            name,
            ascending(family for schedule in schedules for family in _families(request, schedule, shapes, table)),
            table,
        )
        for name, schedules, shapes in kinds
    )


def _data(micro_batch: int, devices: int) -> int:
    """Most replicas on so many devices that share the micro-batch evenly."""
    return max(divisors(micro_batch, up_to=devices))


def _tensor_shapes(model: CostModel) -> list[Shape]:
    tensor = max(model.common_degrees(model.cluster.num_devices))
    return [(1, 1, tensor)] if tensor > 1 else []


def _pipe_shapes(request: Request, model: CostModel, micro_batch: int) -> list[Shape]:
    devices = model.cluster.num_devices
    stages = min(devices, model.num_layers, request.max_stages)
    return [(stages, _data(micro_batch, devices // stages), 1)] if stages > 1 else []


def _grid_shapes(request: Request, model: CostModel, micro_batch: int) -> Iterator[Shape]:
    devices = model.cluster.num_devices
    for tensor in model.common_degrees(devices):
        for data in divisors(micro_batch, up_to=devices // tensor):
            most = min(model.num_layers, devices // (data * tensor), request.max_stages)
            yield from ((stages, data, tensor) for stages in range(1, most + 1))


@dataclass(frozen=True)
class _Grid:
    """A plan with equal layers."""

    stages: int
    data: int
    tensor: int
    schedule: Schedule
    batch: int
    micro_batches: int
    zero: Zero
    recompute: bool
    sequence: bool
    compression: Compression | None

    @property
    def devices(self) -> int:
        """Devices of one stage."""
        return self.data * self.tensor


def _families(
    request: Request, schedule: Schedule, shapes: Callable[[int], Iterable[Shape]], table: "_Table"
) -> Iterator[tuple[float, Callable[[], Members[_Grid]]]]:
    """For `ascending`: the grids with equal micro-batches, data and tensor degrees are a family."""
    model, recompute = table.model, min(request.recompute)
    for m in request.micro_batches:
        b = request.batch // m
        for (data, tensor), family in itertools.groupby(shapes(b), key=lambda shape: shape[1:]):
            stages = [shape[0] for shape in family]
            work = least_work(-(-b // data), tensor, recompute, model, sequence=request.sequence) * (1 - SLACK)
            one = _Grid(1, data, tensor, schedule, request.batch, m, 0, recompute, False, None)
            yield _in_stages(work, m, max(stages)), partial(_members, one, stages, request, table)


def _members(one: _Grid, stages: list[int], request: Request, table: "_Table") -> Members[_Grid]:
    """The grids with so many stages that share the micro-batches and degrees of `one`, by their bounds."""
    compression = request.compression[0] if one.tensor > 1 else None
    levels = table.model.levels(request.zero, one.data, table.space, one.micro_batches)
    sequences = request.sequences(table.model, one.tensor, compression)
    grids = [
        replace(one, stages=s, zero=zero, recompute=recompute, sequence=sequence, compression=compression)
        for s, zero, recompute, sequence in itertools.product(stages, levels, request.recompute, sequences)
    ]
    yield from sorted(((table.least_seconds(grid), grid) for grid in grids), key=lambda pair: pair[0])


def _best(name: str, grids: Members[_Grid], table: "_Table") -> Baseline:
    """Prices the grids in the order of a bound, until none can be faster."""
    first = next(grids, None)
    if first is None:
        return Baseline(name=name, plan=None, seconds=None, reason=table.why_none(name))
    seconds, best, missing = math.inf, None, math.inf
    for bound, grid in itertools.chain([first], grids):
        if bound >= seconds:
            break
        busy, lacking = table.stage_bounds(grid)
        if busy >= seconds:
            continue
        if lacking <= 0:
            plan = table.plan(grid)
            estimate = price(plan, table.row.listed)
            lacking = max(stage.total_bytes - stage.capacity for stage in estimate.stages)
            if estimate.fits and estimate.seconds < seconds:
                seconds, best = estimate.seconds, plan.model_copy(update={"seconds": estimate.seconds})
        missing = min(missing, lacking)
    if best is None:
        reason = f"does not fit: at least {gib(missing)} per device are missing"
        return Baseline(name=name, plan=None, seconds=None, reason=reason)
    return Baseline(name=name, plan=best, seconds=seconds, reason="")


@dataclass(frozen=True)
class _Sums:
    """Prefix sums [N + 1] over the layers at one place: seconds of both passes, bytes."""

    busy: Array
    state: Array
    activations: Array


class _Table:
    """Bounds of grids, from prefix sums that are computed once for each place, tensor degree and strategy."""

    def __init__(self, model: CostModel, space: Space) -> None:
        self.row = rows(model)[0]
        self.model, self.space = self.row.model, space
        self._sums: dict[tuple[int, int, int, LayerStrategy], _Sums] = {}
        self._work: dict[tuple[int, int, int, LayerStrategy], float] = {}

    def why_none(self, name: str) -> str:
        """Why a kind of baseline has no grid at all."""
        if name == "tensor parallel":
            return "no tensor degree above 1 is allowed by every layer on these devices"
        return "a pipeline needs two devices and two layers"

    def least_seconds(self, grid: _Grid) -> float:
        """A bound that ignores the cuts: all work at the best place, in stages that wait for those before them."""
        offsets = self._offsets(grid)
        key = (len(offsets), grid.devices, grid.tensor, self._strategy(grid))
        if key not in self._work:
            layers = [np.diff(self._at(offset, grid).busy) for offset in offsets]
            self._work[key] = float(np.min(layers, axis=0).sum())
        return _in_stages(self._work[key], grid.micro_batches, grid.stages)

    def stage_bounds(self, grid: _Grid) -> tuple[float, float]:
        """Bounds with the cuts: of the step's seconds, and of the bytes by which the fullest device overflows."""
        edges, before, seconds, lacking = _equal(self.model.num_layers, grid.stages), 0.0, 0.0, -math.inf
        for s, (first, stop) in enumerate(itertools.pairwise(edges)):
            sums = self._at(s * grid.devices, grid)
            busy = float(sums.busy[stop] - sums.busy[first])
            seconds = max(seconds, before + grid.micro_batches * busy)
            before += busy
            slots = in_flight(grid.schedule, grid.stages, 0 if self.space == "spmd" else s, 1, grid.micro_batches)
            saved = sums.state[stop] - sums.state[first] + slots * (sums.activations[stop] - sums.activations[first])
            place = self.model.places.at(s * grid.devices, grid.devices)
            slot = self.model.slot(place, grid.tensor, self._strategy(grid))
            lacking = max(lacking, float(saved) + slot.state + slots * slot.output - place.memory)
        return seconds * (1 - 1e-9), lacking * (1 - math.copysign(1e-9, lacking))

    def plan(self, grid: _Grid) -> Plan:
        """The grid as a plan."""
        edges = _equal(self.model.num_layers, grid.stages)
        stages = tuple(
            self.row.stage(
                s * grid.devices,
                grid.devices,
                Chunk(first=first, runs=(Run(layers=stop - first, tensor=grid.tensor),)),
            )
            for s, (first, stop) in enumerate(itertools.pairwise(edges))
        )
        return Plan(
            model=self.model.profile.name,
            cluster=self.model.cluster.name,
            space=self.space,
            batch=grid.batch,
            micro_batches=grid.micro_batches,
            schedule=grid.schedule,
            zero=grid.zero,
            recompute=grid.recompute,
            sequence=grid.sequence,
            saved=self.model.saved if grid.recompute else None,
            compression=grid.compression or Compression(),
            gradient_compression=self.model.gradient_compression,
            stages=stages,
        )

    def _offsets(self, grid: _Grid) -> list[int]:
        """First devices of the stages, one for each class of equal places."""
        starts = range(0, grid.stages * grid.devices, grid.devices)
        if not self.model.places.uniform:
            return list(starts)
        period = math.lcm(self.model.places.per_node, grid.devices) // grid.devices
        return list(starts[:period])

    def _strategy(self, grid: _Grid) -> LayerStrategy:
        decided = grid.batch, grid.micro_batches, grid.zero, grid.recompute, grid.sequence
        return layer_strategy(self.space, grid.stages, *decided, compression=grid.compression)

    def _at(self, offset: int, grid: _Grid) -> _Sums:
        kind = self.model.places.offset_class(offset)
        key = (kind, grid.devices, grid.tensor, self._strategy(grid))
        if key not in self._sums:
            place = self.model.places.at(offset, grid.devices)
            costs = self.model.layer_costs(place, grid.tensor, self._strategy(grid))
            passes = costs.forward + costs.forward_tensor + costs.backward + costs.backward_tensor
            arrays = (np.concatenate([[0.0], np.cumsum(a)]) for a in (passes, costs.state, costs.activations))
            self._sums[key] = _Sums(*arrays)
        return self._sums[key]


def _in_stages(work: float, m: int, stages: int) -> float:
    """Least seconds of a step of m micro-batches with so much work each, in S stages that wait for those before them.

    With stage times t_s, T >= t_0 + .. + t_{s-1} + M t_s.  This is least if all are equal: W / (1 - (1 - 1/M)^S).
    """
    return work / (1 - (1 - 1 / m) ** stages)


def _equal(layers: int, stages: int) -> list[int]:
    """Edges of ranges whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(layers, stages)
    return [s * length + min(s, longer) for s in range(stages + 1)]
