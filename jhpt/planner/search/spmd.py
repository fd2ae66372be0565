"""The best plan that one SPMD program can run.

Decision set of space="spmd":

    micro-batches   every divisor M of the batch
    grid            S stages x d data x t tensor devices with S d t <= K; the other devices stay idle.  d divides the
                    micro-batch.  All layers have the same t, because equal positions of all stages share one sharding.
                    With S = 1 every layer chooses its own degree among the divisors of d t.  The degrees in use divide
                    each other, because they share a mesh, and two layers that share a parameter have the same degree
    cuts            any S contiguous non-empty ranges of layers
    schedule        1f1b, eager-1f1b, gpipe, or interleaved with v = 2, 3 or 4 chunks per device.  Interleaving requires
                    M to be divisible by S.  It cuts the layers into S v ranges whose largest one is smallest, or that
                    are most even (`grids`), by the seconds without recomputation, or with full recomputation
    ZeRO            0, 1, 2 or 3 if d > 1, else 0 or 3.  ZeRO-3 on one data rank has no compute-dtype copy of weights.
                    With S = 1 and one degree over all d data ranks, or (hybrid sharding) over those of each node, if
                    there are several nodes and all of their devices work
    recomputation   off, or on with any set of a block's named tensors saved, the same in all blocks (`saved_sets`).
                    Sets that another one beats are left out.  With S = 1 and one degree the first blocks may save one
                    set, and the others another one or everything (`other_blocks`).  With one stage, plans that fit
                    without recomputation do not have it
    compression     one of those requested, if a tensor degree is above 1
    sequences       cut over the tensor ranks or not (sequence parallelism), if a tensor degree is above 1, without
                    compression, and if all degrees in use divide the number of tokens.  With one stage this only
                    saves memory, so only plans that would not fit have it

The number of sample chunks is looked up instead of searched (`CostModel.sample_chunks`).  With one stage every layer
has the number that is best in a row of all layers at its degree; in a pipeline all layers have the number that is best
for all of them together.

The head of `jhpt.planner.cost.memory` describes the costs of layers.  gpipe never needs less memory than eager-1f1b on
the same stages, and is faster only where exchanges do not overlap: then those of errors make forward passes wait
(tested).  1f1b never needs more memory than either; nothing runs beside its exchanges.

The search visits grids in the order of a bound that holds for all cuts.  For each grid, best-first search finds the
cuts, guided by a tighter bound (`grids`, `stages`).  `layer_degrees` finds the plans of one stage whose layers differ
in tensor degree.  The plan is proven optimal if no unvisited plan has a bound below its seconds, which is the rule.
Otherwise the least bound of the unvisited plans is reported with the plan.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jhpt.core.config import Compression
from jhpt.core.divisors import divisors
from jhpt.core.plan import Chunk, OtherBlocks, Space, Stage, runs_of
from jhpt.planner.cost.activations import NOTHING
from jhpt.planner.cost.layers import layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.bounds import bounded_grids, interleaved_seconds, with_sets
from jhpt.planner.search.grids import CutSearch, Grid, grid_plan, partitions
from jhpt.planner.search.layer_degrees import Option, Question, chains, costs_at, options
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.saved_sets import SavedSets
from jhpt.planner.search.stages import SLACK

LABELS, EXACT_LAYERS = 192, 24
"""Partial assignments of degrees that are kept per layer if a model has more than `EXACT_LAYERS` layers."""


def search_spmd(request: Request, model: CostModel, incumbent: Incumbent, space: Space = "spmd") -> None:
    """Improves `incumbent` to the best plan of the space, and notes the bound of all plans that were not visited.

    Args:
      space: "general" prices the same plans with a program for each stage, as space="general" runs them.
    """
    if space == "general":
        request = replace(request, sample_chunks=(1,), compression=(None,), sequence=False)
    sets = SavedSets(request, model, space)
    for bound, grid in bounded_grids(request, model, space, sets):
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            break
        cuts = _interleaved_cuts(grid, request, model) if grid.chunks > 1 else ()
        if incumbent.plan is None and sets.smallest and grid.recompute:
            _search_grid(replace(grid, saved=sets.smallest), cuts, request, model, incumbent)
            if incumbent.plan is None:  # then no larger set fits either
                continue
        for least, each in with_sets(grid, request, model, sets, incumbent.cutoff):
            if least < incumbent.cutoff:
                _search_grid(each, cuts, request, model, incumbent)
    stages = mixed_stages(request, model, space, incumbent.cutoff, sets)
    for bound, question in sorted(stages, key=lambda pair: pair[0]):
        if bound >= incumbent.cutoff:
            break
        try_mixed(bound, question, space, request, model, incumbent)


def _search_grid(
    grid: Grid, interleaved: tuple[tuple[int, ...], ...], request: Request, model: CostModel, incumbent: Incumbent
) -> None:
    """Offers the best cuts of the grid.  interleaved: those to choose from where stages have several chunks."""
    if grid.chunks > 1:
        every = [(interleaved_seconds(grid, cuts, request, model), cuts) for cuts in interleaved]
        for bound, cuts in sorted(every):
            if bound < incumbent.cutoff:
                incumbent.offer(grid_plan(grid, cuts, request, model), model)
    elif grid.stages == 1:
        _offer_one_stage(grid, request, model, incumbent)
    else:
        CutSearch(grid, request, model, incumbent).run()


def _offer_one_stage(grid: Grid, request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Offers the plan of the grid; of blocks that save different sets one more where rounding decides."""
    fits = incumbent.offer(grid_plan(grid, (), request, model), model).fits
    others = grid.other_blocks
    if others is not None and not fits and others.after < model.num_layers - 3:
        more = OtherBlocks(after=others.after + 1, saved=others.saved)
        incumbent.offer(grid_plan(replace(grid, other_blocks=more), (), request, model), model)


