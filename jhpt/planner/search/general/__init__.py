"""The best plan where stages may have different numbers of devices: the search space of Zeng et al. 2021.

Decision set of space="general":

    micro-batches   every divisor M of the batch
    stages          as many as the request allows
    cuts            any contiguous non-empty ranges of layers
    nodes           on a mixed cluster the kinds of nodes in any order (`rows`); else as they are
    devices         every stage has any number of the next devices in order; on a mixed cluster it may also begin on a
                    later node, and leave the rest of a node, or whole nodes, idle; those behind the last stage are
                    idle.  If the request is for the whole cluster, none is
    layers          each layer of a stage of k devices chooses its own tensor degree among the divisors of k that it
                    allows; the other devices are data parallel; uneven samples are priced at the fullest device
    samples         equally many on all data ranks; on a mixed cluster plans of one stage may also have them by the
                    speed of each (`by_speed`)
    schedule        eager-1f1b, gpipe
    ZeRO            0, 1 or 3, for the whole plan; not 2
    recomputation   off or on, for the whole plan

`least` bounds what stages cost.  From these bounds a dynamic programme over (layers, devices) suffixes, O(N^2 K^2) for
each number of stages left, computes bounds of whole plans (`suffixes`).  Guided by them, `best_first` fixes one stage
after the other.  On a mixed cluster all of this is done for every row.  Where there are more kinds of nodes than rows
for their orders (`rows.MOST_ROWS`), the bound of the first step counts for those left out.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from jhpt.core.plan import Chunk, Plan, Schedule, Zero, runs_of
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.by_speed import offer_by_speed
from jhpt.planner.search.general.best_first import Problem, Search, suffixes_of
from jhpt.planner.search.general.least import Minima
from jhpt.planner.search.general.suffixes import Suffixes, device_memory
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.rows import Row, left_out, rows
from jhpt.planner.search.spmd import search_spmd
from jhpt.planner.search.stages import SLACK

KEPT_CHOICES = 1_000_000
"""Most choices of stages, about 100 bytes each, that are kept from the first pass of the search to the second."""


def search_general(request: Request, model: CostModel, incumbent: Incumbent) -> None:
    """Improves `incumbent` to the best plan of the space, and notes the bound of all plans that were not visited.

    The first pass bounds every combination of micro-batches, layer strategy and schedule, and finds one plan quickly
    for each that may contain the best plan.  The second pass searches them in the order of their bounds, with a plan
    to beat that is already nearly the best.
    """
    minima = Minima(model)
    orders = [(row, Minima(row.model, minima)) for row in rows(model)]
    if incumbent.plan is None:
        _seed(request, *orders[0], incumbent)
    if request.fewest_stages == 1:
        offer_by_speed(request, pipelines(request)[0], model, incumbent)
    if incumbent.settled:
        return
    promising: list[tuple[float, Problem, Schedule, Suffixes | None]] = []
    room = KEPT_CHOICES
    for bound, m, strategy in sorted(_bounded(request, model, minima), key=lambda entry: entry[:2]):
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            break
        if left_out(model):
            incumbent.note_unexplored_bound(bound)
        for row, own in orders:
            problem = Problem(m, strategy, request, row, own, share=1 / len(orders))
            choices = problem.choices(incumbent)
            for schedule in pipelines(request):
                if suffixes := suffixes_of(problem, choices, schedule, incumbent):
                    Search(problem, suffixes, incumbent).dive()
                    if incumbent.settled:
                        return
                    room -= suffixes.size
                    promising.append((suffixes.least, problem, schedule, suffixes if room > 0 else None))
    for bound, problem, schedule, suffixes in sorted(promising, key=lambda entry: entry[0]):
        if incumbent.settled:
            return
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            continue
        if suffixes is None or suffixes.limit != incumbent.cutoff:
            suffixes = suffixes_of(problem, problem.choices(incumbent), schedule, incumbent)
        if suffixes:
            Search(problem, suffixes, incumbent).run()


def pipelines(request: Request) -> list[Schedule]:
    """Schedules of the space.  Interleaving needs stages of equal size; 1f1b has no bounds for others yet."""
    return [name for name in request.schedules if name in ("eager-1f1b", "gpipe")]


def _levels(request: Request) -> list[Zero]:
    return [level for level in request.zero if level != 2]


def _bounded(request: Request, model: CostModel, minima: Minima) -> Iterator[tuple[float, int, LayerStrategy]]:
    """Bounds that hold for all cuts: devices cannot be faster than if each computed as efficiently as its kind can.

    Combinations that would not fit even if all devices shared their memory are left out.
    """
    memory = float(device_memory(model).sum())
    for m, recompute in itertools.product(request.micro_batches, request.recompute):
        strategy = LayerStrategy(request.batch // m, 0, recompute)
        if minima.device_bytes(strategy).sum() > memory * (1 + SLACK):
            continue
        bound = m * float(minima.device_seconds(strategy).sum()) / minima.best_devices(strategy)
        for zero in _levels(request):
            yield bound, m, LayerStrategy(request.batch // m, zero, recompute)


def _seed(request: Request, row: Row, minima: Minima, incumbent: Incumbent) -> None:
    """Offers plans of equal data parallel stages, so that the search has a plan to beat from the beginning."""
    n, k = row.model.num_layers, row.model.cluster.num_devices
    schedule = pipelines(request)[0]
    for m, zero, recompute in itertools.product(request.micro_batches, _levels(request), request.recompute):
        for s in sorted({min(s, n, k, request.max_stages) for s in (1, 2, 4, 8)}):
            if s < request.fewest_stages or (request.whole and k % s):
                continue
            edges = [n * i // s for i in range(s + 1)]
            stages = tuple(
                row.stage(i * (k // s), k // s, Chunk(first=a, runs=runs_of([1] * (b - a))))
                for i, (a, b) in enumerate(itertools.pairwise(edges))
            )
            strategy = LayerStrategy(request.batch // m, zero, recompute)
            incumbent.offer(Problem(m, strategy, request, row, minima).plan(stages, schedule), row.listed)
            if incumbent.settled:
                return


def offer_equal_stages(request: Request, model: CostModel, best: Incumbent) -> None:
    """Offers `best` the fastest plan of space="general" whose stages all have the same number of devices, if any."""
    if not model.cluster.mixed:
        # Nothing has to be proven here, so a few prefixes of every grid are enough.
        start = Incumbent(any_plan=best.any_plan, unvisited=0.0)
        search_spmd(replace(request, schedules=tuple(pipelines(request))), model, start, "general")
        if start.plan is not None and _allowed(start.plan, request, model):
            best.offer(start.plan, model)


def _allowed(plan: Plan, request: Request, model: CostModel) -> bool:
    """Whether a plan has as many stages and devices as the request asks for."""
    enough = len(plan.stages) >= request.fewest_stages
    return enough and (not request.whole or plan.devices == model.cluster.num_devices)
