"""Every plan of a decision set, one by one.

The decision sets are those of `jhpt.planner.search.spmd` and `jhpt.planner.search.general`.  On a mixed cluster the
latter has a plan once for every order of the kinds of nodes in which its stages lie in a row, and plans of one stage
with samples by data rank: one for all ways to deal them out in which no kind of device has more than a given number.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.planner.layer_costs import pipelined_layer
from jhpt.core.plan import ONE_CHUNK, Schedule, Space, Zero
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Request

ChunkDraft = tuple[int, tuple[int, ...]]
"""(first layer, tensor degree of every layer)."""

StageDraft = tuple[Sequence[int], tuple[ChunkDraft, ...]]
"""(devices in the order of their ranks, chunks)."""


class Draft(NamedTuple):
    """A plan as plain tuples."""

    micro_batches: int
    zero: Zero
    recompute: bool
    sequence: bool
    zero_ranks: int | None
    schedule: Schedule
    again: int | None
    """How many first blocks are recomputed; None: all, or none without recomputation."""
    stages: tuple[StageDraft, ...]
    samples: tuple[int, ...] | None = None
    """Of a micro-batch by data rank; None: the same number on all."""


def drafts(request: Request, model: CostModel, space: Space) -> Iterator[Draft]:
    """All plans of a space."""
    of_space = _spmd_stages if space == "spmd" else _general_stages
    sequences = (False, True) if request.sequence and space == "spmd" and model.profile.sample_tokens else (False,)
    decisions = itertools.product(request.micro_batches, request.zero, request.recompute, sequences)
    for m, zero, recompute, sequence in decisions:
        if zero not in _levels(request, space, m):
            continue
        strategy = LayerStrategy(request.batch // m, zero, recompute, sequence=sequence)
        if space == "general":
            for stage, samples in _dealt(model, request.batch // m):
                yield Draft(m, zero, recompute, sequence, None, "eager-1f1b", None, (stage,), samples)
        for schedule, stages in of_space(model, strategy, m):
            if not sequence or _cuts_evenly(stages, model):
                groups = _node_ranks(model, space, zero, stages)
                numbers = _numbers(request, model, space, recompute, stages)
                for ranks, again in itertools.product((None, *groups), (None, *numbers)):
                    yield Draft(m, zero, recompute, sequence, ranks, schedule, again, stages)


def _alike(stages: tuple[StageDraft, ...]) -> int | None:
    """The tensor degree of all layers; None: they differ."""
    degrees = {t for _, chunks in stages for _, layers in chunks for t in layers}
    return degrees.pop() if len(degrees) == 1 else None


def _node_ranks(model: CostModel, space: Space, zero: Zero, stages: tuple[StageDraft, ...]) -> tuple[int, ...]:
    """The data ranks of a node, if hybrid sharding may shard over them: on one stage of one degree, of whole nodes."""
    t = _alike(stages)
    if space == "general" or not zero or len(stages) > 1 or t is None or model.places.per_node % t:
        return ()
    each, data = model.places.per_node // t, len(stages[0][0]) // t
    return (each,) if 1 < each < data and data % each == 0 else ()


def _numbers(
    request: Request, model: CostModel, space: Space, recompute: bool, stages: tuple[StageDraft, ...]
) -> range:
    """How many first blocks alone may be recomputed: on one stage of one degree, where recomputation is open."""
    is_open = space == "spmd" and recompute and len(request.recompute) > 1
    return range(1, model.num_layers - 2) if is_open and len(stages) == 1 and _alike(stages) else range(0)


def _levels(request: Request, space: Space, m: int) -> tuple[Zero, ...]:
    """Programs per stage have no ZeRO-2, and with one micro-batch it is ZeRO-1."""
    known = space == "spmd" and not (m == 1 and 1 in request.zero)
    return tuple(zero for zero in request.zero if known or zero != 2)


def _cuts_evenly(stages: tuple[StageDraft, ...], model: CostModel) -> bool:
    """Whether some layers have several tensor ranks, and each number of these divides a sample's tokens."""
    used = {t for _, chunks in stages for _, degrees in chunks for t in degrees}
    return used != {1} and not any((model.profile.sample_tokens or 1) % t for t in used)


