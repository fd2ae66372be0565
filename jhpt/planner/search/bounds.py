"""Every grid with a lower bound of its step time that holds for all cuts, and for all sets of saved activations.

So the search can visit the most promising grids first and stop as soon as no other grid can be faster than the best
plan.  A grid with recomputation leaves open what blocks save.  Its bound is that of the fastest set that can fit;
`with_sets` has the sets of a grid one by one.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jhpt.core.plan import ONE_CHUNK, Schedule
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.grids import Grid
from jhpt.planner.search.request import Request
from jhpt.planner.search.saved_sets import SavedSets, SetCosts
from jhpt.planner.search.stages import SLACK

CHUNKS = (2, 3, 4)
"""Numbers of chunks per device that interleaved schedules may have."""


def bounded_grids(request: Request, model: CostModel, space: Space, sets: SavedSets) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time that holds for all cuts and for all `sets`."""
    if model.cluster.mixed:
        return
    available = model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in (d for d in range(1, min(b, available // tensor) + 1) if b % d == 0):
                levels = model.levels(request.zero, data, space)
                for zero, recompute in itertools.product(levels, request.recompute):
                    # With one tensor rank there is no all-reduce to compress or to hide.
                    for compression in request.compression if tensor > 1 else (None,):
                        cuts = request.sample_chunks if tensor > 1 else (1,)
                        grid = Grid(1, data, tensor, m, zero, recompute, "1f1b", 1, space, compression, cuts)
                        yield from _single(grid, request, model, sets)
                        for sequence in request.sequences(model, tensor, compression):
                            yield from _pipelines(replace(grid, stages=2, sequence=sequence), request, model, sets)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The least costs of all layers together, for every set of saved activations, and what each stage adds.

    costs: of the sets; None: there is nothing to choose.  passes: [sets] seconds of one micro-batch, forward and
    backward.  step: [sets] seconds of all micro-batches and of what follows once.  saved: [sets] bytes of a
    micro-batch.  state: bytes.  most: bytes of a device that holds all layers and saves everything.  each, used:
    seconds of a stage's slot for embedding and head.  slot, output: its bytes, and those for each micro-batch in
    flight.  memory: of a device, with `SLACK`.
    """

    costs: SetCosts | None
    passes: Array
    step: Array
    saved: Array
    state: float
    most: float
    each: float
    used: float
    slot: float
    output: float
    memory: float


def _work(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> _Work:
    strategy, size, m = grid.strategy(request.batch), grid.per_stage, grid.micro_batches
    period, last = math.lcm(model.places.per_node, size), model.cluster.num_devices - size
    starts = range(0, min(period, last + 1), size) if grid.stages > 1 else (0,)
    places = [model.places.at(start, size) for start in starts]
    if choosing := grid.recompute and grid.saved is None and bool(sets.sets):
        strategy = replace(strategy, saved=sets.everything)
    tables = [model.layer_costs(place, grid.tensor, strategy) for place in places]
    backwards = np.array([c.backward + c.backward_tensor for c in tables])
    passes = _least(np.array([c.forward + c.forward_tensor for c in tables]) + backwards)
    updates = np.array([c.update for c in tables])
    reduced = _least(np.array([c.gradients for c in tables]) + updates - backwards)
    costs, more, saved = None, np.zeros(1), tables[0].activations.sum(keepdims=True)
    all_passes = passes + more
    if choosing:
        plain = tables
        if beside := strategy.zero == 3 and grid.data > 1 and model.cluster.overlap:
            plain = [model.layer_costs(place, grid.tensor, replace(strategy, zero=0)) for place in places]
        costs = sets.costs(plain, size, grid.tensor, strategy)
        more, saved = costs.seconds, costs.bytes + tables[0].activations[[0, -1]].sum()
        all_passes = passes + more
        if beside:  # What is computed again may hide behind the gathered weights.
            computed = _least(np.array([c.forward + c.forward_tensor + c.backward + c.backward_tensor for c in plain]))
            all_passes = np.maximum(passes, computed + more)
    slots = [model.slot(place, grid.tensor, strategy) for place in places]
    each, used = (min(slot.seconds(used=used) for slot in slots) for used in (False, True))
    return _Work(
        costs=costs,
        passes=all_passes,
        step=m * all_passes + np.maximum(_least(updates), reduced - more),
        saved=saved,
        state=float(tables[0].state.sum()),
        most=float((tables[0].state + tables[0].activations).sum() + tables[0].working.max()),
        each=each,
        used=used,
        slot=slots[0].state,
        output=slots[0].output,
        memory=places[0].memory * (1 + SLACK),
    )


def _least(quantity: Array) -> float:
    """The sum over the layers, each at the place where it is least."""
    return float(quantity.min(axis=0).sum())


def _single(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> Iterator[tuple[float, Grid]]:
    """The grid with one stage, if it can fit.

    Recomputation saves memory and makes it slower, so it is left out where there is enough; so does sequence
    parallelism, unless it divides computation.
    """
    enough = model.places.at(0, grid.per_stage).memory * (not model.profile.state.decoded_bytes)
    may_save = grid.recompute and False in request.recompute
    if may_save and _work(replace(grid, recompute=False), request, model, sets).most <= enough:
        return
    for sequence in request.sequences(model, grid.tensor, grid.compression):
        tried = replace(grid, sequence=sequence)
        work = _work(tried, request, model, sets)
        if (bound := least_seconds(tried, work)) < math.inf:
            yield bound, tried
        if work.most <= enough and not model.repeats:
            return


def _pipelines(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> Iterator[tuple[float, Grid]]:
    """The grids with S = 2, 3, ... stages that can fit."""
    m = grid.micro_batches
    most = min(model.num_layers, model.cluster.num_devices // grid.per_stage, request.max_stages)
    if most < 2:
        return
    work = _work(grid, request, model, sets)
    for s in range(2, most + 1):
        schedules: list[tuple[Schedule, int]] = [(name, 1) for name in ONE_CHUNK if name in request.schedules]
        if "interleaved" in request.schedules and m % s == 0:
            schedules += [("interleaved", v) for v in CHUNKS if s * v <= model.num_layers]
        for name, v in schedules:
            shape = s, grid.data, grid.tensor, m, grid.zero, grid.recompute
            made = Grid(*shape, name, v, grid.space, grid.compression, grid.sample_chunks, grid.sequence)
            if (bound := least_seconds(made, work)) < math.inf:
                yield bound, made


def least_seconds(grid: Grid, work: _Work, some: slice = slice(None)) -> float:
    """Least seconds of a step for all cuts, with the fastest of some sets that can fit; infinite if none can.

    The mean of the bytes over the stages must fit.  Let t_s be the seconds of stage s per micro-batch and W their sum.
    Then T >= max over s of (t_0 + .. + t_{s-1} + M t_s).  This is least if all terms are equal:
    t_s = (M-1)/M t_{s-1} and T = M W / sum of ((M-1)/M)^s; the first stage then still has to update its slot.  A second
    bound: the largest finishing time of the stages is at least their mean.
    """
    s, m = grid.stages, grid.micro_batches
    ring = in_flight(grid.schedule, s, 0, grid.chunks, m)
    room = grid.chunks * ((s * (work.memory - work.slot) - work.state) / ring - s * work.output)
    fits = work.saved[some] <= room
    if not fits.any():
        return math.inf
    step = float(work.step[some][fits].min())
    if s == 1:
        return step
    mean = (step + (s - 2) * work.each + 2 * work.used) / s
    if grid.schedule == "interleaved":
        return mean
    ramp = m * (1 - (1 - 1 / m) ** s)
    return max(mean, m * float(work.passes[some][fits].min()) / ramp + work.used)


def with_sets(
    grid: Grid, request: Request, model: CostModel, sets: SavedSets, limit: float
) -> list[tuple[float, Grid]]:
    """The grid with every set of saved activations that can fit and be faster than `limit`, the best bound first."""
    if not (grid.recompute and sets.sets):
        return [(-math.inf, grid)]
    work = _work(grid, request, model, sets)
    assert work.costs is not None
    bounds = [least_seconds(grid, work, slice(at, at + 1)) for at in range(len(work.costs.sets))]
    promising = work.costs.undominated([at for at, bound in enumerate(bounds) if bound < limit])
    return [
        (bounds[at], replace(grid, saved=work.costs.sets[at])) for at in sorted(promising, key=lambda at: bounds[at])
    ]


def interleaved_seconds(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> float:
    """Least seconds of an interleaved step with these cuts; infinite if it does not fit.

    Stage s starts after the first chunks of the stages before it, and its errors travel back through the same chunks:
    T >= sum of their passes + M t_s, and T >= sum of their forward passes + M t_s + update of s.
    """
    edges, strategy = np.array((0, *cuts, model.num_layers)), grid.strategy(request.batch)
    ring = in_flight(grid.schedule, grid.stages, 0, grid.chunks, grid.micro_batches)
    local = strategy.micro_batch // grid.data / (grid.tensor if grid.sequence else 1)
    received = np.append(0.0, model.boundary[edges[1:-1] - 1])
    buffers = 2 * local * (received + np.append(received[1:], 0.0))
    least = head = there = 0.0
    for s in range(grid.stages):
        place, own = model.places.at(s * grid.per_stage, grid.per_stage), slice(s, None, grid.stages)
        slot, costs = model.slot(place, grid.tensor, strategy), model.layer_costs(place, grid.tensor, strategy)
        forward, backward, update, state, saved = (
            np.add.reduceat(values, edges[:-1])[own]
            for values in (
                costs.forward + costs.forward_tensor,
                costs.backward + costs.backward_tensor,
                costs.update,
                costs.state,
                costs.activations,
            )
        )
        working = np.maximum.reduceat(costs.working, edges[:-1])[own]
        used = state.sum() + slot.state + ring * (saved.max() + slot.output) + working.max() + buffers[own].max()
        if used > place.memory * (1 + SLACK):
            return math.inf
        busy = grid.micro_batches * float((forward + backward).sum())
        after = float(update.sum()) + slot.seconds(used=False)
        least = max(least, head + there + busy, there + busy + after)
        there, head = there + float(forward[0]), head + float(backward[0])
    return least * (1 - SLACK)
