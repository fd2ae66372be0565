"""The search of each space: `spmd`, what one program runs, and `general`, stages of any size."""

from dataclasses import replace

from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.general.search import search_general
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.spmd import search_spmd


def search(request: Request, model: CostModel, space: Space) -> Incumbent:
    """The best plan of a space.

    `general` starts from the best plan that one SPMD program can run without interleaving, priced as programs of the
    stages' own.  One program may cost more or less (`estimate`): neither space is always at least as fast.
    """
    best = Incumbent()
    if space == "spmd":
        search_spmd(request, model, best)
        return best
    offer_equal_stages(request, model, best)
    search_general(request, model, best)
    return best


def offer_equal_stages(request: Request, model: CostModel, best: Incumbent) -> None:
    """Offers `best` the fastest plan of space="general" whose stages have equally many devices, if there is one."""
    if not model.cluster.mixed:
        start = Incumbent()
        schedules = tuple(name for name in request.schedules if name != "interleaved")
        search_spmd(replace(request, schedules=schedules), model, start, "general")
        if start.plan is not None:
            best.offer(start.plan, model)