def _spmd_stages(
    model: CostModel, strategy: LayerStrategy, m: int
) -> Iterator[tuple[Schedule, tuple[StageDraft, ...]]]:
    n, k, b = model.num_layers, model.cluster.num_devices, strategy.micro_batch
    for devices in range(1, k + 1):
        for degrees in itertools.product(*_degrees(model, 0, n, devices, b)):
            if _one_mesh(degrees) and (model.tied_layer is None or degrees[0] == degrees[model.tied_layer]):
                yield "1f1b", ((range(devices), ((0, degrees),)),)
    for t, d in itertools.product(_common_degrees(model), range(1, k + 1)):
        if d * t > k or b % d:
            continue
        for s in range(2, min(n, k // (d * t)) + 1):
            for edges in _compositions(n, s):
                for schedule in ONE_CHUNK:
                    yield schedule, _spmd_row(edges, s, d * t, t)
            for v in (2, 3, 4):
                if m % s == 0 and s * v <= n:
                    for edges in _balanced_edges(model, strategy, d * t, t, s * v):
                        yield "interleaved", _spmd_row(edges, s, d * t, t)


def _one_mesh(degrees: Iterable[int]) -> bool:
    """Whether one of any two degrees divides the other."""
    return all(high % low == 0 for low, high in itertools.pairwise(sorted(degrees)))


def _spmd_row(edges: tuple[int, ...], s: int, devices: int, t: int) -> tuple[StageDraft, ...]:
    chunks = [(first, (t,) * (stop - first)) for first, stop in itertools.pairwise(edges)]
    return tuple((range(i * devices, (i + 1) * devices), tuple(chunks[i::s])) for i in range(s))


def _balanced_edges(
    model: CostModel, strategy: LayerStrategy, devices: int, t: int, parts: int
) -> set[tuple[int, ...]]:
    """By the work of layers with and without recomputation: the cut whose largest range is smallest, the first ranges
    as long as possible, and the cut with the least squares, the last ranges as long as possible."""
    place, cuts = model.places.at(0, devices), set()
    for recompute in (False, True):
        own = replace(strategy, recompute=recompute)
        rows = [pipelined_layer(model, place, t, own, layer) for layer in range(model.num_layers)]
        work = [row.forward + row.backward for row in rows]
        every = [
            (edges, [sum(work[a:b]) for a, b in itertools.pairwise(edges)]) for edges in _compositions(len(work), parts)
        ]
        least = min(max(ranges) for _, ranges in every)
        cuts.add(max(edges for edges, ranges in every if max(ranges) <= least * (1 + 1e-12)))
        squares = [(edges, sum(seconds**2 for seconds in ranges)) for edges, ranges in every]
        least = min(total for _, total in squares)
        cuts.add(
            min((edges for edges, total in squares if total <= least * (1 + 1e-12)), key=lambda edges: edges[::-1])
        )
    return cuts


def _general_stages(
    model: CostModel, strategy: LayerStrategy, m: int
) -> Iterator[tuple[Schedule, tuple[StageDraft, ...]]]:
    n, k = model.num_layers, model.cluster.num_devices
    for (numbers, borders), s in itertools.product(_rows(model), range(1, min(n, k) + 1)):
        for edges, spans in itertools.product(_compositions(n, s), _spans(0, s, k, borders)):
            ranges = list(zip(itertools.pairwise(edges), spans, strict=True))
            choices = [itertools.product(*_degrees(model, a, b, y - x)) for (a, b), (x, y) in ranges]
            for degrees in itertools.product(*choices):
                row = tuple((numbers[x:y], ((a, d),)) for ((a, _), (x, y)), d in zip(ranges, degrees, strict=True))
                yield "eager-1f1b", row
                if s > 1:
                    yield "gpipe", row


def _dealt(model: CostModel, micro_batch: int) -> Iterator[tuple[StageDraft, tuple[int, ...]]]:
    """Plans of one stage on all devices of several kinds whose data ranks, each of one kind, have samples of their own.

    Only the most samples of a rank of each kind counts.
    """
    if not model.cluster.mixed:
        return
    order, _ = next(_rows(model))
    kinds = {model.places.kind_of(device) for device in order}
    some = (each for size in range(2, len(kinds) + 1) for each in itertools.combinations(sorted(kinds), size))
    for chosen, t in itertools.product(some, _common_degrees(model)):
        members = sorted(
            (device for device in order if model.places.kind_of(device) in chosen), key=model.places.kind_of
        )
        of_device = [model.places.kind_of(device) for device in members]
        ranks = of_device[::t]
        if len(members) % t or any(kind != ranks[at // t] for at, kind in enumerate(of_device)):
            continue
        for most in itertools.product(range(1, micro_batch + 1), repeat=len(chosen)):
            if samples := _filled([dict(zip(chosen, most, strict=True))[kind] for kind in ranks], micro_batch):
                yield (tuple(members), ((0, (t,) * model.num_layers),)), samples


def _filled(most: list[int], total: int) -> tuple[int, ...] | None:
    """Numbers of this sum, from 1 up to `most`, of which every different one is reached; None: there are none."""
    samples, first = [1] * len(most), {number: at for at, number in reversed(list(enumerate(most)))}
    for number, at in first.items():
        samples[at] = number
    for at, number in enumerate(most):
        samples[at] += min(number - samples[at], max(0, total - sum(samples)))
    return tuple(samples) if sum(samples) == total else None


def _rows(model: CostModel) -> Iterator[tuple[Sequence[int], list[int]]]:
    """The devices in every order of the kinds of nodes, and the first positions of nodes, where stages may begin.

    If all nodes are equal, there is one order, and a stage begins where the one before it ends.
    """
    if not model.cluster.mixed:
        yield range(model.cluster.num_devices), []
        return
    nodes: dict[str, list[range]] = defaultdict(list)
    stop = 0
    for node in model.cluster.nodes:
        for _ in range(node.count):
            nodes[node.kind].append(range(stop, stop := stop + node.devices))
    for order in itertools.permutations(nodes):
        row = [node for kind in order for node in nodes[kind]]
        borders = list(itertools.accumulate(map(len, row[:-1]), initial=0))
        yield tuple(itertools.chain(*row)), borders


def _spans(free: int, s: int, k: int, borders: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Positions [start, stop) of s stages in a row of k devices, the first `free` of which are taken."""
    if s == 0:
        yield ()
        return
    for start in (free, *(border for border in borders if border > free)):
        for stop in range(start + 1, k - s + 2):
            yield from (((start, stop), *rest) for rest in _spans(stop, s - 1, k, borders))


def _compositions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Edges (0, ..., n) of all ways to cut n into non-empty ranges."""
    for cuts in itertools.combinations(range(1, n), parts - 1):
        yield (0, *cuts, n)


def _common_degrees(model: CostModel) -> list[int]:
    layers = range(model.num_layers)
    return [t for t in range(1, model.cluster.num_devices + 1) if all(model.allowed(layer, t) for layer in layers)]


def _degrees(model: CostModel, first: int, stop: int, devices: int, even: int | None = None) -> list[list[int]]:
    """The tensor degrees of each layer on `devices` devices.  even: a micro-batch that the data degree must divide."""
    fit = [t for t in range(1, devices + 1) if devices % t == 0 and (even is None or even % (devices // t) == 0)]
    return [[t for t in fit if model.allowed(layer, t)] for layer in range(first, stop)]


def count(request: Request, model: CostModel, space: Space) -> int:
    """The number of drafts, without making them."""
    if space == "general":
        levels, choices = {m: len(_levels(request, space, m)) for m in request.micro_batches}, len(request.recompute)
        dealt = sum(levels[m] * len(list(_dealt(model, request.batch // m))) for m in levels)
        return choices * (sum(levels.values()) * _count_general(model) + dealt)
    plain = sum(_count_spmd(model, request, m) for m in request.micro_batches)
    if not request.sequence or not model.profile.sample_tokens:
        return plain
    return plain + sum(_count_spmd(model, request, m, cut=True) for m in request.micro_batches)


def _count_spmd(model: CostModel, request: Request, m: int, *, cut: bool = False) -> int:
    """cut: only plans with sequence parallelism."""
    n, k, tokens = model.num_layers, model.cluster.num_devices, (model.profile.sample_tokens or 1) if cut else 0
    b = request.batch // m
    levels = _levels(request, "spmd", m)
    total = alike = 0
    for devices in range(1, k + 1):
        degrees = [[t for t in each if tokens % t == 0] for each in _degrees(model, 0, n, devices, b)]
        serial = cut and b % devices == 0  # all layers at degree 1
        total += len(levels) * (_count_single(model, degrees) - serial)
    for t, d in itertools.product(_common_degrees(model), range(1, k + 1)):
        if (cut and (t == 1 or tokens % t)) or d * t > k or b % d:
            continue
        one_stage = ((range(d * t), ((0, (t,) * n),)),)
        hybrid = sum(len(_node_ranks(model, "spmd", zero, one_stage)) for zero in levels)
        alike, total = alike + len(levels) + hybrid, total + hybrid
        for s in range(2, min(n, k // (d * t)) + 1):
            total += len(levels) * len(ONE_CHUNK) * math.comb(n - 1, s - 1)
            for zero, v in itertools.product(levels, (2, 3, 4)):
                if m % s == 0 and s * v <= n:
                    strategy = LayerStrategy(b, zero, False, sequence=cut)
                    total += len(_balanced_edges(model, strategy, d * t, t, s * v))
    return len(request.recompute) * total + alike * max(0, n - 3) * (len(request.recompute) > 1)


def _count_single(model: CostModel, choices: list[list[int]]) -> int:
    """Assignments of degrees to the layers of one stage, by the degrees in use and that of the first layer."""
    counts: dict[tuple[frozenset[int], int], int] = {(frozenset(), t): 1 for t in choices[0]}
    for layer, degrees in enumerate(choices):
        grown: dict[tuple[frozenset[int], int], int] = defaultdict(int)
        for ((used, first), count), t in itertools.product(counts.items(), degrees):
            bound_to_first = layer in (0, model.tied_layer)
            if _one_mesh(used | {t}) and not (bound_to_first and t != first):
                grown[used | {t}, first] += count
        counts = grown
    return sum(counts.values())


def _count_general(model: CostModel) -> int:
    """counts[i, o]: rows of stages for layers i.. behind device o; two schedules for all but single stages."""
    n, k, total = model.num_layers, model.cluster.num_devices, 0
    each = {devices: [len(degrees) for degrees in _degrees(model, 0, n, devices)] for devices in range(1, k + 1)}
    for _, borders in _rows(model):
        spans = [[span for (span,) in _spans(o, 1, k, borders)] for o in range(k + 1)]
        counts = {(n, o): 1 for o in range(k + 1)}
        for o, i in itertools.product(range(k, -1, -1), range(n)):
            counts[i, o] = sum(
                math.prod(each[after - start][i:stop]) * counts[stop, after]
                for stop in range(i + 1, n + 1)
                for start, after in spans[o]
            )
        total += 2 * counts[0, 0] - sum(math.prod(each[after - start]) for start, after in spans[0])
    return total
