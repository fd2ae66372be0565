"""The plan to run: the plainest of those that are about as fast, or one by hand in a budget.

The latter keeps what `parallel` says and chooses what `memory` leaves open.
"""

import itertools

import pytest

from jhpt.core.calibration import order_error
from jhpt.core.cluster_file import find_cluster
from jhpt.core.load import load_config
from jhpt.core.plan import Offload, SavedTensors
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.planner.api import capped, prepare
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.choice import first_to_try, fitted, nearby, plainest, plan_to_run, plans_to_try
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.sharding.plans import mixed, piped

GIB = 1 << 30


def of(plan, seconds):
    return plan.model_copy(update={"seconds": seconds})


@pytest.mark.parametrize(
    ("others", "winner"),
    [
        ([of(piped([2, 2], 2, data=2), 1.0), of(piped([4], 1, data=4), 1.04)], 1),
        ([of(piped([2, 2], 2, data=2), 1.0), of(piped([4], 1, data=4), 1.06)], 0),
        ([of(mixed([1, 2, 2], 4), 1.0), of(piped([3], 1, data=2, tensor=2), 1.04)], 1),
        ([of(piped([3], 1, data=2, tensor=4), 1.0), of(piped([3], 1, data=4, tensor=2), 1.01)], 1),
        ([of(piped([2, 2], 2, data=2), 1.0), of(piped([1, 1, 1, 1], 4), 1.01)], 1),
        ([of(piped([2, 2], 2), 1.0), of(piped([2, 2], 2, schedule="gpipe"), 1.01)], 1),
        ([of(piped([2, 2], 2, micro_batches=8), 1.0), of(piped([2, 2], 2, micro_batches=4), 1.01)], 0),
        ([of(piped([3], 1, data=4, zero=3), 1.0), of(piped([3], 1, data=4, zero=1), 1.01)], 1),
        ([of(piped([3], 1, data=4), 1.02), of(piped([3], 1, data=4), 1.01)], 1),
        (
            [
                of(piped([3], 1, data=2, tensor=2, sequence=True), 1.0),
                of(piped([3], 1, data=2, tensor=2, zero=3), 1.01),
            ],
            1,
        ),
        ([of(piped([3], 1, tensor=2, recompute=True), 1.0), of(piped([3], 1, tensor=2, sequence=True), 1.01)], 1),
    ],
    ids=[
        "fewer stages",
        "too slow",
        "one degree",
        "smaller degree",
        "fewer kinds",
        "gpipe",
        "micro-batches do not count",
        "less ZeRO",
        "equals",
        "whole sequences before less ZeRO",
        "no recomputation before whole sequences",
    ],
)
def test_plainest(others, winner):
    assert plainest(others) == others[winner]


@pytest.fixture(scope="module")
def answered():
    """An answer of the planner, its request and its cluster."""
    cluster = find_cluster("v100x4x2-10gbe")
    profile = analytic_profile(load_config("gpt2-124m"), cluster.nodes[0].device, "float32")
    asked = request(32)
    return solve(profile, cluster, asked), asked, cluster


def test_the_plan_to_run_is_about_as_fast_as_the_fastest_and_uses_all_devices(answered):
    answer, asked, cluster = answered
    plan = plan_to_run(answer, asked, cluster.num_devices)
    assert plan.devices == cluster.num_devices
    assert plan.device == answer.plan.device
    assert answer.plan.seconds <= plan.seconds <= (1 + order_error()) * answer.plan.seconds


def test_the_plans_to_try_are_different_and_the_simplest_comes_first(answered):
    answer, asked, cluster = answered
    tried = plans_to_try([(answer, asked)], cluster.num_devices, 4)
    plans = [one.plan for one in tried]
    assert plans[0] == plan_to_run(answer, asked, cluster.num_devices) and plans[1].seconds == answer.plan.seconds
    assert len({plan.model_dump_json(exclude={"seconds"}) for plan in plans}) == len(plans) == 4
    assert plans_to_try([(answer, asked)], cluster.num_devices, 1) == tried[:1]
    assert all(one.nearby == nearby(one.plan, answer.model) for one in tried) and any(one.nearby for one in tried)