def _interleaved_cuts(grid: Grid, request: Request, model: CostModel) -> tuple[tuple[int, ...], ...]:
    """The same cuts for all sets of saved activations, so that no set is faster with the cuts of another."""
    place, parts = model.places.at(0, grid.per_stage), grid.stages * grid.chunks
    found: list[tuple[int, ...]] = []
    for recompute in (False, True):
        strategy = replace(grid, recompute=recompute, saved=NOTHING if recompute else None).strategy(request.batch)
        costs = model.layer_costs(place, grid.tensor, strategy)
        work = costs.forward + costs.forward_tensor + costs.backward + costs.backward_tensor
        found += partitions(work.tobytes(), parts)
    return tuple(dict.fromkeys(found))


def mixed_stages(
    request: Request, model: CostModel, space: Space, limit: float, sets: SavedSets
) -> Iterator[tuple[float, Question]]:
    """The questions about one stage whose lower bound is below `limit`.  The bound takes each layer's best degree."""
    for devices, m, even in _even_degrees(request, model):
        place = model.places.at(0, devices)
        if _least_mixed(m, devices, even, request, model) >= limit:
            continue
        levels = model.levels(request.zero, devices, space, m)
        decisions = itertools.product(_degree_sets(even, request, model, space), levels, request.recompute)
        for (degrees, compression, sequence), zero, recompute in decisions:
            strategy = layer_strategy(space, 1, request.batch, m, zero, recompute, sequence, compression)
            strategy = replace(strategy, sample_chunks=request.sample_chunks)
            question = Question(place, strategy, 0, model.num_layers, 1, m, degrees, in_pipeline=False)
            for saving in _with_sets(question, request, model, sets, limit):
                for part in _by_shared_degree(saving, model, limit):
                    if (bound := _mixed_bound(part, model)) < limit:
                        yield bound, part


