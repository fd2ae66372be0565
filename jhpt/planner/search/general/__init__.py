"""The best plan where stages may have different numbers of devices: the search space of Zeng et al. 2021.

Decision set of space="general":

    micro-batches   every divisor M of the batch
    cuts            any contiguous non-empty ranges of layers
    devices         every stage has any number of the next devices in order; those left over at the end stay idle
    layers          each layer of a stage of k devices chooses its own tensor degree among the divisors of k that it
                    allows; the other devices are data parallel; uneven samples are priced at the fullest device
    schedule        1f1b, gpipe
    ZeRO            0, 1 or 3, for the whole plan
    recomputation   off or on, for the whole plan

`least` bounds what stages cost.  From these bounds a dynamic programme over (layers, devices) suffixes, O(N^2 K^2) for
each number of stages left, computes bounds of whole plans (`suffixes`).  Guided by them, `best_first` fixes one stage
after the other.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from jhpt.core.plan import Chunk, Schedule, Stage, runs_of
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.general.best_first import Problem, Search, suffixes_of
from jhpt.planner.search.general.least import Minima
from jhpt.planner.search.general.suffixes import SLACK, Suffixes, device_memory
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.spmd import search_spmd

SAVED = 1_000_000
"""Choices of stages, about 100 bytes each, that are kept between the two passes."""


def search_general(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Improves `incumbent` to the best plan of the space, and its bound.

    First comes a bound, and one quick plan, of everything that may hold the best plan; then the search, where bounds
    are least first and with a plan to beat that is nearly as good as it gets.
    """
    minima = Minima(model)
    if incumbent.plan is None:
        _seed(request, model, minima, incumbent)
    promising: list[tuple[float, Problem, Schedule, Suffixes | None]] = []
    room = SAVED
    for bound, m, strategy in sorted(_bounded(request, model, minima), key=lambda entry: entry[:2]):
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            break
        problem = Problem(m, strategy, request, model, minima)
        choices = problem.choices(incumbent)
        for schedule in pipelines(request):
            if suffixes := suffixes_of(problem, choices, schedule, incumbent):
                Search(problem, suffixes, incumbent).dive()
                room -= suffixes.size
                promising.append((suffixes.least, problem, schedule, suffixes if room > 0 else None))
    for bound, problem, schedule, suffixes in sorted(promising, key=lambda entry: entry[0]):
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            continue
        if suffixes is None or suffixes.limit != incumbent.cutoff:
            suffixes = suffixes_of(problem, problem.choices(incumbent), schedule, incumbent)
        if suffixes:
            Search(problem, suffixes, incumbent).run()


def pipelines(request: Request) -> list[Schedule]:
    """Schedules of the space: interleaved is for stages of equal size."""
    return [name for name in request.schedules if name != "interleaved"]


def _bounded(request: Request, model: CostModel, minima: Minima) -> Iterator[tuple[float, int, LayerStrategy]]:
    """Bounds without cuts: K devices cannot compute faster than if each were as busy as the best-used one.

    Left out is what cannot fit, were all memory one.
    """
    memory = float(device_memory(model).sum())
    for m, recompute in itertools.product(request.micro_batches, request.recompute):
        strategy = LayerStrategy(request.batch // m, 0, recompute)
        if minima.device_bytes(strategy).sum() > memory * (1 + SLACK):
            continue
        bound = m * float(minima.device_seconds(strategy).sum()) / model.cluster.num_devices
        for zero in request.zero:
            yield bound, m, LayerStrategy(request.batch // m, zero, recompute)


def _seed(request: Request, model: CostModel, minima: Minima, incumbent: Incumbent) -> None:
    """A first plan where there is none yet, so that the search has something to beat: equal stages, data parallel."""
    n, k = model.num_layers, model.cluster.num_devices
    schedule = pipelines(request)[0]
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        for s in sorted({min(s, n, k, request.max_stages) for s in (1, 2, 4, 8)}):
            edges = [n * i // s for i in range(s + 1)]
            stages = tuple(
                Stage(device=i * (k // s), devices=k // s, chunks=(Chunk(first=a, runs=runs_of([1] * (b - a))),))
                for i, (a, b) in enumerate(itertools.pairwise(edges))
            )
            strategy = LayerStrategy(request.batch // m, zero, recompute)
            incumbent.offer(Problem(m, strategy, request, model, minima).plan(stages, schedule), model)


def offer_equal_stages(request: Request, model: CostModel, best: Incumbent) -> None:
    """Offers `best` the fastest plan of space="general" whose stages have equally many devices, if there is one."""
    if not model.cluster.mixed:
        start = Incumbent()
        schedules = tuple(name for name in request.schedules if name != "interleaved")
        search_spmd(replace(request, schedules=schedules), model, start, "general")
        if start.plan is not None:
            best.offer(start.plan, model)
