"""Every grid with a lower bound of its step time that holds for all cuts, and for all sets of saved activations.

So the search can visit the most promising grids first and stop as soon as no other grid can be faster than the best
plan.  A grid with recomputation leaves open what blocks save.  Its bound is that of the fastest set that can fit;
`with_sets` has the sets of a grid one by one.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from jhpt.core.divisors import divisors
from jhpt.core.plan import ONE_CHUNK, SavedTensors, Schedule, Space
from jhpt.core.schedule import delay, in_flight
from jhpt.planner.cost.activations import NOTHING
from jhpt.planner.cost.communication import transfer_seconds
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.places import Place, Places
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.ascending import ascending
from jhpt.planner.search.grids import Grid
from jhpt.planner.search.other_blocks import BlockCosts, Pairs
from jhpt.planner.search.request import Request
from jhpt.planner.search.saved_sets import SavedSets, SetCosts
from jhpt.planner.search.stages import SLACK

CHUNKS = (2, 3, 4)
"""Numbers of chunks per device that interleaved schedules may have."""


def bounded_grids(request: Request, model: CostModel, space: Space, sets: SavedSets) -> Iterator[tuple[float, Grid]]:
    """Every grid with a lower bound of its step time that holds for all cuts and for all `sets`.

    The grids come in ascending order of their bounds.
    """
    return ascending(
        (_least_of_family(grid, request, model, sets), partial(_family, grid, request, model, sets))
        for grid in _single_stages(request, model, space)
    )


def _single_stages(request: Request, model: CostModel, space: Space) -> Iterator[Grid]:
    """Every grid of one stage; with more stages, other schedules and sequence parallelism each stands for a family."""
    available = 0 if model.cluster.mixed else model.cluster.num_devices
    for m in request.micro_batches:
        b = request.batch // m
        for tensor in model.common_degrees(available):
            for data in divisors(b, up_to=available // tensor):
                levels = model.levels(request.zero, data, space, m)
                groups = (None, *_node_ranks(data, tensor, request, model, space))
                for zero, ranks, recompute in itertools.product(levels, groups, request.recompute):
                    if ranks is not None and not zero:
                        continue
                    # With one tensor rank there is no all-reduce to compress or to hide.
                    for compression in request.compression if tensor > 1 else (None,):
                        cuts = request.sample_chunks if tensor > 1 else (1,)
                        grid = Grid(1, data, tensor, m, zero, recompute, "1f1b", 1, space, compression, cuts)
                        yield grid if ranks is None else replace(grid, zero_ranks=ranks)


def _node_ranks(data: int, tensor: int, request: Request, model: CostModel, space: Space) -> tuple[int, ...]:
    """The data ranks of a node, if hybrid sharding may shard over them: several, of several whole nodes."""
    each, rest = divmod(model.places.per_node, tensor)
    allowed = request.hybrid and space == "spmd" and not rest and not model.gradient_compression.on
    return (each,) if allowed and 1 < each < data and data % each == 0 else ()


def _least_of_family(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> float:
    """A bound for as many stages as there can be: of the computation, or of longer collectives beside it.

    With interleaving, the number of stages divides the number of micro-batches.
    """
    m, most = grid.micro_batches, _most_stages(grid, request, model)
    spread = float(_ramps(m, most)[-1])
    if "interleaved" in request.schedules:
        spread = max(spread, min(most, m))
    recomputed = grid.recompute and not sets.sets
    samples = request.batch // m // grid.data
    work = least_work(samples, grid.tensor, recomputed, model, sequence=request.sequence, grid=grid)
    return m * work / spread * (1 - SLACK)


def _most_stages(grid: Grid, request: Request, model: CostModel) -> int:
    """Hybrid sharding is searched for one stage only."""
    if grid.zero_ranks is not None:
        return 1
    return max(1, min(model.num_layers, model.cluster.num_devices // grid.per_stage, request.max_stages))


def _alike(places: Places, devices: int) -> bool:
    """Whether all stages of so many devices, one after the other from the first, have equal places."""
    return places.uniform and (places.per_node % devices == 0 or devices % places.per_node == 0)


def least_work(
    samples: int, tensor: int, recompute: bool, model: CostModel, *, sequence: bool, grid: Grid | None = None
) -> float:
    """Seconds of both passes of all layers for so many samples on a device: to compute them, or of the collectives that
    ZeRO-2 and ZeRO-3 have in every pass of a block where these take longer.

    Args:
      recompute: whether blocks compute again what `model.saved` does not name.
      sequence: whether sequence parallelism may divide what tensor ranks repeat.
      grid: whose collectives count; None: none do.
    """
    forward, backward = model.least_seconds(samples, tensor, sequence=sequence)
    work = float((forward + backward)[model.index[[0, -1]]].sum()) if model.num_layers > 1 else 0.0
    if recompute:  # embedding and head are not recomputed
        backward = backward + model.activations.repeated(model.saved or NOTHING)[0] * forward
    if grid is not None and grid.zero > 1 and grid.data > 1 and _alike(model.places, grid.per_stage):
        place = model.places.at(0, grid.per_stage)
        sent = model.data_collectives.gathered(place, tensor, grid.zero_ranks or grid.data)
        forward = np.maximum(forward, sent) if grid.zero == 3 else forward
        backward = np.maximum(backward, sent * (grid.zero - 1))
    return work + float((forward + backward)[model.index[1:-1] if model.num_layers > 1 else model.index].sum())


def _family(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> Iterator[tuple[float, Grid]]:
    """The grids that differ from this one in stages, schedule and sequence parallelism, by their bounds."""
    members = list(_single(grid, request, model, sets))
    most = _most_stages(grid, request, model)
    schedules = _schedules(request, model)
    if most < 2 or not schedules:
        yield from sorted(members, key=lambda member: member[0])
        return
    pipelines = [
        replace(grid, stages=2, sequence=sequence)
        for sequence in request.sequences(model, grid.tensor, grid.compression)
    ]
    tables = [_pipeline_bounds(pipeline, most, schedules, request, model, sets) for pipeline in pipelines]
    bounds = np.concatenate([[bound for bound, _ in members], *(table.ravel() for table in tables)])
    for at in np.argsort(bounds, kind="stable")[: np.count_nonzero(np.isfinite(bounds))].tolist():
        if at < len(members):
            yield members[at]
            continue
        which, entry = divmod(at - len(members), tables[0].size)
        stages, (schedule, chunks) = 2 + entry // len(schedules), schedules[entry % len(schedules)]
        yield float(bounds[at]), replace(pipelines[which], stages=stages, schedule=schedule, chunks=chunks)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The least costs of all layers together, for every set of saved activations, and what each stage adds.

    costs: of the sets; None: there is nothing to choose.  more: [sets] seconds that a micro-batch computes again.
    plain: seconds of its passes without them.  computed: of their computation alone where weights are gathered beside
    it, else the same.  updates, reduced: seconds once per step, of the update and if gradients end last.  saved: [sets]
    bytes of a micro-batch.  blocks: [blocks] bytes that each block saves of it if it saves everything.  ends: bytes
    that embedding and head save.  working: of the largest layer while it runs.  state: bytes.  most: of a device that
    holds all layers and saves everything.  each, used: seconds of a stage's slot for embedding and head.  slot, output:
    its bytes, and those for each micro-batch in flight.  memory: of a device, with `SLACK`.
    """

    costs: SetCosts | None
    more: Array
    plain: float
    computed: float
    updates: float
    reduced: float
    saved: Array
    blocks: Array
    ends: float
    working: float
    state: float
    most: float
    each: float
    used: float
    slot: float
    output: float
    memory: float

    def passes_with(self, more: Array) -> Array:
        """Seconds of both passes of a micro-batch which computes so many seconds again."""
        passes: Array = np.maximum(self.plain, self.computed + more)
        return passes

    def step_with(self, m: int, more: Array) -> Array:
        """Seconds of m such micro-batches and of what follows once."""
        step: Array = m * self.passes_with(more) + np.maximum(self.updates, self.reduced - more)
        return step


