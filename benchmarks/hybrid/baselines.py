"""Plans that one would run without a planner, for every number of micro-batches.

Equal splits use all hosts:

    data parallel    equally many rows on every host
    gpipe            equally many layers on every host, GPipe's schedule
    1f1b             the same with eager 1F1B
    equal grid       every grid of stages, replicas and tensor ranks with equal layers

Of these, baselines are swept by measurement (`SWEPT`): a trial on the hosts chooses, not a prediction.  Of grids that
divide the vocabulary, as Megatron-LM does, there are too many to try: each shape (stages x replicas x tensor ranks) is
tried with the schedule and number of micro-batches that are predicted to suit all rates best.

One host alone needs no link.  Where links are slow and the model is small, it is faster than some plans of all hosts.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks.hybrid.costs import counts_of
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.task import DATA_PARALLEL, GPIPE, GRID, ONE_HOST
from jhpt.core.divisors import divisors
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.planner.cost.model import CostModel

SWEPT: dict[str, tuple[int, ...]] = {DATA_PARALLEL: (1, 2, 4), GPIPE: (4, 8, 16, 32), ONE_HOST: (1, 4)}
"""Numbers of micro-batches that are tried, as far as they divide the batch."""


ANY_GRID = "equal grid"
"""Any grid of equal layers, as a kind of equal split."""


def equal_splits(subject: Subject, model: CostModel) -> dict[str, list[Plan]]:
    """The plans of every kind of equal split, on all hosts."""
    hosts, everything = model.cluster.num_devices, list(_grids(subject, model))
    kinds = {
        DATA_PARALLEL: [plan for plan in everything if len(plan.stages) == 1 and plan.degrees == (1,)],
        GPIPE: [plan for plan in everything if len(plan.stages) == hosts and plan.schedule == "gpipe"],
        "1f1b": [plan for plan in everything if len(plan.stages) == hosts and plan.schedule == "eager-1f1b"],
        ANY_GRID: everything,
    }
    return {name: plans for name, plans in kinds.items() if plans}


def swept(subject: Subject, model: CostModel, seconds: Callable[[Plan], Sequence[float]]) -> dict[str, list[Plan]]:
    """The plans that are tried of every baseline.

    seconds: what a step of a plan is predicted to take, at every rate.
    """
    splits = equal_splits(subject, model) | {ONE_HOST: list(_alone(subject, model))}
    tried = {
        name: [plan for plan in splits.get(name, ()) if plan.micro_batches in counts] for name, counts in SWEPT.items()
    }
    shapes: dict[tuple[int, int], list[Plan]] = {}
    for plan in splits[ANY_GRID]:
        if plan.degrees != (1,):
            shapes.setdefault((len(plan.stages), plan.degrees[0]), []).append(plan)
    # The least product of seconds is the least geometric mean over the rates.
    tried[GRID] = [min(plans, key=lambda plan: math.prod(seconds(plan))) for plans in shapes.values()]
    return {name: plans for name, plans in tried.items() if plans}


def _alone(subject: Subject, model: CostModel) -> Iterator[Plan]:
    """The plans of the first host alone, which computes all rows."""
    for count in counts_of(subject):
        yield _plan(subject, model, count, "1f1b", [[1] * model.num_layers], devices=1)


def _grids(subject: Subject, model: CostModel) -> Iterator[Plan]:
    hosts, layers = model.cluster.num_devices, model.num_layers
    for stages in divisors(hosts) if subject.piped else (1,):
        each = hosts // stages
        edges = [s * (layers // stages) + min(s, layers % stages) for s in range(stages + 1)]
        schedules: tuple[Schedule, ...] = ("gpipe", "eager-1f1b") if stages > 1 else ("1f1b",)
        degrees = [tensor for tensor in model.common_degrees(each) if each % tensor == 0]
        for tensor, count, schedule in itertools.product(degrees, counts_of(subject), schedules):
            if subject.batch // count % (each // tensor) == 0:
                layers_of = [[tensor] * (stop - first) for first, stop in itertools.pairwise(edges)]
                yield _plan(subject, model, count, schedule, layers_of, devices=each)


def _plan(
    subject: Subject, model: CostModel, count: int, schedule: Schedule, stages: Sequence[Sequence[int]], devices: int
) -> Plan:
    """A plan of `count` micro-batches.  stages: the tensor degree of every layer; devices: of each stage."""
    first = itertools.accumulate(map(len, stages), initial=0)
    return Plan(
        model=subject.name,
        cluster=model.cluster.name,
        batch=subject.batch,
        micro_batches=count,
        schedule=schedule,
        stages=tuple(
            Stage(device=s * devices, devices=devices, chunks=(Chunk(first=start, runs=runs_of(list(tensor))),))
            for s, (start, tensor) in enumerate(zip(first, stages, strict=False))
        ),
    )
