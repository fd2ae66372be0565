"""The fastest of all plans of a decision set, without any of the planner's shortcuts.

A stage is summed up layer by layer, once for all plans that have it; whole plans are timed by the schedule, many at a
time.  Tests show that the seconds equal those of `jhpt.planner.cost.estimate.price` for each plan.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.planner.decisions import Draft, StageDraft, drafts
from benchmarks.planner.layer_costs import (
    LayerCost,
    embedding_and_head_cost,
    pipelined_layer,
    separate_layer,
    single_stage_layer,
    stored_bytes,
)
from jhpt.core.plan import Chunk, OtherBlocks, Plan, Space, Stage, runs_of
from jhpt.core.schedule import IN_TURN, in_flight
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel, End
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.search.request import Request


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Seconds of the fastest plan that fits (inf: none does), the plan, and the number of plans."""

    seconds: float
    draft: Draft | None
    plans: int


def optimum(request: Request, model: CostModel, space: Space) -> Optimum:
    """The fastest of all plans of a space."""
    groups: dict[tuple[object, ...], list[Draft]] = defaultdict(list)
    plans = 0
    for plans, draft in enumerate(drafts(request, model, space), 1):  # noqa: B007
        groups[*draft[:7], len(draft.stages), len(draft.stages[0][1]), draft.samples].append(draft)
    pricer = _Pricer(request, model, space)
    least, chosen = math.inf, None
    for group in groups.values():
        seconds = pricer.seconds(group)
        at = int(np.argmin(seconds))
        if seconds[at] < least:
            least, chosen = float(seconds[at]), group[at]
    return Optimum(seconds=least, draft=chosen, plans=plans)


def best(plans: Iterable[Plan], model: CostModel) -> tuple[float, Plan | None, int]:
    """(seconds of the fastest plan that fits, the plan, number of plans), each plan priced by itself."""
    least, chosen, priced = math.inf, None, 0
    for plan in plans:
        priced += 1
        estimate = price(plan, model)
        if estimate.fits and estimate.seconds < least:
            least, chosen = estimate.seconds, plan
    return least, chosen, priced


def spmd_plans(request: Request, model: CostModel) -> Iterator[Plan]:
    """All plans of space="spmd"."""
    return (plan_of(draft, request, model, "spmd") for draft in drafts(request, model, "spmd"))


def general_plans(request: Request, model: CostModel) -> Iterator[Plan]:
    """All plans of space="general"."""
    return (plan_of(draft, request, model, "general") for draft in drafts(request, model, "general"))


def plan_of(draft: Draft, request: Request, model: CostModel, space: Space) -> Plan:
    """The plan of a draft."""
    return Plan(
        model=model.profile.name,
        cluster=model.cluster.name,
        space=space,
        batch=request.batch,
        micro_batches=draft.micro_batches,
        schedule=draft.schedule,
        zero=draft.zero,
        zero_ranks=draft.zero_ranks,
        recompute=draft.recompute,
        sequence=draft.sequence,
        other_blocks=OtherBlocks(after=draft.again) if draft.again else None,
        stages=tuple(
            Stage(
                device=members[0],
                devices=len(members),
                apart=None if isinstance(members, range) else tuple(members),
                samples=draft.samples,
                chunks=tuple(Chunk(first=first, runs=runs_of(list(degrees))) for first, degrees in chunks),
            )
            for members, chunks in draft.stages
        ),
    )


class _Sum(NamedTuple):
    """One stage: seconds by chunk, seconds at the end, bytes.  bytes: all except the activations of micro-batches."""

    forward: list[float]
    backward: list[float]
    sync: float
    update: float
    bytes: float
    activations: float
    memory: float


