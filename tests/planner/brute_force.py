"""Every plan of a decision set, written down without any of the planner's shortcuts."""

import itertools
import math
from collections.abc import Iterator

from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.planner.costs import CostModel
from jhpt.planner.estimate import price
from jhpt.planner.request import Request


def compositions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Edges (0, ..., n) of all ways to cut n layers into non-empty ranges."""
    for cuts in itertools.combinations(range(1, n), parts - 1):
        yield (0, *cuts, n)


def spmd_plans(request: Request, model: CostModel) -> Iterator[Plan]:
    n, k = model.num_layers, model.cluster.num_devices
    tensor_all = [t for t in range(1, k + 1) if all(model.allowed(layer, t) for layer in range(n))]
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        b = request.batch // m
        shared = dict(
            model=model.profile.name, cluster=model.cluster.name, batch=request.batch, micro_batches=m, zero=zero,
            recompute=recompute,
        )  # fmt: skip
        for devices in range(1, k + 1):
            choices = [
                [t for t in range(1, devices + 1) if devices % t == 0 and model.allowed(layer, t)] for layer in range(n)
            ]
            for degrees in itertools.product(*choices):
                if all(b % (devices // t) == 0 for t in degrees):
                    chunk = Chunk(first=0, runs=runs_of(list(degrees)))
                    yield Plan(**shared, stages=(Stage(device=0, devices=devices, chunks=(chunk,)),))
        for t in tensor_all:
            for d in range(1, k // t + 1):
                if b % d:
                    continue
                for s in range(2, min(n, k // (d * t)) + 1):
                    for edges in compositions(n, s):
                        for schedule in ("1f1b", "gpipe"):
                            yield Plan(**shared, schedule=schedule, stages=stages(edges, s, 1, d * t, t))
                    for v in (2, 3, 4):
                        if m % s == 0 and s * v <= n:
                            edges = balanced_edges(model, b, d * t, t, zero, recompute, s * v)
                            yield Plan(**shared, schedule="interleaved", stages=stages(edges, s, v, d * t, t))


def stages(edges: tuple[int, ...], s: int, v: int, devices: int, t: int) -> tuple[Stage, ...]:
    chunks = [Chunk(first=a, runs=runs_of([t] * (b - a))) for a, b in itertools.pairwise(edges)]
    return tuple(Stage(device=i * devices, devices=devices, chunks=tuple(chunks[i::s])) for i in range(s))


def balanced_edges(model, b, devices, t, zero, recompute, parts) -> tuple[int, ...]:
    """The smallest largest range; of several the one whose ranges, from the first, are longest."""
    from jhpt.planner.costs import Treatment

    c = model.layer_costs(model.places.at(0, devices), t, Treatment(b, zero, recompute))
    work = c.forward + c.forward_tensor + c.backward + c.backward_tensor
    every = [(max(sum(work[a:b]) for a, b in itertools.pairwise(e)), e) for e in compositions(len(work), parts)]
    least = min(largest for largest, _ in every)
    return max(edges for largest, edges in every if largest <= least * (1 + 1e-12))


def best(plans: Iterator[Plan], model: CostModel) -> tuple[float, Plan | None, int]:
    """(seconds, plan, how many were priced) of the fastest that fits."""
    least, chosen, count = math.inf, None, 0
    for plan in plans:
        count += 1
        estimate = price(plan, model)
        if estimate.fits and estimate.seconds < least:
            least, chosen = estimate.seconds, plan
    return least, chosen, count


def general_plans(request: Request, model: CostModel) -> Iterator[Plan]:
    n, k = model.num_layers, model.cluster.num_devices
    for m, zero, recompute in itertools.product(request.micro_batches, request.zero, request.recompute):
        shared = dict(
            model=model.profile.name, cluster=model.cluster.name, space="general", batch=request.batch, micro_batches=m,
            zero=zero, recompute=recompute,
        )  # fmt: skip
        for s in range(1, min(n, k) + 1):
            for edges in compositions(n, s):
                for used in range(s, k + 1):
                    for borders in compositions(used, s):
                        per_stage = [
                            _assignments(model, a, b, y - x)
                            for (a, b), (x, y) in zip(
                                itertools.pairwise(edges), itertools.pairwise(borders), strict=True
                            )
                        ]
                        for degrees in itertools.product(*per_stage):
                            rows = tuple(
                                Stage(device=x, devices=y - x, chunks=(Chunk(first=a, runs=runs_of(list(d))),))
                                for a, d, (x, y) in zip(edges, degrees, itertools.pairwise(borders), strict=False)
                            )
                            for schedule in ("1f1b", "gpipe") if s > 1 else ("1f1b",):
                                yield Plan(**shared, schedule=schedule, stages=rows)


def _assignments(model: CostModel, first: int, stop: int, devices: int) -> list[tuple[int, ...]]:
    choices = [
        [t for t in range(1, devices + 1) if devices % t == 0 and model.allowed(layer, t)]
        for layer in range(first, stop)
    ]
    return list(itertools.product(*choices))
