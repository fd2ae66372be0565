"""Samples by the speed of devices: dealt out as well as they can be, priced, and chosen."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.cluster import Link
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.plan_check import check_plan
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.by_speed import dealt, plans_by_speed, with_micro_batches
from jhpt.planner.search.choice import nearby
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.planner.brute_force import general_plans
from tests.planner.cost.test_estimate import layer, model
from tests.planner.instances import random_profile
from tests.planner.search.test_rows import cluster_of, node

EQUAL = model(layer(), layer(), layer(), update_seconds=0.0)
"""Three layers, each 1 s forward and 2 s backward for a sample."""


def costs(*nodes, profile=EQUAL) -> CostModel:
    return CostModel(profile, cluster_of(*nodes))


def one_stage(samples: tuple[int, ...], *, micro_batches: int = 1, **settings) -> Plan:
    chunk = Chunk(first=0, runs=runs_of([1, 1, 1]))
    stage = Stage(device=0, devices=len(samples), samples=samples, chunks=(chunk,))
    settings = {"batch": micro_batches * sum(samples), "space": "general", "schedule": "eager-1f1b"} | settings
    return Plan(model="any", cluster="mixed", micro_batches=micro_batches, stages=(stage,), **settings)


def test_a_device_that_is_twice_as_fast_has_twice_as_many():
    two = costs(node("fast", 2.0, devices=2), node("slow", 1.0, devices=2))
    assert dealt(two, range(4), 1, 6, recompute=False) == (2, 2, 1, 1)
    assert dealt(two, range(4), 2, 6, recompute=True) == (4, 2)
    # What is over goes where it is done first.
    assert sorted(dealt(two, range(4), 1, 7, recompute=False)[:2]) == [2, 3]


def test_where_samples_cannot_be_dealt_out():
    two = costs(node("fast", 9.0, devices=3), node("slow", 1.0))
    assert dealt(two, range(4), 1, 3, recompute=False) is None  # fewer samples than ranks
    assert dealt(two, range(4), 2, 8, recompute=False) is None  # a rank of both kinds
    assert dealt(two, range(4), 3, 8, recompute=False) is None  # 4 devices are no ranks of 3
    assert dealt(two, range(4), 1, 4, recompute=False) is None  # the slow one is still at its first


@given(st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_no_other_way_to_deal_is_done_sooner(seed):
    rng = np.random.default_rng(seed)
    names = [node(name, float(rng.uniform(0.5, 5.0)), devices=int(rng.integers(1, 3))) for name in "ab"]
    mixed = costs(*names, profile=random_profile(rng, 3))
    ranks, total = mixed.cluster.num_devices, int(rng.integers(1, 10))

    def seconds(samples):
        kinds = map(mixed.places.kind_of, range(ranks))
        return max(
            sum(float(both[mixed.index].sum()) for both in mixed.compute_seconds((kind,), n, 1))
            for kind, n in zip(kinds, samples, strict=True)
            if n
        )

    every = [each for each in itertools.product(range(1, total + 1), repeat=ranks) if sum(each) == total]
    found = dealt(mixed, range(ranks), 1, total, recompute=False)
    if found is None:
        # Every way gives a rank something that is done later than if that rank had nothing.
        without = min(seconds(each) for each in itertools.product(range(total + 1), repeat=ranks) if sum(each) == total)
        assert all(seconds(each) > without for each in every)
    else:
        assert sum(found) == total and min(found) > 0
        assert seconds(found) == pytest.approx(min(map(seconds, every)))


def test_seconds_are_those_of_the_rank_that_is_done_last():
    two = costs(node("fast", 2.0), node("slow", 1.0))
    # 3 layers of 3 s: 4 samples on the fast device take as long as 2 on the slow one, on which the profile's seconds
    # are twice as many.
    estimate = price(one_stage((4, 2), micro_batches=2), two)
    assert estimate.times.forward[0, 0] == pytest.approx(4 * 3.0)
    assert estimate.times.backward[0, 0] == pytest.approx(4 * 6.0)
    assert price(one_stage((5, 1)), two).times.forward[0, 0] == pytest.approx(5 * 3.0)
    assert price(one_stage((3, 3)), two).times.forward[0, 0] == pytest.approx(3 * 2 * 3.0)


def test_data_ranks_do_not_wait_for_each_other_within_a_pass():
    """Of the fast kind the first layer takes 5 s, of the slow kind the second; equal samples wait layer by layer."""
    profiles = [model(layer(*a), layer(*b)) for a, b in (((5.0, 0.0), (1.0, 0.0)), ((1.0, 0.0), (4.0, 0.0)))]
    nodes = node("toy", 2.0), node("slow", 1.0)
    two = CostModel(profiles[0], cluster_of(*nodes), others={nodes[1].device.rates: profiles[1]})
    chunk = Chunk(first=0, runs=runs_of([1, 1]))
    stage = Stage(device=0, devices=2, samples=(2, 1), chunks=(chunk,))
    plan = one_stage((2, 1)).model_copy(update={"stages": (stage,)})
    assert price(plan, two).times.forward[0, 0] == pytest.approx(2 * 6.0)
    equal = plan.model_copy(update={"batch": 2, "stages": (stage.model_copy(update={"samples": None}),)})
    assert price(equal, two).times.forward[0, 0] == pytest.approx(5.0 + 4.0)


def test_gradients_are_summed_after_the_last_backward_pass():
    """Each of 3 layers has 10 parameters of 2 bytes on links of 1 byte/s: 20 s over two ranks, beside 18 s of work."""
    profile = model(*[layer(parameters=10.0)] * 3)
    slow = Link(bandwidth=1.0, latency=0.0)
    mixed = CostModel(profile, cluster_of(node("fast", 2.0), node("slow", 1.0), network=slow))
    times = price(one_stage((4, 2)), mixed).times
    assert times.sync[0] == pytest.approx(times.backward[0, 0]) and times.update[0] == pytest.approx(60.0)


def test_every_device_has_room_for_the_most_samples():
    profile = model(*[layer(activation_bytes=10.0)] * 3)
    need = {n: price(one_stage((n, n)), costs(node("a", 1.0), node("b", 1.0), profile=profile)) for n in (2, 4)}
    two, four = (sum(need[n].stages[0].bytes.values()) for n in (2, 4))
    assert two < four
    for fast, slow, fits in ((four, four, True), (four - 1, four, False), (four, four - 1, False)):
        mixed = costs(node("fast", 2.0, memory=fast), node("slow", 1.0, memory=slow), profile=profile)
        assert price(one_stage((4, 2)), mixed).fits == fits


def test_the_fastest_plan_has_samples_by_speed():
    two = costs(node("fast", 3.0, devices=2), node("slow", 1.0, devices=2))
    wanted = request(8, (1,), zero=(0,), recompute=(False,))
    answer = solve(EQUAL, two.cluster, wanted, "general")
    assert answer.plan.stages[0].samples == (3, 3, 1, 1)
    assert answer.gap == pytest.approx(0) and answer.estimate.seconds == pytest.approx(3 * 9.0)
    assert shape_text(answer.plan) == "4 devices, tensor 1, samples by speed (2 x 3, 2 x 1), 1 micro-batch"
    # Without them the fast ones would have two: 2 x 27 s; or all layers in stages by speed.
    others = [plan for plan in answer.alternatives if not plan.by_speed]
    assert others and min(plan.seconds for plan in others) > answer.estimate.seconds
    several = solve(EQUAL, two.cluster, replace(wanted, fewest_stages=2), "general")  # samples by speed have one stage
    assert all(len(plan.stages) > 1 for plan in (several.plan, *several.alternatives))


def test_the_decision_set_is_part_of_that_of_the_oracle():
    two = costs(node("fast", 3.0, devices=2), node("slow", 1.0))
    wanted = request(6, zero=(0, 1), recompute=(False, True))

    def known(plan):
        (stage,), samples = plan.stages, plan.stages[0].samples
        return plan.micro_batches, plan.zero, plan.recompute, tuple(stage.members), max(samples[:2]), samples[2]

    every = {known(plan) for plan in general_plans(wanted, two) if plan.by_speed}
    found = [known(plan) for plan in plans_by_speed(wanted, "eager-1f1b", two)]
    assert found and len(found) < len(every) and set(found) <= every


def test_other_numbers_of_micro_batches_are_dealt_out_anew():
    two = costs(node("fast", 2.0), node("slow", 1.0))
    plan = one_stage((4, 2), micro_batches=2)
    assert with_micro_batches(plan, 4, two).stages[0].samples == (2, 1)
    assert with_micro_batches(plan, 12, two) is None
    assert [(one.micro_batches, one.stages[0].samples) for one in nearby(plan, two)] == [(1, (8, 4)), (4, (2, 1))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 12}, "together the 12 of a micro-batch; they name 2 ranks with 6"),
        ({"space": "spmd", "schedule": "1f1b"}, "for space=general with one stage"),
    ],
)
def test_samples_that_do_not_fit_are_refused(change, words):
    plan = one_stage((4, 2))
    check_plan(plan, 3)
    with pytest.raises(InputError, match=words):
        check_plan(plan.model_copy(update=change), 3)


def test_samples_of_several_stages_or_degrees_are_refused():
    plan = one_stage((4, 2))
    (stage,) = plan.stages
    first = stage.model_copy(update={"chunks": (Chunk(first=0, runs=runs_of([1])),)})
    second = Stage(device=2, devices=1, chunks=(Chunk(first=1, runs=runs_of([1, 1])),))
    with pytest.raises(InputError, match="general with 2"):
        check_plan(plan.model_copy(update={"stages": (first, second)}), 3)
    degrees = stage.model_copy(update={"chunks": (Chunk(first=0, runs=runs_of([1, 2, 1])),)})
    with pytest.raises(InputError, match="need one tensor degree"):
        check_plan(plan.model_copy(update={"stages": (degrees,)}), 3)