def _work(grid: Grid, request: Request, model: CostModel, sets: SavedSets) -> _Work:
    strategy, size = grid.strategy(request.batch), grid.per_stage
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
    computed = passes
    if choosing:
        plain = tables
        if beside := strategy.zero > 1 and grid.data > 1 and model.cluster.overlap:
            plain = [model.layer_costs(place, grid.tensor, replace(strategy, zero=0)) for place in places]
        costs = sets.costs(plain, size, grid.tensor, strategy)
        more, saved = costs.seconds, costs.bytes + tables[0].activations[[0, -1]].sum()
        if beside:  # What is computed again may hide behind the collectives of ZeRO.
            # Without adding up gradients: a rank of ZeRO-2 or ZeRO-3 adds up its share only.
            bare = replace(strategy, zero=0, accumulates=False)
            alone = [model.layer_costs(place, grid.tensor, bare) for place in places]
            computed = _least(np.array([c.forward + c.forward_tensor + c.backward + c.backward_tensor for c in alone]))
    slots = [model.slot(place, grid.tensor, strategy) for place in places]
    each, used = (min(slot.seconds(used=used) for slot in slots) for used in (False, True))
    return _Work(
        costs=costs,
        more=more,
        plain=passes,
        computed=computed,
        updates=_least(updates),
        reduced=reduced,
        saved=saved,
        blocks=tables[0].activations[1:-1],
        ends=float(tables[0].activations[[0, -1]].sum()),
        working=float(tables[0].working.max()),
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
        bound = float(least_seconds("1f1b", 1, grid.micro_batches, 1, work).min())
        if sets.mixed and grid.recompute:
            bound = min(bound, float(_pairs(tried, work, request, model, sets)[1].min(initial=math.inf)))
        if bound < math.inf:
            yield bound, tried
        if work.most <= enough and not model.repeats:
            return


def _schedules(request: Request, model: CostModel) -> list[tuple[Schedule, int]]:
    """The schedules of pipelines, each with its number of chunks per device.

    Where exchanges overlap, gpipe is never faster than eager-1f1b and never needs less memory.
    """
    slower = {"gpipe"} if model.cluster.overlap and "eager-1f1b" in request.schedules else set[str]()
    interleaved: list[tuple[Schedule, int]] = [("interleaved", v) for v in CHUNKS if "interleaved" in request.schedules]
    return [*((name, 1) for name in ONE_CHUNK if name in {*request.schedules} - slower), *interleaved]


def _pipeline_bounds(
    grid: Grid,
    most: int,
    schedules: list[tuple[Schedule, int]],
    request: Request,
    model: CostModel,
    sets: SavedSets,
) -> Array:
    """[stages, schedules] bounds with 2, 3, ... `most` stages; infinite where there is no such grid or none fits.

    Recomputation is left out where any cuts fit without it.
    """
    m, work, s = grid.micro_batches, _work(grid, request, model, sets), np.arange(2, most + 1)
    may_save = grid.recompute and False in request.recompute and not model.profile.state.decoded_bytes
    plain = _work(replace(grid, recompute=False), request, model, sets) if may_save else None
    hop = _least_transfer(grid, request, model) if ("1f1b", 1) in schedules else 0.0
    columns = []
    for name, v in schedules:
        bounds = least_seconds(name, v, m, most, work, hop)[1:].min(axis=1)
        possible = (m % s == 0) & (s * v <= model.num_layers) if name == "interleaved" else np.full(len(s), True)
        if plain is not None:
            possible &= ~_fit_anyhow(plain, _most_in_flight(name, v, m, most)[1:])
        columns.append(np.where(possible, bounds, np.inf))
    return np.stack(columns, axis=1)


def _fit_anyhow(work: _Work, ring: Array) -> npt.NDArray[np.bool_]:
    """Whether a stage with all layers would fit with so many micro-batches in flight, transfers included."""
    buffers = 4 * work.output  # two slots each for input and output
    used: Array = work.most + (ring - 1) * float(work.saved[0]) + ring * work.output + work.slot + buffers
    fits: npt.NDArray[np.bool_] = used * (1 + SLACK) ** 2 <= work.memory
    return fits


def _least_transfer(grid: Grid, request: Request, model: CostModel) -> float:
    """Seconds of the fastest transfer between two stages."""
    size = grid.per_stage
    period, last = math.lcm(model.places.per_node, size), model.cluster.num_devices - 2 * size
    local = request.batch // grid.micro_batches // grid.data / (grid.tensor if grid.sequence else 1)
    carried = float(model.boundary[:-1].min()) * local
    ways = {model.places.transfer(at, size, at + size, size) for at in range(0, min(period, last + 1), size)}
    return min(transfer_seconds(way, carried) for way in ways)


def least_seconds(schedule: Schedule, chunks: int, m: int, most: int, work: _Work, hop: float = 0.0) -> Array:
    """[S, sets] least seconds of a step with 1, 2, ... S stages for all cuts; infinite where a set cannot fit.

    The mean of the bytes over the stages must fit.  Let t_s be the seconds of stage s per micro-batch and W their sum.
    Then T >= max over s of (t_0 + .. + t_{s-1} + M t_s).  This is least if all terms are equal:
    t_s = (M-1)/M t_{s-1} and T = M W / sum of ((M-1)/M)^s; the first stage then still has to update its slot.  A second
    bound: the largest finishing time of the stages is at least their mean.  Under 1f1b nothing runs beside the exchange
    that follows every forward pass, in which both neighbours take part.

    Args:
      hop: the least seconds of an exchange.
    """
    s = np.arange(1, most + 1)[:, None]
    ring = _most_in_flight(schedule, chunks, m, most)[:, None]
    room = chunks * ((s * (work.memory - work.slot) - work.state) / ring - s * work.output)
    hop = hop if schedule == "1f1b" else 0.0
    bounds = (work.step_with(m, work.more) + (s - 2) * work.each + 2 * work.used + 2 * m * (s - 1) * hop) / s
    if schedule != "interleaved":
        passes = work.passes_with(work.more) + s * hop
        bounds = np.maximum(bounds, m * passes / _ramps(m, most)[:, None] + work.used)
    return np.where(work.saved <= room, bounds, np.inf)


@cache
def _ramps(m: int, most: int) -> Array:
    """[S] sum of ((M-1)/M)^s over 1, 2, ... S stages."""
    return np.array(list(itertools.accumulate(((m - 1) / m) ** s for s in range(most))))


@cache
def _most_in_flight(schedule: Schedule, chunks: int, m: int, most: int) -> Array:
    """[S] micro-batches in flight on the first of 1, 2, ... S stages."""
    return np.array([in_flight(schedule, s, 0, chunks, m) for s in range(1, most + 1)])


def with_sets(
    grid: Grid, request: Request, model: CostModel, sets: SavedSets, limit: float
) -> list[tuple[float, Grid]]:
    """The grid with every set of saved activations that can fit and be faster than `limit`, the best bound first."""
    mixes = sets.mixed and grid.recompute and grid.stages == 1
    if not (grid.recompute and sets.sets) and not mixes:
        return [(-math.inf, grid)]
    work = _work(grid, request, model, sets)
    every = [(-math.inf, grid)]
    if work.costs is not None:
        bounds = least_seconds(grid.schedule, grid.chunks, grid.micro_batches, grid.stages, work)[-1].tolist()
        promising = work.costs.undominated([at for at, bound in enumerate(bounds) if bound < limit])
        every = [(bounds[at], replace(grid, saved=work.costs.sets[at])) for at in promising]
    if mixes:
        pairs, seconds = _pairs(grid, work, request, model, sets)
        for at in np.flatnonzero(seconds < limit).tolist():
            saved, others = pairs.choice(at)
            every.append((float(seconds[at]), replace(grid, saved=saved, other_blocks=others)))
    return sorted(every, key=lambda one: one[0])


def _pairs(grid: Grid, work: _Work, request: Request, model: CostModel, sets: SavedSets) -> tuple[Pairs, Array]:
    """The pairs of sets that blocks of one stage can save, and [pairs] least seconds of a step with each."""
    blocks, rest, working = len(work.blocks), work.memory - work.state - work.ends, np.array(work.working)
    saved: tuple[SavedTensors | None, ...]
    if work.costs is not None:
        keep = work.costs.undominated(range(len(work.costs.sets)))
        saved = (*(work.costs.sets[at] or NOTHING for at in keep), None)
        of_all = np.append(work.costs.seconds[keep], 0.0), np.append(work.costs.bytes[keep], work.blocks.sum())
        seconds, sizes = (np.repeat(values[:, None] / blocks, blocks, axis=1) for values in of_all)
    else:  # Blocks have no names, and may differ.
        strategies = [replace(grid, recompute=recompute).strategy(request.batch) for recompute in (True, False)]
        tables = [model.layer_costs(model.places.at(0, grid.per_stage), grid.tensor, each) for each in strategies]
        passes = np.array([(table.backward + table.backward_tensor)[1:-1] for table in tables])
        saved, seconds = (NOTHING, None), passes - passes[1]
        sizes = np.array([table.activations[1:-1] for table in tables])
        # With the first blocks, the working bytes of those that recompute, and of all others.
        begun = np.maximum.accumulate(tables[0].working[1:-2])
        working = np.maximum(begun, tables[1].working.max())
        work = _work(replace(grid, recompute=False), request, model, sets)
    pairs, m = BlockCosts(saved=saved, seconds=seconds, bytes=sizes).pairs(rest - working), grid.micro_batches
    return pairs, np.maximum(work.step_with(m, pairs.seconds), m * work.passes_with(pairs.seconds))


def interleaved_seconds(grid: Grid, cuts: tuple[int, ...], request: Request, model: CostModel) -> float:
    """Least seconds of an interleaved step with these cuts; infinite if it does not fit.

    Stage s starts after the first chunks of the stages before it.  Its errors travel back through the same chunks
    while its weights are updated.  A transfer from the stage before takes h; h_s is the longer one of both neighbours':

        T >= sum of (f_0 + h) + M t_s + 2 N h_s + (M v - N) max(0, h_s - min(f, b)) + max(sum of (b_0 + h), update)

    N passes of either direction have a tick of their own, so nothing hides the transfers beside them
    (`jhpt.planner.cost.schedule`).
    """
    m, s = grid.micro_batches, np.arange(grid.stages)
    first, strategy = np.array((0, *cuts)), grid.strategy(request.batch)
    local = strategy.micro_batch // grid.data / (grid.tensor if grid.sequence else 1)
    received = np.append(0.0, local * model.boundary[first[1:] - 1])
    places = [model.places.at(start, grid.per_stage) for start in (s * grid.per_stage).tolist()]
    tables = {place: _stages_at(place, grid, first, received, model, strategy) for place in set(places)}
    forward, backward, update, used = (
        np.stack([tables[place][name][..., at] for at, place in enumerate(places)], axis=-1) for name in range(4)
    )
    if (used > np.array([place.memory for place in places]) * (1 + SLACK)).any():
        return math.inf
    hop = np.zeros(grid.stages)
    if not model.profile.framework.exposed_transfers:
        n, sizes = grid.per_stage, received.reshape(-1, grid.stages).max(axis=0).tolist()
        links = [model.places.transfer((at - 1) % grid.stages * n, n, at * n, n) for at in s.tolist()]
        hop = np.array([transfer_seconds(link, size) for link, size in zip(links, sizes, strict=True)])
    wait, passes = np.maximum(hop, np.roll(hop, -1)), m * grid.chunks
    alone = np.minimum(passes, delay(grid.schedule, grid.stages, grid.chunks, m) + s[-1] - 2 * s)
    hidden = np.minimum(forward.max(axis=0), backward.max(axis=0))
    busy = m * (forward + backward).sum(axis=0)
    busy += 2 * alone * wait + (passes - alone) * np.maximum(0.0, wait - hidden)
    hops = np.cumsum(np.append(0.0, hop[1:]))
    there, back = (hops + np.cumsum(way[0]) - way[0] for way in (forward, backward))
    return float((there + busy + np.maximum(back, update)).max()) * (1 - SLACK)


def _stages_at(
    place: Place, grid: Grid, first: npt.NDArray[np.int64], received: Array, model: CostModel, strategy: LayerStrategy
) -> tuple[Array, Array, Array, Array]:
    """[chunks, stages] forward, backward and [stages] update seconds, and bytes, if all stages were at this place.

    first: [chunks * stages] first layer of every chunk.  received: bytes of each chunk's input.
    """
    slot, costs = model.slot(place, grid.tensor, strategy), model.layer_costs(place, grid.tensor, strategy)
    ring = in_flight(grid.schedule, grid.stages, 0, grid.chunks, grid.micro_batches)
    passes = costs.forward + costs.forward_tensor, costs.backward + costs.backward_tensor
    rows = np.array([*passes, costs.update, costs.state, costs.activations])
    forward, backward, update, state, saved = np.add.reduceat(rows, first, axis=1).reshape(5, -1, grid.stages)
    buffers = 2 * (received + np.append(received[1:], 0.0))
    largest = [
        values.reshape(saved.shape).max(axis=0) for values in (np.maximum.reduceat(costs.working, first), buffers)
    ]
    used = state.sum(axis=0) + slot.state + ring * (saved.max(axis=0) + slot.output) + sum(largest)
    return forward, backward, update.sum(axis=0) + slot.seconds(used=False), used