def test_near_a_plan_are_half_and_twice_as_many_micro_batches_where_they_run_and_fit(answered):
    answer, _, _ = answered
    layers = answer.model.num_layers

    def counts(plan, model=answer.model):
        found = nearby(plan, model)
        assert all(one.seconds == price(one, model).seconds for one in found)
        return [one.micro_batches for one in found]

    def pipeline(micro_batches):
        return piped([layers // 2, layers - layers // 2], 2, data=4, micro_batches=micro_batches)

    assert [counts(pipeline(count)) for count in (1, 4, 8)] == [[2], [2, 8], [4]]  # at 16 a replica has half a sample
    assert [counts(piped([layers], 1, data=8, micro_batches=count)) for count in (1, 2, 4)] == [[2], [1, 4], [2]]
    most = max(stage.total_bytes for stage in price(pipeline(4), answer.model).stages)
    tight = CostModel(answer.model.profile, capped(answer.model.cluster, most))
    assert counts(pipeline(4), tight) == [8]


def test_unlike_plans_are_tried_before_like_ones():
    """After the simplest and the fastest comes the fastest of every other kind, then all others by predicted seconds.

    A kind that is predicted to take more than 1.5 times as long waits for its turn.
    """
    plans = [
        of(piped([4], 1, data=4), 1.3),
        of(piped([2, 2], 2, schedule="gpipe"), 1.02),
        of(piped([2, 2], 2), 1.0),
        of(piped([1, 1, 1, 1], 4), 1.1),
        of(piped([4], 1, data=4, micro_batches=2), 1.2),
        of(piped([4], 1, data=2, tensor=2), 1.6),
        of(piped([2, 2], 2, data=2, tensor=2), 1.4),
    ]
    tried = first_to_try(plans, 9)
    assert [plan.seconds for plan in tried] == [1.02, 1.0, 1.2, 1.4, 1.1, 1.3, 1.6]
    late = [plan.model_copy(update={"seconds": 1.45}) if plan.schedule == "gpipe" else plan for plan in plans]
    assert [plan.seconds for plan in first_to_try(late, 9)] == [1.0, 1.2, 1.4, 1.45, 1.1, 1.3, 1.6]
    assert all(first_to_try(plans, count) == tried[:count] for count in range(1, 7))


def test_plans_of_both_spaces_are_tried(answered):
    """The simplest is an SPMD plan, as long as no other is clearly faster; a general plan of one stage is left out."""
    answer, asked, cluster = answered
    wanted = request(32, zero=(0,), whole=True)
    general = solve(answer.model.profile, cluster, wanted, "general")
    plans = [one.plan for one in plans_to_try([(answer, asked), (general, wanted)], cluster.num_devices, 12)]
    assert {plan.space for plan in plans} == {"spmd", "general"} and plans[0].space == "spmd"
    assert all(len(plan.stages) > 1 for plan in plans if plan.space == "general")
    faster = general.plan.model_copy(update={"seconds": 0.9 * answer.plan.seconds})
    assert plainest([answer.plan, general.plan.model_copy(update={"seconds": answer.plan.seconds})]) == answer.plan
    assert plainest([answer.plan, faster]) == faster


def asked(preset, budget, devices=1, **settings):
    """(plan by hand, cost model, configuration) on so many H100."""
    config = load_config(preset, {"data.batch_size": 8} | settings)
    cluster = capped(find_cluster(f"h100x{devices}x1"), budget)
    model = CostModel(analytic_profile(config, cluster.nodes[0].device), cluster)
    return plan_by_hand(config, devices), model, config


def test_what_fits_stays_as_it_is():
    plan, model, config = asked("gpt2-124m", 60 * GIB)
    assert fitted(plan, model, config) is plan


def test_what_is_said_by_hand_may_fill_the_device():
    """A reserve is left by what takes its place."""
    plan, model, _ = asked("gpt2-1.5b", 80 * GIB)
    need = price(plan, model).stages[0].total_bytes
    plan, model, config = asked("gpt2-1.5b", 1.001 * need)
    assert fitted(plan, model, config) is plan and not price(plan, model).fits
    plan, model, config = asked("gpt2-1.5b", 0.999 * need)
    found = price(fitted(plan, model, config), model)
    assert found.fits and found.stages[0].total_bytes <= 0.999 * 0.97 * need


@pytest.mark.parametrize(
    ("preset", "budget"), [("gpt2-1.5b", 24 * GIB), ("gpt2-1.5b", 30 * GIB), ("gpt-6.7b", 24 * GIB)]
)
def test_the_fastest_that_fits(preset, budget):
    """Of all that is left open, by trying all."""
    plan, model, config = asked(preset, budget)
    found = fitted(plan, model, config)
    assert price(found, model).fits and not price(plan, model).fits
    sizes = [size for size in range(1, 49) if (len(model.profile.layers) - 2) % size == 0]
    hosts = [None, *(Offload(kind=w, resident=s - 1) for w in ("parameters", "optimizer", "both") for s in sizes)]
    every = (
        price(plan.model_copy(update={"recompute": again, "offload": offload, "zero": zero}), model)
        for again, (offload, zero) in itertools.product(
            (False, True), [*((host, plan.zero) for host in hosts), (None, 3)]
        )
    )
    assert price(found, model).seconds == min(own.seconds for own in every if own.fits)
    assert (found.stages, found.micro_batches) == (plan.stages, plan.micro_batches)
    assert (found.zero != plan.zero) == (preset == "gpt2-1.5b" and budget == 24 * GIB)


def test_what_is_said_is_done():
    plan, model, config = asked("gpt-6.7b", 24 * GIB, **{"memory.offload": "off"})
    assert fitted(plan, model, config) is plan, "nothing fits then, and the compiler says so"
    plan, model, config = asked("gpt-6.7b", 24 * GIB, **{"memory.recompute": "none"})
    assert not fitted(plan, model, config).recompute
    plan, model, config = asked("gpt-6.7b", 24 * GIB, **{"memory.offload": "both"})
    assert fitted(plan, model, config).offload == Offload()


def test_pipelines_can_only_compute_again():
    plan, model, config = asked("gpt2-1.5b", 16.5 * GIB, 2, **{"parallel.pipe": 2, "parallel.micro_batches": 2})
    found = fitted(plan, model, config)
    assert found.offload is None and found.recompute


def test_state_in_few_bits_stays_on_the_device():
    few = {"optimizer.weights": "bfloat16_stochastic", "optimizer.moments": "int8"}
    plan, model, config = asked("gpt-6.7b", 40 * GIB, **few)
    assert fitted(plan, model, config).offload is None
    answer = prepare("gpt2-1.5b", cluster="h100x1x1", batch=8, overrides=few).solve()
    assert answer.plan.offload is None


def test_names_that_are_kept_are_priced():
    """With blocks on the host as without: what is kept takes room, and is not computed again."""
    plan, model, _ = asked("gpt2-1.5b", 80 * GIB)
    offloaded = plan.model_copy(update={"offload": Offload(), "recompute": True})
    named = offloaded.model_copy(update={"saved": SavedTensors(device=("qkv", "mlp_hidden"))})
    bare, own = price(offloaded, model), price(named, model)
    block = model.profile.kinds["block"]
    saved = sum(tensor.bytes for tensor in block.tensors if tensor.name in ("qkv", "mlp_hidden"))
    more = own.stages[0].bytes["activations"] - bare.stages[0].bytes["activations"]
    assert more == pytest.approx(48 * 8 * saved)
    assert own.stages[0].seconds["recomputation"] < bare.stages[0].seconds["recomputation"]
