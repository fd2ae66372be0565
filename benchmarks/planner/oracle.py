"""Every plan of a decision set, written down without any of the planner's shortcuts, and the fastest of them.

The decision sets are those that `jhpt.planner.search.spmd` and `jhpt.planner.search.general.search` state.  A stage is summed up layer by
layer, once for all plans that have it; whole plans are timed by the schedule, many at a time.  What one SPMD program
makes of a layer is derived here anew, from seconds and bytes of the plain layer and from collectives.  That all this is
what `jhpt.planner.cost.estimate.price` says of each plan is tested.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jhpt.core.plan import Chunk, Plan, Schedule, Stage, Zero, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.communication import all_gather, all_reduce, reduce_scatter
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.memory import work_bytes
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.search.request import Request
from jhpt.planner.search.solve import Space

ChunkDraft = tuple[int, tuple[int, ...]]
"""First layer, tensor degree of every layer."""

StageDraft = tuple[int, int, tuple[ChunkDraft, ...]]
"""First device, devices, chunks."""


class Draft(NamedTuple):
    """A plan as plain tuples."""

    micro_batches: int
    zero: Zero
    recompute: bool
    schedule: Schedule
    stages: tuple[StageDraft, ...]


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Seconds of the fastest plan that fits (inf: none does), the plan, and how many there were."""

    seconds: float
    draft: Draft | None
    plans: int


def optimum(asked: Request, model: CostModel, space: Space) -> Optimum:
    """The fastest of all plans of a space."""
    groups: dict[tuple[object, ...], list[Draft]] = defaultdict(list)
    plans = 0
    for plans, draft in enumerate(drafts(asked, model, space), 1):  # noqa: B007
        groups[*draft[:4], len(draft.stages), len(draft.stages[0][2])].append(draft)
    pricer = _Pricer(asked, model, space)
    least, chosen = math.inf, None
    for group in groups.values():
        seconds = pricer.seconds(group)
        at = int(np.argmin(seconds))
        if seconds[at] < least:
            least, chosen = float(seconds[at]), group[at]
    return Optimum(seconds=least, draft=chosen, plans=plans)


def best(plans: Iterable[Plan], model: CostModel) -> tuple[float, Plan | None, int]:
    """(seconds, plan, how many were priced) of the fastest that fits, each priced by itself."""
    least, chosen, priced = math.inf, None, 0
    for plan in plans:
        priced += 1
        estimate = price(plan, model)
        if estimate.fits and estimate.seconds < least:
            least, chosen = estimate.seconds, plan
    return least, chosen, priced


def spmd_plans(asked: Request, model: CostModel) -> Iterator[Plan]:
    """All plans of space="spmd"."""
    return (plan_of(draft, asked, model, "spmd") for draft in drafts(asked, model, "spmd"))


def general_plans(asked: Request, model: CostModel) -> Iterator[Plan]:
    """All plans of space="general"."""
    return (plan_of(draft, asked, model, "general") for draft in drafts(asked, model, "general"))


def plan_of(draft: Draft, asked: Request, model: CostModel, space: Space) -> Plan:
    """The plan that a draft means."""
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space=space,
        batch=asked.batch,
        micro_batches=draft.micro_batches,
        schedule=draft.schedule,
        zero=draft.zero,
        recompute=draft.recompute,
        stages=tuple(
            Stage(
                device=device,
                devices=devices,
                chunks=tuple(Chunk(first=first, runs=runs_of(list(degrees))) for first, degrees in chunks),
            )
            for device, devices, chunks in draft.stages
        ),
    )


# The decision sets.