class _Pricer:
    """Prices drafts; every distinct stage and transfer is summed up once."""

    def __init__(self, request: Request, model: CostModel, space: Space) -> None:
        self.request, self.model, self.space = request, model, space
        self._tables: dict[tuple[object, ...], LayerCost] = {}
        self._sums: dict[tuple[object, ...], _Sum] = {}
        self._cuts: dict[tuple[object, ...], float] = {}

    def seconds(self, group: list[Draft]) -> np.ndarray:
        """Seconds of drafts that differ in their stages only; inf where one does not fit."""
        draft = group[0]
        m, s, v = draft.micro_batches, len(draft.stages), len(draft.stages[0][1])
        strategy = LayerStrategy(
            self.request.batch // m,
            1 if draft.zero == 2 and m == 1 else draft.zero,
            draft.recompute,
            sequence=draft.sequence,
            zero_ranks=draft.zero_ranks,
            several_micro_batches=m > 1,
            two_micro_batches=m == 2 and s == 1,
        )
        if draft.samples:
            return np.array([self._dealt_seconds(each, strategy) for each in group])
        numbers: dict[StageDraft, int] = {}
        index = np.array([[numbers.setdefault(stage, len(numbers)) for stage in d.stages] for d in group])
        sums = [self._sum(stage, strategy, s, draft.again) for stage in numbers]
        forward, backward, sync, update, fixed, activations, memory = (
            np.array(column)[index] for column in zip(*sums, strict=True)
        )
        slots = [in_flight(draft.schedule, s, 0 if self.space == "spmd" else i, v, m) for i in range(s)]
        fits = (fixed + np.array(slots) * activations <= memory).all(axis=1) & np.isfinite(forward).all(axis=(1, 2))
        seconds = np.full(len(group), math.inf)
        if fits.any():
            rows = [self._row_cuts(d.stages, strategy) for d, fit in zip(group, fits, strict=True) if fit]
            cut = np.array(rows, dtype=float).reshape(len(rows), s * v - 1)
            if draft.schedule in IN_TURN and self.space == "spmd" and not self.model.cluster.overlap:
                cut = 2 * cut  # the directions of an exchange follow each other
            times = forward[fits], backward[fits], cut, sync[fits], update[fits]
            seconds[fits] = step_seconds(draft.schedule, m, *times, overlap=self.model.cluster.overlap)
        return seconds

    def _dealt_seconds(self, draft: Draft, strategy: LayerStrategy) -> float:
        """Seconds of a plan of one stage with samples by data rank; inf if a device has no room for as many samples as
        the one that has most."""
        (stage,), samples, places = draft.stages, draft.samples, self.model.places
        assert samples is not None
        place, tensor = places.of(stage[0]), len(stage[0]) // len(samples)
        by_kind: dict[int, _Sum] = {}
        for kind in place.kinds:
            mine = [at for at, device in enumerate(stage[0]) if places.kind_of(device) == kind]
            alone = replace(place, kinds=(kind,), samples=max(samples[at // tensor] for at in mine))
            by_kind[kind] = self._summed(stage, strategy, 1, None, alone)
        room = min(places.nodes[places.node_of[device]].device.usable for device in stage[0])
        if max(each.bytes + each.activations for each in by_kind.values()) > room:
            return math.inf
        last = max(by_kind.values(), key=lambda each: each.forward[0] + each.backward[0])
        passes = draft.micro_batches * (last.forward[0] + last.backward[0])
        in_line = max(0.0, last.sync - last.backward[0])
        return passes + in_line + max(each.update for each in by_kind.values())

    def _sum(self, stage: StageDraft, strategy: LayerStrategy, stages: int, again: int | None) -> _Sum:
        key = (self.model.places.of(stage[0]), stage[1], strategy, stages, again)
        if key not in self._sums:
            self._sums[key] = self._summed(stage, strategy, stages, again, key[0])
        return self._sums[key]

    def _summed(self, stage: StageDraft, strategy: LayerStrategy, stages: int, again: int | None, place: Place) -> _Sum:
        chunks, many, model = stage[1], stages > 1, self.model
        n, devices = model.num_layers, place.devices
        plain = replace(strategy, recompute=False)
        by_layer = [strategy if again is None or layer <= again else plain for layer in range(n)]
        forward, backward = [0.0] * len(chunks), [0.0] * len(chunks)
        sync = update = state = activations = working = transfers = 0.0
        waiting = 0.0  # gradients of later chunks that are still to be reduced when a chunk's last backward starts
        replicas = devices // chunks[0][1][0]
        local = -(-strategy.micro_batch // replicas) / (chunks[0][1][0] if strategy.sequence else 1)
        for c in reversed(range(len(chunks))):
            first, degrees = chunks[c]
            stop = first + len(degrees)
            rows = [self._layer(place, t, by_layer[layer], layer, stages) for layer, t in enumerate(degrees, first)]
            reshard = sum(
                model.reshard_seconds(place, layer, before, after, strategy.micro_batch, sequence=strategy.sequence)
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
            received = model.boundary[first - 1] if first else 0.0
            sent = model.boundary[stop - 1] if stop < n else 0.0
            transfers = max(transfers, 2.0 * local * float(received + sent))
        seconds, copy = self._tied(stage, strategy)
        update, state = update + seconds, state + copy
        if many and self.space == "spmd":
            shared = embedding_and_head_cost(model, place, chunks[0][1][0], strategy)
            uses = chunks[0][0] == 0 or chunks[-1][0] + len(chunks[-1][1]) == n
            update += shared.once + (shared.used if uses else 0.0)
            state, activations = state + shared.state, activations + shared.saved
        fixed = state + working + (transfers if many else 0.0)
        return _Sum(forward, backward, sync, update, fixed, activations, place.memory)

    def _tied(self, stage: StageDraft, strategy: LayerStrategy) -> tuple[float, float]:
        """(seconds, bytes) of a parameter that the first layer shares with a layer of another stage; in spmd zeros for
        the head."""
        members, chunks = stage
        tied, devices = self.model.tied_layer, len(members)
        degree = {layer: t for first, degrees in chunks for layer, t in enumerate(degrees, first)}
        if tied is None or (0 in degree) == (tied in degree):
            return 0.0, 0.0
        if self.space == "spmd" and tied == self.model.num_layers - 1:
            return 0.0, 0.0
        t = degree[tied if tied in degree else 0]
        costs = self.model.layer_costs(self.model.places.of(members), t, strategy)
        copy = float(costs.tied_bytes[tied])
        if self.space == "spmd":
            parameters = self.model.kinds[self.model.index[tied]].tied_parameters / t
            copy = parameters * stored_bytes(self.model, strategy, strategy.shards(devices // t), sent=False, slot=True)
        if tied not in degree:
            return float(costs.tied[tied]), 0.0
        numbers = self.model.kinds[self.model.index[tied]].tied_parameters / t
        shares = strategy.shards(devices // t) if strategy.zero else 1
        return float(costs.tied[tied]) + numbers / shares * self.model.profile.update_seconds, copy

    def _row_cuts(self, stages: tuple[StageDraft, ...], strategy: LayerStrategy) -> list[float]:
        """Seconds of the transfers between virtual stages, in order."""
        s, v = len(stages), len(stages[0][1])
        return [self._cut(stages, divmod(virtual, s), divmod(virtual + 1, s), strategy) for virtual in range(s * v - 1)]

    def _cut(
        self, stages: tuple[StageDraft, ...], at: tuple[int, int], to: tuple[int, int], strategy: LayerStrategy
    ) -> float:
        """Seconds of the transfer from (chunk, stage) `at` to (chunk, stage) `to`."""
        sender, receiver = stages[at[1]], stages[to[1]]
        (_, degrees), (start, their_degrees) = sender[1][at[0]], receiver[1][to[0]]
        data = len(sender[0]) // degrees[-1], len(receiver[0]) // their_degrees[0]
        parts = degrees[-1] if strategy.sequence else 1
        key = (start, sender[0], receiver[0], data, strategy.micro_batch, parts)
        if key not in self._cuts:
            places = self.model.places
            ends = End(places.of(sender[0]), data[0]), End(places.of(receiver[0]), data[1])
            transfer = places.between(sender[0], receiver[0])
            self._cuts[key] = self.model.moved_seconds(start - 1, transfer, ends, strategy.micro_batch, parts)
        return self._cuts[key]

    def _layer(self, place: Place, t: int, strategy: LayerStrategy, layer: int, stages: int) -> LayerCost:
        key = (place, t, strategy, layer, stages > 1)
        if key not in self._tables:
            one_program = pipelined_layer if stages > 1 else single_stage_layer
            of_space = one_program if self.space == "spmd" else separate_layer
            self._tables[key] = of_space(self.model, place, t, strategy, layer)
        return self._tables[key]
