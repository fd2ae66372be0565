"""What `general` prunes by: every bound against what it bounds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jhpt.core.catalogue import cluster_named
from jhpt.core.plan import Chunk, runs_of
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.communication import transfer_seconds
from jhpt.planner.cost.estimate import chunk_costs
from jhpt.planner.cost.layers import LayerStrategy, sync_seconds
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.profiles.networks import network_profile
from jhpt.planner.search.general import search_general
from jhpt.planner.search.general.best_first import Ahead, Prefix, loop_bound
from jhpt.planner.search.general.least import Minima, Transfers, shortest, spans
from jhpt.planner.search.general.suffixes import needs
from jhpt.planner.search.layer_degrees import Option, groups, single
from jhpt.planner.search.request import Incumbent, request
from jhpt.planner.search.solve import solve
from jhpt.planner.search.stages import (
    StageTerms,
    pair_seconds_in_line,
    stage_seconds,
    stage_seconds_gpipe,
    stage_seconds_in_line,
)
from tests.planner.brute_force import best as best_of
from tests.planner.brute_force import general_plans, optimum, plan_of
from tests.planner.instances import random_cluster, random_instance, random_profile

BELOW = 1 + 1e-9


def test_equal_ranges_are_one():
    # a b b b c: five lengths of b's with and without either end; ab = ab, bb = bb.
    found = spans(np.array([0, 1, 1, 1, 2]))
    assert [len(level.last) for level in found.levels] == [3, 3, 3, 2, 1]
    assert found.number[1, 2] == found.number[2, 3] != found.number[0, 1]
    assert found.number[1, 3] == found.number[2, 4] != found.number[0, 2]
    assert (found.number[np.tril_indices(5, -1)] == -1).all()


@pytest.mark.parametrize("seed", range(5))
def test_shortest_paths(seed):
    rng = np.random.default_rng(seed)
    kinds, degrees = rng.integers(0, 3, 5), 3
    nodes, embedding_and_head = rng.random((2, 3, degrees)), rng.random((2, 3, degrees))
    edges = rng.random((2, 3, degrees, degrees))
    nodes[:, 0, 1] = np.inf
    ranges = spans(kinds)
    found = shortest(ranges, nodes, edges, embedding_and_head)
    for place, (i, stop) in itertools.product(range(2), itertools.combinations(range(6), 2)):
        row = kinds[i:stop]
        costs = [
            sum(nodes[place, kind, t] for kind, t in zip(row, path, strict=True))
            + sum(edges[place, kind, a, b] for kind, (a, b) in zip(row, itertools.pairwise(path), strict=False))
            + embedding_and_head[place, row[-1], path[-1]]
            for path in itertools.product(range(degrees), repeat=len(row))
        ]
        assert found[place, ranges.number[i, stop]] == pytest.approx(min(costs))


def drawn_model(seed: int, layers: int = 5, devices: int = 6) -> tuple[np.random.Generator, CostModel]:
    rng = np.random.default_rng(seed)
    mixed = seed % 2 == 1
    return rng, CostModel(random_profile(rng, layers), random_cluster(rng, devices, mixed=mixed))


def drawn_treatment(rng: np.random.Generator) -> LayerStrategy:
    return LayerStrategy(int(rng.integers(1, 7)), int(rng.choice([0, 1, 3])), bool(rng.integers(2)))


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_costs_less_than_the_least(seed):
    rng, model = drawn_model(seed)
    strategy, m = drawn_treatment(rng), int(rng.integers(1, 6))
    minima = Minima(model)
    leasts = minima.of(strategy, m)
    needed = needs(leasts, minima.spans, minima.device_bytes(strategy))
    for _ in range(40):
        first, stop = sorted(rng.choice(model.num_layers + 1, 2, replace=False).tolist())
        offset = int(rng.integers(model.cluster.num_devices))
        devices = int(rng.integers(1, model.cluster.num_devices - offset + 1))
        fit = [[t for t in model.degrees(devices) if model.allowed(layer, t)] for layer in range(first, stop)]
        chunk = Chunk(first=first, runs=runs_of([int(rng.choice(degrees)) for degrees in fit]))
        place, least = model.places.at(offset, devices), leasts[offset]
        costs = chunk_costs(chunk, place, strategy, model)
        layers, half = costs.layers, costs.reshard / 2
        forward = (layers.forward + layers.forward_tensor).sum() + half
        errors = layers.backward + layers.backward_tensor
        backward = errors.sum() + half
        after = max(0.0, sync_seconds(errors, layers.gradients) + half - backward) + layers.update.sum()
        at = (devices - 1, minima.spans.number[first, stop])
        assert least.forward[at] <= forward * BELOW
        assert least.backward[at] <= backward * BELOW
        assert least.both[at] <= (forward + backward) * BELOW
        for x in range(1, m + 1):
            share = (x - 1) / max(1, m - 1)
            bound = least.once[at] + share * (least.whole[at] - least.once[at])
            assert bound <= (x * (forward + backward) + after) * BELOW
        whole = m * (forward + backward) + after
        assert needed.both[first:stop].sum() <= devices * (forward + backward) * BELOW
        assert needed.share[first:stop].sum() <= devices * whole * BELOW
        members = slice(offset, offset + devices)  # slow ones among them count less
        assert needed.both[first:stop].sum() <= needed.worth[members].sum() * (forward + backward) * BELOW
        assert needed.share[first:stop].sum() <= needed.share_worth[members].sum() * whole * BELOW
        for table, true in ((least.state, layers.state), (least.activations, layers.activations)):
            assert table[devices - 1, stop] - table[devices - 1, first] <= true.sum() * BELOW
        assert (least.working[devices - 1, first:stop] <= layers.working * BELOW).all()
        together = devices * (layers.state + layers.activations)
        assert (needed.bytes[first:stop] <= together * BELOW).all()
        assert (minima.device_seconds(strategy)[first:stop] <= devices * (layers.forward + errors) * BELOW).all()


@pytest.mark.parametrize("seed", range(10))
def test_no_hop_costs_less_than_the_least(seed):
    """All receivers tried, those behind idle devices too; data parallel senders by the tables, others one by one."""
    rng, model = drawn_model(seed, devices=9)
    b, k, places = int(rng.integers(1, 9)), model.cluster.num_devices, model.places
    transfers = Transfers(model, b)
    for offset in range(k):
        rows = transfers.rows(offset)
        assert (rows[:, -1] == 0).all()
        for devices in range(1, k - offset):
            for layer, data in itertools.product(range(model.num_layers - 1), {1, devices}):
                true = min(
                    transfer_seconds(
                        places.transfer(offset, devices, start, to),
                        model.boundary[layer] * max(-(-b // data), -(-b // to)),
                    )
                    for start in places.starts(offset + devices)
                    for to in range(1, k - start + 1)
                )
                assert transfers.least(offset, devices, data, layer) == pytest.approx(true)
                if data == devices:
                    assert rows[devices - 1, layer] == pytest.approx(true)


def drawn_option(rng: np.random.Generator) -> Option:
    forward, backward = (float(x) for x in rng.uniform(0.2, 2.0, 2))
    sync = backward + float(rng.choice([0.0, rng.uniform(0, 5)]))
    return Option(forward, backward, sync, float(rng.uniform(0, 1)), (1,))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", ["eager-1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_faster_than_the_round_trips_of_its_first_stages(schedule, seed, overlap):
    rng = np.random.default_rng(seed)
    stages, m = int(rng.integers(2, 7)), int(rng.integers(1, 30))
    found = [drawn_option(rng) for _ in range(stages)]
    cut = rng.uniform(0, 2, stages - 1) * rng.choice([0.1, 1.0])
    times = [np.array([[o.forward] for o in found]), np.array([[o.backward] for o in found]), cut]
    times += [np.array([o.sync for o in found]), np.array([o.update for o in found])]
    seconds = float(step_seconds(schedule, m, *times, overlap=overlap))
    both = np.array([o.forward + o.backward for o in found])
    prefix, before = Prefix(), 0.0
    for s, option in enumerate(found):
        prefix = prefix.grown(1, single(option), cut[s - 1] if s else 0.0)
        trips = np.cumsum(both[s + 1 :]) + 2 * np.concatenate([[0.0], np.cumsum(cut[s + 1 :])])[: stages - s - 1]
        left = stages - s - 1
        ahead = Ahead(cut[s], trips[-1], tuple(trips[:2]), left) if left else Ahead()
        assert loop_bound(prefix, ahead, schedule, m) <= seconds * BELOW
        # From the stage alone, and the exchanges with both its neighbours.
        terms = StageTerms(*(np.array(x) for x in (option.forward, option.backward, option.sync, option.update)))
        exchanges = np.array(ahead.transfer), np.array(ahead.trip)
        bounds = [stage_seconds(terms, *exchanges, in_flight(schedule, stages, s, 1, m), m, before)]
        if schedule == "gpipe":
            bounds.append(stage_seconds_gpipe(terms, *exchanges, m, before))
        last = prefix.stages[-1]
        assert last.head + max(map(float, bounds)) + last.tail <= seconds * BELOW
        before = ahead.transfer


@pytest.mark.parametrize("schedule", ["eager-1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(20))
def test_no_step_in_line_is_faster_than_its_exchanges(schedule, seed):
    """From every stage alone, and from every two neighbours."""
    rng = np.random.default_rng(seed)
    stages, m = int(rng.integers(2, 7)), int(rng.integers(1, 30))
    forward, backward = rng.uniform(0, 2, (2, stages)) * rng.choice([0.0, 0.1, 1.0], (2, stages))
    cut, update = rng.uniform(0, 2, stages - 1) * rng.choice([0.1, 1.0]), rng.uniform(0, 3, stages)
    arrays = forward[:, None], backward[:, None], cut, backward, update
    seconds = float(step_seconds(schedule, m, *arrays, overlap=False))
    terms = [StageTerms(*map(np.array, row)) for row in zip(forward, backward, backward, update, strict=True)]
    head, tail = 0.0, update[0]
    for s, transfer in enumerate(cut):
        left = stages - 1 - s
        assert head + float(stage_seconds_in_line(terms[s], transfer, m, left)) + tail <= seconds * BELOW
        assert head + float(pair_seconds_in_line(terms[s], terms[s + 1], transfer, m, left)) + tail <= seconds * BELOW
        head, tail = head + forward[s] + transfer, max(tail + backward[s] + transfer, update[s + 1])
    assert head + float(stage_seconds_in_line(terms[-1], np.array(0.0), m, 0)) + tail <= seconds * BELOW


def test_two_stages_in_line():
    # 3 micro-batches through F = (1, 4), B = (5, 2), exchanges of 1 s: 3 (4 + 5) + 1 + 2 + 2 (3 + 1).  The first needs
    # 3 (1 + 5) + 8 for itself.
    first, second = (StageTerms(*map(np.array, row)) for row in ((1.0, 5.0, 5.0, 0.0), (4.0, 2.0, 2.0, 0.0)))
    arrays = np.array([[1.0], [4.0]]), np.array([[5.0], [2.0]]), np.ones(1), np.array([5.0, 2.0]), np.zeros(2)
    exact = float(step_seconds("eager-1f1b", 3, *arrays, overlap=False))
    assert float(pair_seconds_in_line(first, second, np.array(1.0), 3, 1)) == exact == 38
    assert float(stage_seconds_in_line(first, np.array(1.0), 3, 1)) == 26


def test_round_trips_see_what_no_stage_alone_does():
    # Two equal stages of 1 + 1 s, transfers of 1 s, 61 micro-batches.  Alone each needs 61 (1 + 1) s.  A round trip,
    # from the forward pass on 0 to the end of its backward pass, takes 1 + 1 + 2 + 1 + 1 s and advances three
    # micro-batches: 21 round trips.
    prefix = Prefix()
    option = Option(1.0, 1.0, 1.0, 0.0, (1,))
    for transfer in (0.0, 1.0):
        prefix = prefix.grown(1, single(option), transfer)
    ones = np.ones((2, 1))
    exact = float(step_seconds("eager-1f1b", 61, ones, ones, np.ones(1), np.ones(2), np.zeros(2)))
    assert loop_bound(prefix, Ahead(), "eager-1f1b", 61) == exact == 21 * 6


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 10.0])
def test_groups_stand_for_their_members(tolerance):
    rng = np.random.default_rng(0)
    given = [
        Option(*(float(x) for x in rng.uniform(1.0, 1.2, 4)), tuple(int(t) for t in rng.integers(1, 3, 3)))
        for _ in range(60)
    ]
    found = groups(given, 4, tolerance)
    assert sorted(map(id, given)) == sorted(id(option) for group in found for option in group.members)
    for group in found:
        for option in group.members:
            for part in ("forward", "backward", "sync", "update"):
                assert getattr(group.least, part) <= getattr(option, part)
            assert (group.least.degrees[0], group.least.degrees[-1]) == (option.degrees[0], option.degrees[-1])
    assert len(found) == {0.0: 60, 10.0: 4}.get(tolerance, len(found))
    assert 4 <= len(found) <= 60


def test_the_gap_closes_where_layers_cannot_share_their_best_degree():
    cluster = cluster_named("v100x4x4-10gbe")
    answer = solve(network_profile("gnmt", cluster.nodes[0].device), cluster, request(128), "general")
    assert 0 <= answer.gap <= 1e-9


@pytest.mark.parametrize("seed", range(16))
def test_the_best_plan_survives_the_sharpest_pruning(seed):
    """With a plan to beat that is slower by a hair, whatever is above the best one is cut off."""
    rng = np.random.default_rng(5000 + seed)
    draft = None
    while draft is None:  # until something fits
        instance = random_instance(rng, "general", layers=5, devices=4, plans=3000, mixed=seed % 2 == 1)
        asked, model = instance.asked, instance.model
        best = optimum(asked, model, "general")
        draft = best.draft
    start = Incumbent(seconds=best.seconds * (1 + 1e-7), plan=plan_of(draft, asked, model, "general"))
    search_general(asked, model, start)
    assert start.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_the_best_plan_of_several_stages():
    """As brute force finds it, also where one stage would be faster and its plan would cut off all others."""
    faster_alone = 0
    for seed in range(8):
        rng, plan = np.random.default_rng(6000 + seed), None
        while plan is None:  # until something fits
            instance = random_instance(rng, "general", layers=4, devices=4, plans=600, mixed=seed % 2 == 1)
            asked, model = instance.asked, instance.model
            plans = list(general_plans(asked, model))
            seconds, plan, _ = best_of((each for each in plans if len(each.stages) > 1), model)
        found = solve(model.profile, model.cluster, replace(asked, fewest_stages=2), "general", model.others)
        assert found.estimate.seconds == pytest.approx(seconds, rel=1e-9) and len(found.plan.stages) > 1
        assert all(len(each.stages) > 1 for each in found.alternatives)
        faster_alone += best_of((each for each in plans if len(each.stages) == 1), model)[0] < seconds
    assert faster_alone > 1