def drafts(asked: Request, model: CostModel, space: Space) -> Iterator[Draft]:
    """All plans of a space."""
    of_space = _spmd_stages if space == "spmd" else _general_stages
    for m, zero, recompute in itertools.product(asked.micro_batches, asked.zero, asked.recompute):
        for schedule, stages in of_space(model, LayerStrategy(asked.batch // m, zero, recompute), m):
            yield Draft(m, zero, recompute, schedule, stages)


def _spmd_stages(
    model: CostModel, strategy: LayerStrategy, m: int
) -> Iterator[tuple[Schedule, tuple[StageDraft, ...]]]:
    n, k, b = model.num_layers, model.cluster.num_devices, strategy.micro_batch
    for devices in range(1, k + 1):
        for degrees in itertools.product(*_degrees(model, 0, n, devices, b)):
            if _one_mesh(degrees) and (model.tied_layer is None or degrees[0] == degrees[model.tied_layer]):
                yield "1f1b", ((0, devices, ((0, degrees),)),)
    for t, d in itertools.product(_common_degrees(model), range(1, k + 1)):
        if d * t > k or b % d:
            continue
        for s in range(2, min(n, k // (d * t)) + 1):
            for edges in _compositions(n, s):
                yield "1f1b", _spmd_row(edges, s, d * t, t)
                yield "gpipe", _spmd_row(edges, s, d * t, t)
            for v in (2, 3, 4):
                if m % s == 0 and s * v <= n:
                    edges = _balanced_edges(model, strategy, d * t, t, s * v)
                    yield "interleaved", _spmd_row(edges, s, d * t, t)


def _one_mesh(degrees: Iterable[int]) -> bool:
    """Whether of any two degrees one divides the other."""
    return all(high % low == 0 for low, high in itertools.pairwise(sorted(degrees)))


def _spmd_row(edges: tuple[int, ...], s: int, devices: int, t: int) -> tuple[StageDraft, ...]:
    chunks = [(first, (t,) * (stop - first)) for first, stop in itertools.pairwise(edges)]
    return tuple((i * devices, devices, tuple(chunks[i::s])) for i in range(s))


def _balanced_edges(model: CostModel, strategy: LayerStrategy, devices: int, t: int, parts: int) -> tuple[int, ...]:
    """The smallest largest range; of several the one whose ranges, from the first, are longest."""
    rows = [_piped_layer(model, 0, devices, t, strategy, layer) for layer in range(model.num_layers)]
    work = [row.forward + row.backward for row in rows]
    every = [
        (max(sum(work[a:b]) for a, b in itertools.pairwise(edges)), edges) for edges in _compositions(len(work), parts)
    ]
    least = min(largest for largest, _ in every)
    return max(edges for largest, edges in every if largest <= least * (1 + 1e-12))


def _general_stages(
    model: CostModel, strategy: LayerStrategy, m: int
) -> Iterator[tuple[Schedule, tuple[StageDraft, ...]]]:
    n, k = model.num_layers, model.cluster.num_devices
    for s in range(1, min(n, k) + 1):
        for edges, used in itertools.product(_compositions(n, s), range(s, k + 1)):
            for borders in _compositions(used, s):
                ranges = list(zip(itertools.pairwise(edges), itertools.pairwise(borders), strict=True))
                choices = [itertools.product(*_degrees(model, a, b, y - x)) for (a, b), (x, y) in ranges]
                for degrees in itertools.product(*choices):
                    row = tuple((x, y - x, ((a, d),)) for ((a, _), (x, y)), d in zip(ranges, degrees, strict=True))
                    yield "1f1b", row
                    if s > 1:
                        yield "gpipe", row


def _compositions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Edges (0, ..., n) of all ways to cut n into non-empty ranges."""
    for cuts in itertools.combinations(range(1, n), parts - 1):
        yield (0, *cuts, n)


def _common_degrees(model: CostModel) -> list[int]:
    layers = range(model.num_layers)
    return [t for t in range(1, model.cluster.num_devices + 1) if all(model.allowed(layer, t) for layer in layers)]


def _degrees(model: CostModel, first: int, stop: int, devices: int, even: int | None = None) -> list[list[int]]:
    """What each layer may choose on so many devices; even: a micro-batch that the data degree must divide."""
    fit = [t for t in range(1, devices + 1) if devices % t == 0 and (even is None or even % (devices // t) == 0)]
    return [[t for t in fit if model.allowed(layer, t)] for layer in range(first, stop)]


def count(asked: Request, model: CostModel, space: Space) -> int:
    """How many drafts there are, without writing them down."""
    treatments = len(asked.zero) * len(asked.recompute)
    if space == "general":
        return len(asked.micro_batches) * treatments * _count_general(model)
    return sum(treatments * _count_spmd(model, asked.batch // m, m) for m in asked.micro_batches)


def _count_spmd(model: CostModel, b: int, m: int) -> int:
    n, k = model.num_layers, model.cluster.num_devices
    total = sum(_count_single(model, _degrees(model, 0, n, devices, b)) for devices in range(1, k + 1))
    for t, d in itertools.product(_common_degrees(model), range(1, k + 1)):
        if d * t <= k and b % d == 0:
            for s in range(2, min(n, k // (d * t)) + 1):
                interleaved = sum(m % s == 0 and s * v <= n for v in (2, 3, 4))
                total += 2 * math.comb(n - 1, s - 1) + interleaved
    return total


def _count_single(model: CostModel, choices: list[list[int]]) -> int:
    """Assignments of degrees to the layers of one stage, by the degrees in use and that of the first layer."""
    ways: dict[tuple[frozenset[int], int], int] = {(frozenset(), t): 1 for t in choices[0]}
    for layer, degrees in enumerate(choices):
        grown: dict[tuple[frozenset[int], int], int] = defaultdict(int)
        for ((used, first), count), t in itertools.product(ways.items(), degrees):
            bound_to_first = layer in (0, model.tied_layer)
            if _one_mesh(used | {t}) and not (bound_to_first and t != first):
                grown[used | {t}, first] += count
        ways = grown
    return sum(ways.values())


def _count_general(model: CostModel) -> int:
    """ways[i, o]: rows of stages for layers i.. on devices o..; two schedules for all but single stages."""
    n, k = model.num_layers, model.cluster.num_devices
    each = {devices: [len(found) for found in _degrees(model, 0, n, devices)] for devices in range(1, k + 1)}
    ways = {(n, o): 1 for o in range(k + 1)}
    for o in range(k, -1, -1):
        for i in range(n):
            ways[i, o] = sum(
                math.prod(each[devices][i:stop]) * ways[stop, o + devices]
                for stop in range(i + 1, n + 1)
                for devices in range(1, k - o + 1)
            )
    return 2 * ways[0, 0] - sum(math.prod(each[devices]) for devices in range(1, k + 1))


# What a layer costs.


class _Layer(NamedTuple):
    """Seconds of a micro-batch in each pass, with their communication; of gradients beside the last backward; of all
    that is done once after it; bytes: for good, by micro-batch in flight, while it runs."""

    forward: float
    backward: float
    gradients: float
    once: float
    state: float
    saved: float
    working: float


def _own_layer(model: CostModel, device: int, devices: int, t: int, strategy: LayerStrategy, layer: int) -> _Layer:
    """In a program of its stage's own."""
    c = model.layer_costs(model.places.at(device, devices), t, strategy)
    passes = (c.forward + c.forward_tensor, c.backward + c.backward_tensor)
    arrays = (*passes, c.gradients, c.update, c.state, c.activations, c.working)
    return _Layer(*(float(values[layer]) for values in arrays))


def _single_layer(
    model: CostModel, device: int, devices: int, t: int, strategy: LayerStrategy, layer: int, *, late: bool = False
) -> _Layer:
    """In the one program of one stage; late: parameters travel before and after the passes, not beside them."""
    place, kind, data = model.places.at(device, devices), model.kinds[model.index[layer]], devices // t
    piped, late = late, late or not model.cluster.overlap
    end = layer in (0, model.num_layers - 1)
    zero = min(strategy.zero, 1) if end else strategy.zero
    plain = _own_layer(model, device, devices, t, LayerStrategy(strategy.micro_batch, 0, False), layer)
    size, group = kind.parameters / t * model.profile.bytes_per_weight, place.data_group(t)
    gather, scatter = all_gather(group, size), reduce_scatter(group, size)
    forward, backward, saved, working = plain.forward, plain.backward, plain.saved, 0.0
    gradients = {0: all_reduce(group, size), 1: scatter, 3: 0.0}[zero]
    gathered = {0: 0.0, 1: gather if late else max(0.0, gather - forward), 3: 0.0}[zero]
    local = -(-strategy.micro_batch // data)
    if strategy.recompute and not end:
        backward, working = backward + forward, saved
        saved = float(model.boundary[layer - 1]) * local
    if kind.tensors:
        working = local * work_bytes(kind, t, 1, causal=model.profile.causal)
    # Its gradient, and that of the layer before on its way to the other ranks; ZeRO-3: its weights as they are read, of
    # which half are gone when that comes, and where they come from others the next ones.
    given = not end and not late and data > 1
    working += size + (size if given else 0)
    if zero == 3:
        working += size / 2 + (size if data > 1 else 0)
    if zero == 3 and data == 1:
        # Nothing comes from others, but nobody rounded the weights before.
        rounded = 0.0 if model.profile.used_as_stored else _rounded(model, kind.parameters / t, place.slowdown)
        forward, backward = forward + rounded, backward + rounded
    elif zero == 3:
        if not model.cluster.overlap:
            forward, backward = forward + gather, backward + gather + scatter
        elif late:
            forward, backward = max(forward, gather), max(backward, gather) + scatter
        else:
            forward, backward = max(forward, gather), max(backward, gather + scatter)
    once = _updated(model, kind.parameters / t, zero, data, place.slowdown) + gathered
    state = kind.parameters / t * _stored(model, strategy, data, given=given, slot=piped, end=end and not piped)
    if layer == model.num_layers - 1:
        # Beside what it keeps its gradient, in the compute dtype; with one stage, before all other gradients come.
        at_work = saved + local * kind.activation_bytes / t * model.profile.bytes_per_weight / 4
        if piped:  # its gradient is the slot's
            working = at_work
        else:
            coming = _coming(model, strategy, t, data, given=data > 1 and not late)
            working, saved = max(working, at_work - coming), 0.0
    if late:
        return _Layer(forward, backward, 0.0, once + gradients, state, saved, working)
    return _Layer(forward, backward, gradients, once, state, saved, working)


def _piped_layer(model: CostModel, device: int, devices: int, t: int, strategy: LayerStrategy, layer: int) -> _Layer:
    """In the one program of several stages: of the ends only the passes, the rest is the slot's."""
    row = _single_layer(model, device, devices, t, strategy, layer, late=True)
    if layer not in (0, model.num_layers - 1):
        return row
    if layer:
        row = row._replace(forward=0.0, backward=row.forward + row.backward)
    return row._replace(once=0.0, state=0.0, saved=0.0, working=row.working if layer else row.saved)


class _Ends(NamedTuple):
    """What a stage of a pipeline has for both ends: seconds on every stage and on those that use it, bytes."""

    once: float
    used: float
    state: float
    saved: float


def _embedding_and_head(model: CostModel, device: int, devices: int, t: int, strategy: LayerStrategy) -> _Ends:
    place, data = model.places.at(device, devices), devices // t
    first, last = (model.kinds[model.index[layer]] for layer in (0, -1))
    parameters = max(first.parameters, last.parameters + last.tied_parameters) / t
    size, group = parameters * model.profile.bytes_per_weight, place.data_group(t)
    zero = 1 if strategy.zero and data > 1 else 0
    # Between two devices alone: what ZeRO-3 leaves of it.
    plain = model.layer_costs(place, t, LayerStrategy(strategy.micro_batch, 3, False))
    return _Ends(
        once=_updated(model, parameters, zero, data, place.slowdown) + (all_gather(group, size) if zero else 0.0),
        used=(reduce_scatter(group, size) if zero else all_reduce(group, size)) + float(plain.tied[-1]),
        state=parameters * _stored(model, replace(strategy, zero=min(strategy.zero, 1)), data, given=False, slot=True),
        saved=-(-strategy.micro_batch // data) * max(map(float, model.boundary[:-1])),
    )


def _updated(model: CostModel, parameters: float, zero: int, data: int, slowdown: float) -> float:
    return parameters / (data if zero else 1) * model.profile.update_seconds * slowdown


def _rounded(model: CostModel, parameters: float, slowdown: float) -> float:
    """Seconds to read weights of one of both widths and to write them in the other: 4 bytes and 2."""
    return parameters * (4 + 2) / model.cluster.nodes[0].device.memory_bandwidth * slowdown


def _stored(model: CostModel, how: LayerStrategy, data: int, *, given: bool, slot: bool, end: bool = False) -> float:
    """Bytes of a parameter's weight, gradient and optimizer's state in one SPMD program, which stores them in float32.

    given: gradients go to their rank layer by layer.  slot: in a pipeline.  end: first or last layer of one stage.
    """
    width = model.profile.bytes_per_weight
    zero = min(how.zero, 1) if end else how.zero
    share = model.profile.state_bytes - 2 * width + (4 if width == 4 else 0)
    # Of one and of two micro-batches that of the ends is gone by the time all other gradients are there.
    gone = end and (how.two_micro_batches or not how.several_micro_batches)
    used = 0.0 if gone else _copied(model, zero, data)
    return used + share / (data if zero else 1) + _gradient(model, how, data, given=given, slot=slot, end=end)


def _copied(model: CostModel, zero: int, data: int) -> float:
    """Bytes of a weight to compute with: over one rank ZeRO-1 is as none, ZeRO-3 has it of no layer but one at work."""
    width = model.profile.bytes_per_weight
    return width if zero < 3 and (width != 4 or (zero == 1 and data > 1)) else 0.0


def _gradient(model: CostModel, how: LayerStrategy, data: int, *, given: bool, slot: bool, end: bool) -> float:
    """Of several micro-batches added up in float32, of one as it was computed, but in float32 too without ZeRO, as
    ZeRO-1 over one rank is; ZeRO-3 over one rank is not."""
    width = model.profile.bytes_per_weight
    if end:
        return 4 + width if how.several_micro_batches else width
    if how.zero == 3:
        return (4 if how.several_micro_batches or slot else width) / data
    if how.zero == 0 or data == 1:
        return 4.0
    return (4 if how.several_micro_batches else 0.0 if given else width) + (width / data if given else 0.0)


def _coming(model: CostModel, how: LayerStrategy, t: int, data: int, *, given: bool) -> float:
    """Bytes that are not there while the last layer runs: of one micro-batch gradients, of two what widening the first
    one's takes.  Of an end this micro-batch's gradient; in its place there is the copy that is gone later."""
    width, embedding_and_head, found = model.profile.bytes_per_weight, (0, model.num_layers - 1), 0.0
    few = how.two_micro_batches or not how.several_micro_batches
    for layer, index in enumerate(model.index):
        if layer in embedding_and_head:
            one = width - (_copied(model, min(how.zero, 1), data) if few else 0.0)
        elif how.several_micro_batches:
            one = (4 - width) / (data if how.zero == 3 else 1) if how.two_micro_batches else 0.0
        else:
            one = _gradient(model, how, data, given=given, slot=False, end=False)
        found += model.kinds[index].parameters / t * one
    return found


# What they cost.


class _Sum(NamedTuple):
    """One stage: seconds by chunk, seconds at the end, bytes.  bytes: all but the activations of micro-batches."""

    forward: list[float]
    backward: list[float]
    sync: float
    update: float
    bytes: float
    activations: float
    memory: float


class _Pricer:
    """Seconds of drafts; every distinct stage and transfer is summed up once."""

    def __init__(self, asked: Request, model: CostModel, space: Space) -> None:
        self.asked, self.model, self.space = asked, model, space
        self._tables: dict[tuple[object, ...], _Layer] = {}
        self._sums: dict[tuple[object, ...], _Sum] = {}
        self._cuts: dict[tuple[object, ...], float] = {}

    def seconds(self, group: list[Draft]) -> np.ndarray:
        """Seconds of drafts that differ in their stages only; inf where one does not fit."""
        draft = group[0]
        m, s, v = draft.micro_batches, len(draft.stages), len(draft.stages[0][2])
        strategy = LayerStrategy(
            self.asked.batch // m,
            draft.zero,
            draft.recompute,
            several_micro_batches=m > 1,
            two_micro_batches=m == 2 and s == 1,
        )
        numbers: dict[StageDraft, int] = {}
        index = np.array([[numbers.setdefault(stage, len(numbers)) for stage in d.stages] for d in group])
        sums = [self._sum(stage, strategy, s) for stage in numbers]
        forward, backward, sync, update, fixed, activations, memory = (
            np.array(column)[index] for column in zip(*sums, strict=True)
        )
        slots = [in_flight(draft.schedule, s, 0 if self.space == "spmd" else i, v, m) for i in range(s)]
        fits = (fixed + np.array(slots) * activations <= memory).all(axis=1) & np.isfinite(forward).all(axis=(1, 2))
        seconds = np.full(len(group), math.inf)
        if fits.any():
            rows = [self._row_cuts(d.stages, strategy) for d, fit in zip(group, fits, strict=True) if fit]
            cut = np.array(rows, dtype=float).reshape(len(rows), s * v - 1)
            times = forward[fits], backward[fits], cut, sync[fits], update[fits]
            seconds[fits] = step_seconds(draft.schedule, m, *times, overlap=self.model.cluster.overlap)
        return seconds

    def _sum(self, stage: StageDraft, strategy: LayerStrategy, stages: int) -> _Sum:
        device, devices, chunks = stage
        key = (self.model.places.offset_class(device), devices, chunks, strategy, stages)
        if key not in self._sums:
            self._sums[key] = self._summed(stage, strategy, stages)
        return self._sums[key]

    def _summed(self, stage: StageDraft, strategy: LayerStrategy, stages: int) -> _Sum:
        device, devices, chunks = stage
        many = stages > 1
        model, place = self.model, self.model.places.at(device, devices)
        n = model.num_layers
        forward, backward = [0.0] * len(chunks), [0.0] * len(chunks)
        sync = update = state = activations = working = transfers = 0.0
        waiting = 0.0  # gradients of later chunks that are still to be reduced when a chunk's last backward starts
        replicas = devices // chunks[0][1][0]
        local = -(-strategy.micro_batch // replicas)
        for c in reversed(range(len(chunks))):
            first, degrees = chunks[c]
            stop = first + len(degrees)
            rows = [self._layer(device, devices, t, strategy, layer, stages) for layer, t in enumerate(degrees, first)]
            reshard = sum(
                model.reshard_seconds(place, layer, before, after, strategy.micro_batch)
                for layer, (before, after) in enumerate(itertools.pairwise(degrees), first)
            )
            forward[c] = sum(row.forward for row in rows) + reshard / 2
            worked = reduced = 0.0
            for row in reversed(rows):
                worked += row.backward
                reduced = max(reduced, worked) + row.gradients
            backward[c] = worked + reshard / 2
            gradients = sum(row.gradients for row in rows)
            sync = max(backward[c], reduced + reshard / 2, waiting + gradients)
            waiting = max(0.0, sync - stages * backward[c])
            update += sum(row.once for row in rows)
            state += sum(row.state for row in rows)
            activations = max(activations, sum(row.saved for row in rows))
            working = max(working, *(row.working for row in rows))
            come, note_unexplored_bound = (
                model.boundary[first - 1] if first else 0.0,
                model.boundary[stop - 1] if stop < n else 0.0,
            )
            transfers = max(transfers, 2.0 * local * float(come + note_unexplored_bound))
        seconds, copy = self._tied(stage, strategy)
        update, state = update + seconds, state + copy
        if many and self.space == "spmd":
            embedding_and_head = _embedding_and_head(model, device, devices, chunks[0][1][0], strategy)
            uses = chunks[0][0] == 0 or chunks[-1][0] + len(chunks[-1][1]) == n
            update += embedding_and_head.once + (embedding_and_head.used if uses else 0.0)
            state, activations = state + embedding_and_head.state, activations + embedding_and_head.saved
        fixed = state + working + (transfers if many else 0.0)
        return _Sum(forward, backward, sync, update, fixed, activations, place.memory)

    def _tied(self, stage: StageDraft, strategy: LayerStrategy) -> tuple[float, float]:
        """(seconds, bytes) of a parameter that the first layer shares with a layer of another stage, no end in spmd."""
        device, devices, chunks = stage
        tied = self.model.tied_layer
        degree = {layer: t for first, degrees in chunks for layer, t in enumerate(degrees, first)}
        if tied is None or (0 in degree) == (tied in degree):
            return 0.0, 0.0
        if self.space == "spmd" and tied == self.model.num_layers - 1:
            return 0.0, 0.0
        t = degree[tied if tied in degree else 0]
        costs = self.model.layer_costs(self.model.places.at(device, devices), t, strategy)
        copy = float(costs.tied_bytes[tied])
        if self.space == "spmd":
            parameters = self.model.kinds[self.model.index[tied]].tied_parameters / t
            copy = parameters * _stored(self.model, strategy, devices // t, given=False, slot=True)
        return float(costs.tied[tied]), copy if tied in degree else 0.0

    def _row_cuts(self, stages: tuple[StageDraft, ...], strategy: LayerStrategy) -> list[float]:
        """Seconds of the transfers between virtual stages, in order."""
        s, v = len(stages), len(stages[0][2])
        return [self._cut(stages, divmod(virtual, s), divmod(virtual + 1, s), strategy) for virtual in range(s * v - 1)]

    def _cut(
        self, stages: tuple[StageDraft, ...], at: tuple[int, int], to: tuple[int, int], strategy: LayerStrategy
    ) -> float:
        """From chunk and stage `at` to chunk and stage `to`."""
        sender, receiver = stages[at[1]], stages[to[1]]
        (_, degrees), (start, their_degrees) = sender[2][at[0]], receiver[2][to[0]]
        sides = (
            (sender[0], sender[1], sender[1] // degrees[-1]),
            (receiver[0], receiver[1], receiver[1] // their_degrees[0]),
        )
        key = (start, sides, strategy.micro_batch)
        if key not in self._cuts:
            self._cuts[key] = self.model.cut_seconds(start - 1, *sides, strategy.micro_batch)
        return self._cuts[key]

    def _layer(self, device: int, devices: int, t: int, strategy: LayerStrategy, layer: int, stages: int) -> _Layer:
        key = (self.model.places.offset_class(device), devices, t, strategy, layer, stages > 1)
        if key not in self._tables:
            one_program = _piped_layer if stages > 1 else _single_layer
            of_space = one_program if self.space == "spmd" else _own_layer
            self._tables[key] = of_space(self.model, device, devices, t, strategy, layer)
        return self._tables[key]
