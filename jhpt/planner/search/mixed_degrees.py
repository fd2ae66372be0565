"""One stage whose layers choose their tensor degrees one by one: the plans of `layer_degrees` for a whole model."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jhpt.core.plan import Chunk, Stage, runs_of
from jhpt.planner.cost.layers import Space, layer_strategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.grids import SLACK, Grid, grid_plan
from jhpt.planner.search.layer_degrees import Option, Question, chains, costs_at, options
from jhpt.planner.search.request import Incumbent, Request

LABELS, EXACT_LAYERS = 48, 24
"""Partial assignments of degrees that are kept per layer where a model has more layers than `EXACT_LAYERS`."""


def mixed_stages(request: Request, model: CostModel, space: Space, limit: float) -> Iterator[tuple[float, Question]]:
    """Every one-stage question whose lower bound is below `limit`; in the bound every layer has its best degree."""
    if model.cluster.mixed:
        return
    for devices in range(2, model.cluster.num_devices + 1):
        place, divisors = model.places.at(0, devices), model.degrees(devices)
        for m in request.micro_batches:
            even = [t for t in divisors if request.batch // m % (devices // t) == 0]
            sets = [chain for chain in (chains(even) if space == "spmd" else [tuple(even)]) if len(chain) > 1]
            decisions = itertools.product(sets, request.zero, request.recompute, request.compression)
            for degrees, zero, recompute, compression in decisions:
                strategy = layer_strategy(space, 1, request.batch, m, zero, recompute, compression=compression)
                strategy = replace(strategy, sample_chunks=request.sample_chunks)
                question = Question(place, strategy, 0, model.num_layers, 1, m, degrees, piped=False)
                for part in _by_shared_degree(question, model, limit):
                    if (bound := _mixed_bound(part, model)) < limit:
                        yield bound, part


def _by_shared_degree(question: Question, model: CostModel, limit: float) -> Iterator[Question]:
    """The question once per degree of the layers that share a parameter.

    One SPMD program stores a shared parameter once, so these layers must have the same degree.
    """
    if model.tied_layer is None or question.strategy.program == "per_stage":
        yield question
    elif _mixed_bound(question, model) < limit:
        yield from (replace(question, shared=t) for t in question.degrees)


def _mixed_bound(question: Question, model: CostModel) -> float:
    """Least seconds of a step; infinite if even the least bytes do not fit."""
    m, tables = question.micro_batches, list(costs_at(question, model).values())
    forward = np.array([c.forward + c.forward_tensor for c in tables])
    backward = np.array([c.backward + c.backward_tensor for c in tables])
    once = np.array([c.gradients + c.update for c in tables])
    busy = (m * (forward + backward)).min(axis=0).sum()
    reduced = (m * forward + (m - 1) * backward + once).min(axis=0).sum()
    least_bytes = np.array([c.state + c.activations for c in tables]).min(axis=0).sum()
    fits = least_bytes <= question.place.memory * (1 + SLACK)
    return max(float(busy), float(reduced)) if fits else math.inf


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
            compression = strategy.compression if max(option.degrees) > 1 else None
            grid = Grid(1, 1, devices, m, strategy.zero, strategy.recompute, "1f1b", 1, space, compression)
            stage = Stage(device=0, devices=devices, chunks=(chunk,))
            plan = grid_plan(grid, (), request, model)
            incumbent.offer(plan.model_copy(update={"stages": (stage,)}), model)


def _sample_chunks(option: Option, question: Question, model: CostModel) -> list[int]:
    """Sample chunks of every layer."""
    by_degree = {t: model.sample_chunks(question.place.devices, t, question.strategy) for t in set(option.degrees)}
    samples = [by_degree[t][layer] for layer, t in enumerate(option.degrees)]
    if len(samples) > 2:  # Embedding and head never cut samples; equal neighbours make shorter plans.
        samples[0], samples[-1] = samples[1], samples[-2]
    return samples