def _even_degrees(request: Request, model: CostModel) -> Iterator[tuple[int, int, list[int]]]:
    """(devices, micro-batches, tensor degrees with which the samples are divided evenly), if these are several."""
    available = 0 if model.cluster.mixed else model.cluster.num_devices
    even: dict[tuple[int, int], list[int]] = {}
    for order, m in enumerate(request.micro_batches):
        for tensor in model.degrees_up_to(available):
            for data in divisors(request.batch // m, up_to=available // tensor):
                even.setdefault((data * tensor, order), []).append(tensor)
    for (devices, order), degrees in sorted(even.items()):
        if len(degrees) > 1:
            yield devices, request.micro_batches[order], degrees


def _least_mixed(m: int, devices: int, degrees: list[int], request: Request, model: CostModel) -> float:
    """A bound for all plans with these degrees: the computation alone, every layer at its best degree."""
    cuts = request.sequence
    passes = [np.add(*model.least_seconds(request.batch // m * t // devices, t, sequence=cuts)) for t in degrees]
    allowed = [np.where(model.kinds_allowed(t), seconds, np.inf) for t, seconds in zip(degrees, passes, strict=True)]
    return m * float(np.min(allowed, axis=0)[model.index].sum()) * (1 - SLACK)


def _degree_sets(
    even: list[int], request: Request, model: CostModel, space: Space
) -> Iterator[tuple[tuple[int, ...], Compression | None, bool]]:
    """(degrees that layers choose from, compression, sequence parallelism) with at least two degrees.

    even: the degrees with which the micro-batch is divided evenly.
    """
    for compression, sequence in itertools.product(request.compression, (False, True)):
        fit = [t for t in even if sequence in request.sequences(model, t, compression) or t == 1]
        for degrees in chains(fit) if space == "spmd" else [tuple(fit)]:
            if len(degrees) > 1:
                yield degrees, compression, sequence


def _with_sets(
    question: Question, request: Request, model: CostModel, sets: SavedSets, limit: float
) -> Iterator[Question]:
    """The question for every set of saved activations.

    None where recomputation, which saves memory and takes time, is not needed; or sequence parallelism, unless it
    divides computation.
    """

    def changed(**changes: Any) -> Question:
        return replace(question, strategy=replace(question.strategy, **changes))

    strategy = question.strategy
    if strategy.sequence and not model.repeats and _fits_anyhow(changed(sequence=False), model):
        return
    if not strategy.recompute or not sets.sets:
        yield question
        return
    if False in request.recompute and _fits_anyhow(changed(recompute=False, sequence=False), model):
        return
    fits = sets.smallest is None or _mixed_bound(changed(saved=sets.smallest), model) < math.inf
    if fits and _mixed_bound(changed(saved=sets.everything), model, anyhow=True) < limit:
        yield from (changed(saved=saved) for saved in sets.sets)


def _fits_anyhow(question: Question, model: CostModel) -> bool:
    """Whether every choice of degrees fits."""
    tables = costs_at(question, model).values()
    saved = np.array([c.state + c.activations for c in tables]).max(axis=0).sum()
    most = saved + max(float(c.working.max()) for c in tables)
    return not model.profile.state.decoded_bytes and most <= question.place.memory


def _by_shared_degree(question: Question, model: CostModel, limit: float) -> Iterator[Question]:
    """The question once per degree of the layers that share a parameter.

    One SPMD program stores a shared parameter once, so these layers must have the same degree.
    """
    if model.tied_layer is None or question.strategy.program == "per_stage":
        yield question
    elif _mixed_bound(question, model) < limit:
        yield from (replace(question, shared=t) for t in question.degrees)


def _mixed_bound(question: Question, model: CostModel, *, anyhow: bool = False) -> float:
    """Least seconds of a step; infinite if even the least bytes do not fit, unless it is to be `anyhow`."""
    m, tables = question.micro_batches, list(costs_at(question, model).values())
    forward = np.array([c.forward + c.forward_tensor for c in tables])
    backward = np.array([c.backward + c.backward_tensor for c in tables])
    once = np.array([c.gradients + c.update for c in tables])
    busy = (m * (forward + backward)).min(axis=0).sum()
    reduced = (m * forward + (m - 1) * backward + once).min(axis=0).sum()
    least_bytes = np.array([c.state + c.activations for c in tables]).min(axis=0).sum()
    fits = least_bytes <= question.place.memory * (1 + SLACK)
    return max(float(busy), float(reduced)) if fits or anyhow else math.inf


def try_mixed(
    bound: float, question: Question, space: Space, request: Request, model: CostModel, incumbent: Incumbent
) -> None:
    """Offers every assignment of degrees that could be faster than the incumbent."""
    m, strategy, devices = question.micro_batches, question.strategy, question.place.devices
    cap = LABELS if model.num_layers > EXACT_LAYERS else 1 << 20
    candidates, missing = options(question, model, cap, incumbent.cutoff)
    incumbent.note_unexplored_bound(max(bound, missing))
    for option in candidates:
        seconds = m * (option.forward + option.backward) - option.backward + option.sync + option.update
        if seconds < incumbent.cutoff:
            chunk = Chunk(first=0, runs=runs_of(option.degrees, _sample_chunks(option, question, model)))
            divided = max(option.degrees) > 1
            compression, sequence = strategy.compression if divided else None, strategy.sequence and divided
            grid = Grid(1, 1, devices, m, strategy.zero, strategy.recompute, "1f1b", 1, space, compression)
            grid = replace(grid, sequence=sequence, saved=strategy.saved)
            stage = Stage(device=0, devices=devices, chunks=(chunk,))
            plan = grid_plan(grid, (), request, model)
            incumbent.offer(plan.model_copy(update={"stages": (stage,)}), model)


def _sample_chunks(option: Option, question: Question, model: CostModel) -> list[int]:
    """The number of sample chunks of every layer."""
    by_degree = {t: model.sample_chunks(question.place.devices, t, question.strategy) for t in set(option.degrees)}
    samples = [by_degree[t][layer] for layer, t in enumerate(option.degrees)]
    if len(samples) > 2:  # Embedding and head never cut samples; their neighbours' numbers make for fewer runs.
        samples[0], samples[-1] = samples[1], samples[-2]
    return samples
