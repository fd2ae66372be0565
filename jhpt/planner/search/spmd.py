"""The best plan that one SPMD program can run.

Decision set of space="spmd":

    micro-batches   every divisor M of the batch
    grid            S stages x d data x t tensor devices with S d t <= K; the other devices stay idle.  d divides the
                    micro-batch.  All layers have the same t, because equal positions of all stages share one sharding.
                    With S = 1 every layer chooses its own degree among the divisors of d t.  The degrees in use divide
                    each other, because they share a mesh, and two layers that share a parameter have the same degree
    cuts            any S contiguous non-empty ranges of layers
    schedule        1f1b, gpipe, or interleaved with v = 2, 3 or 4 chunks per device.  Interleaving requires M to be
                    divisible by S and cuts the layers into S v balanced ranges (`cuts.balanced`)
    ZeRO            0, 1 or 3 where d > 1, else 0 or 3.  ZeRO-3 on one data rank keeps no compute copy of the weights
    recomputation   off or on
    compression     one of those requested, where a tensor degree is above 1

The number of sample chunks is looked up instead of searched (`CostModel.sample_chunks`).  With one stage every layer
has the number that is best in a row of all layers at its degree; in a pipeline all layers have the number that is best
for all of them together.

Costs of layers are described at the head of `jhpt.planner.cost.memory`.  gpipe is faster than 1f1b on the same stages
only where the gradients of a late stage take longer to reduce than the pipeline takes to drain (tested), and it never
needs less memory.

Grids are visited in the order of a bound that holds for all cuts (`grids`).  For each grid, best-first search finds the
cuts, guided by a tighter bound (`cuts`, `bounds`).  The plan is proven optimal if no unvisited plan has a bound below
its seconds, which is the rule.  Otherwise the least bound of the unvisited plans is reported with the plan.
"""

from dataclasses import replace

from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.cuts import CutSearch, balanced
from jhpt.planner.search.grids import Grid, bounded_grids, grid_plan
from jhpt.planner.search.mixed_degrees import mixed_stages, try_mixed
from jhpt.planner.search.request import Incumbent, Request


def search_spmd(request: Request, model: CostModel, incumbent: Incumbent, space: Space = "spmd") -> None:
    """Improves `incumbent` to the best plan of the space, and notes the bound of all plans that were not visited.

    Args:
      space: "general" prices the same plans as programs of the stages' own, as space="general" runs them.
    """
    if space == "general":
        request = replace(request, sample_chunks=(1,), compression=(None,))
    grids = sorted(bounded_grids(request, model, space), key=lambda pair: pair[0])
    for bound, grid in grids:
        if bound >= incumbent.cutoff:
            incumbent.note_unexplored_bound(bound)
            break
        if grid.chunks > 1:
            incumbent.offer(grid_plan(grid, _interleaved_cuts(grid, request, model), request, model), model)
        elif grid.stages == 1:
            incumbent.offer(grid_plan(grid, (), request, model), model)
        else:
            CutSearch(grid, request, model, incumbent).run()
    stages = mixed_stages(request, model, space, incumbent.cutoff)
    for bound, question in sorted(stages, key=lambda pair: pair[0]):
        if bound >= incumbent.cutoff:
            break
        try_mixed(bound, question, space, request, model, incumbent)


def _interleaved_cuts(grid: Grid, request: Request, model: CostModel) -> tuple[int, ...]:
    place = model.places.at(0, grid.per_stage)
    costs = model.layer_costs(place, grid.tensor, grid.strategy(request.batch))
    work = costs.forward + costs.forward_tensor + costs.backward + costs.backward_tensor
    return balanced(work, grid.stages * grid.chunks)
