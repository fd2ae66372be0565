"""General plans in `jhpt bench hybrid`: what they are predicted to take, hosts of different quotas, claims."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.hybrid import run as hybrid
from benchmarks.hybrid.baselines import ANY_GRID, equal_splits
from benchmarks.hybrid.bubble import plan_of
from benchmarks.hybrid.competitors import planned, prices_by_rate, with_nearby
from benchmarks.hybrid.costs import cluster_of
from benchmarks.hybrid.general import Dispatch, general_seconds
from benchmarks.hybrid.mixed import planned_by_speed, prices_by_speed, profiles_by_share
from benchmarks.hybrid.models import SUBJECTS
from benchmarks.hybrid.pace import Moment
from benchmarks.hybrid.quota import Quota
from benchmarks.hybrid.task import BY_SPEED, SAMPLES, TRIALS
from jhpt.core.framework import Framework
from jhpt.core.plan_check import check_stages_run
from jhpt.core.profile import Timing
from jhpt.planner.cost.estimate import StageTimes, check, price, stage_times
from jhpt.planner.cost.model import CostModel
from tests.benchmarks.test_hybrid import LINK, QUOTA, step_row, timed
from tests.sharding.stages.plans import general

NOTHING = Dispatch(passes=0.0, transfer=0.0, step=0.0)
DISPATCH = Dispatch(passes=2e-4, transfer=3e-4, step=2e-3)
WHOLE = Quota(share=1.0, period=1e-2, exchange=0.0, cores=8)
SHARES = (1.0, 1.0, 0.5, 0.5)


def times(forward, backward, cut):
    stages = len(forward)
    columns = (np.array(each)[:, None] for each in (forward, backward))
    nothing = np.zeros(stages)
    return StageTimes(
        **dict(zip(("forward", "backward"), columns, strict=True)), cut=np.array(cut), sync=nothing, update=nothing
    )


def test_a_step_by_hand():
    """Stages of 3 and 4 s forward, 5 and 6 backward, transfers of 1 s, two micro-batches, gpipe.

    Stage 0: F 0..3, sends 3..4, F 4..7.  Stage 1: F 4..8.  The second transfer waits for it: 8..9.  F 9..13,
    B 13..19, sends 19..20, B 20..26, sends 26..27; stage 0: B 20..25, then at 27 the second: B 27..32."""
    plan = general([2, 2], [1, 1], [1] * 4, batch=2, micro_batches=2, schedule="gpipe")
    given = times([3.0, 4.0], [5.0, 6.0], [1.0])
    assert general_seconds(plan, given, WHOLE, NOTHING) == pytest.approx(32.0)
    # Each host dispatches four passes and four transfers, and not all of it is on the longest path.
    dispatched = general_seconds(plan, given, WHOLE, Dispatch(passes=0.2, transfer=0.0, step=0.5))
    assert 32.0 + 0.5 + 5 * 0.1 <= dispatched <= 32.0 + 0.5 + 8 * 0.1


def test_a_slower_host_takes_longer_and_what_it_saves_counts():
    plan = general([2, 2], [1, 1], [1] * 4, batch=2, micro_batches=1)
    quota = replace(WHOLE, share=0.5, period=0.0)
    given = times([3.0, 4.0], [5.0, 6.0], [1.0])
    assert general_seconds(plan, given, quota, NOTHING) == pytest.approx(20.0)  # layers are timed on these hosts
    assert general_seconds(plan, given, replace(quota, period=2.0), NOTHING) < 20.0


def test_the_price_of_general_plans_has_their_dispatch():
    profile = timed(SUBJECTS["mlp"]().profile())
    plan = general([4, 4], [3, 1], [1] * 8, batch=2048, micro_batches=4, schedule="gpipe")
    without, with_it = (
        CostModel(profile.model_copy(update={"framework": Framework(stage_dispatch=seconds)}), cluster_of(LINK, 4))
        for seconds in (0.0, 0.5)
    )
    passes = 2 * (4 + 1)  # of the longest path, forward and backward
    assert price(plan, with_it).seconds - price(plan, without).seconds == pytest.approx(0.5 * passes, rel=1e-6)
    spmd = general([8], [4], [1] * 8, batch=2048).model_copy(update={"space": "spmd"})
    assert price(spmd, with_it).seconds == price(spmd, without).seconds


def test_the_general_plan_of_vgg_competes():
    subject = SUBJECTS["vgg"]()
    profile = subject.profile()
    kinds = {
        name: kind.model_copy(
            update={"timings": (Timing(batches=(1.0,), forward=(seconds,), backward=(2 * seconds,)),)}
        )
        for name, kind in profile.kinds.items()
        for seconds in [2e-4 if name.startswith("conv") else 2e-5]
    }
    profile = profile.model_copy(update={"kinds": kinds})
    everything = planned(subject, prices_by_rate(profile, {1e8: LINK}, QUOTA, 4, (profile, DISPATCH)))
    variants = {one.name: one for one in everything}
    plan, spmd = variants["general"].plan, variants["spmd"]
    assert plan in [one.plan for one in everything if one.name == "plan"]
    assert variants["general"].predicted < spmd.predicted and plan.devices == 4 and len(plan.stages) > 1
    check(plan, CostModel(profile, cluster_of(LINK, 4)))
    check_stages_run(plan)
    assert "general" not in {one.name for one in planned(subject, prices_by_rate(profile, {1e8: LINK}, QUOTA, 4))}

    # Each kind of plan takes what its layers take, timed as it runs them.
    slower = {
        name: kind.model_copy(
            update={
                "timings": tuple(
                    each.model_copy(update={"forward": (1.1 * each.forward[0],), "backward": (1.1 * each.backward[0],)})
                    for each in kind.timings
                )
            }
        )
        for name, kind in profile.kinds.items()
    }
    apart = profile.model_copy(update={"kinds": slower})
    others = {
        one.name: one for one in planned(subject, prices_by_rate(profile, {1e8: LINK}, QUOTA, 4, (apart, DISPATCH)))
    }
    assert others["spmd"].predicted == spmd.predicted
    assert others["general"].predicted > 1.02 * variants["general"].predicted


@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_a_slower_machine_takes_longer_for_layers_and_no_longer_for_links(name):
    """One host alone takes as many times as long, and no plan takes more.  Quotas hold at every moment, so nothing is
    saved or lost in a period."""
    subject = SUBJECTS[name]()
    profile = timed(subject.profile())
    prices = prices_by_rate(profile, {5e8: LINK}, replace(QUOTA, period=0.0), 4, (profile, DISPATCH))
    for one in planned(subject, prices):
        same, slower = (Moment(pace={4: pace, 64: pace}, alone={}) for pace in (1.0, 1.25))
        later = prices[5e8].at(slower).variant(one.name, one.plan)
        assert prices[5e8].at(same).variant(one.name, one.plan) == one
        if one.plan.devices == 1:
            assert later.predicted == pytest.approx(1.25 * one.predicted)
        assert one.predicted < later.predicted <= 1.251 * one.predicted, one.name


def test_passes_of_few_rows_have_a_pace_and_a_gain_of_their_own():
    """One host takes 1.5 times as long for 64 rows, twice as long for 128 and more; or gains as much by being alone."""
    subject = SUBJECTS["mlp"]()
    profile = timed(subject.profile())
    timing = Timing(batches=(64.0, 128.0, 512.0), forward=(0.01, 0.02, 0.03), backward=(0.02, 0.04, 0.06))
    kinds = {name: kind.model_copy(update={"timings": (timing,)}) for name, kind in profile.kinds.items()}
    profile = profile.model_copy(update={"kinds": kinds, "update_seconds": 0.0})
    prices = prices_by_rate(profile, {5e8: LINK}, replace(QUOTA, period=0.0), 4)[5e8]
    ratios, ones = {64: 1.5, 128: 2.0}, {64: 1.0, 128: 1.0}
    later, gains = (prices.at(Moment(pace=pace, alone=alone)) for pace, alone in ((ratios, ones), (ones, ratios)))
    for rows, pace in ((64, 1.5), (128, 2.0), (512, 2.0)):
        plan = plan_of(6, 1, "1f1b").model_copy(update={"batch": 2048, "micro_batches": 2048 // rows})
        assert later.seconds(plan) == pytest.approx(pace * prices.seconds(plan))
        assert gains.seconds(plan) == pytest.approx(prices.seconds(plan) / pace)
    kind = later.model.profile.kinds["block"]
    between = [(1.5 * few + 2.0 * many) / 2 for few, many in zip(timing.at(64), timing.at(128), strict=True)]
    assert kind.seconds(96, 1) == pytest.approx(between)


def test_hosts_of_different_quotas_get_layers_by_their_speed():
    subject = SUBJECTS["gpt"]()
    kinds = subject.profile().kinds
    seconds = {
        f"{kind}|1|{batch} {way}": 1e-9 * batch * kinds[kind].parameters * (1 + (way == "both"))
        for kind in kinds
        for batch in (2, 32)
        for way in ("forward", "both")
    }
    by_host = [{**{name: each / share for name, each in seconds.items()}, "update": 0.01 / share} for share in SHARES]
    profiles, rows = profiles_by_share(subject, by_host, SHARES)
    assert set(profiles) == {1.0, 0.5} and len(rows) == 2 * 2 * len(kinds)
    quota = replace(QUOTA, shares=SHARES)
    prices = prices_by_speed((profiles, profiles, profiles), LINK, 5e8, quota, DISPATCH)
    everything = planned_by_speed(subject, prices)
    equal = [one for one in everything if one.name not in (BY_SPEED, SAMPLES)]
    by_speed = [one for one in everything if one.name == BY_SPEED]
    grids = [ANY_GRID] * TRIALS
    assert [one.name for one in equal] == ["data parallel", "gpipe", "1f1b", *grids] and 1 < len(by_speed) <= TRIALS
    near = with_nearby(by_speed, prices)
    assert len(near) > len(by_speed) and {one.name for one in near} == {BY_SPEED}
    assert all(one.plan.space == "general" and one.plan.devices == 4 for one in near)
    (dealt,) = (one for one in everything if one.name == SAMPLES)
    samples = dealt.plan.stages[0].samples
    assert samples[0] > samples[-1] and sum(samples) * dealt.plan.micro_batches == subject.batch
    assert dealt.predicted < next(one.predicted for one in equal if one.name == "data parallel")
    best = min(one.predicted for one in equal)
    assert by_speed[0].predicted < best == next(one.predicted for one in equal if one.name == ANY_GRID)
    cluster = cluster_of(LINK, 4, SHARES)
    assert cluster.mixed and cluster.num_devices == 4
    model = CostModel(profiles[1.0], cluster, others={cluster.nodes[1].device.rates: profiles[0.5]})
    for plans in equal_splits(subject, model).values():
        assert all(plan.devices == 4 and plan.space == "spmd" for plan in plans)
    fast, slow = (
        stage_times(general([6], [4], [1] * 6, batch=32), each).forward[0, 0]
        for each in (CostModel(profiles[1.0], cluster_of(LINK, 4)), model)
    )
    assert slow == pytest.approx(2 * fast)  # the slowest host of a stage sets its pace


def test_claims_of_general_plans():
    vgg = [
        step_row("vgg", 1e8, "data parallel", [2.0, 2.0], 2.0),
        step_row("vgg", 1e8, "data parallel again", [2.0, 2.0], 2.0),
        step_row("vgg", 1e8, "plan", [1.0, 1.0], 1.0),
        step_row("vgg", 1e8, "general", [0.5, 0.8], 0.6),
        step_row("vgg", 2e9, "data parallel", [1.0, 1.0], 1.0),
        step_row("vgg", 2e9, "data parallel again", [1.0, 1.0], 1.0),
        step_row("vgg", 2e9, "plan", [1.0, 1.0], 1.0),
        step_row("vgg", 2e9, "general", [1.0, 1.0], 1.1),
    ]
    mixed = [
        step_row("gpt on mixed hosts", 5e8, "data parallel", [3.0, 3.0], 3.0),
        step_row("gpt on mixed hosts", 5e8, "equal grid", [2.4, 2.4], 2.0),
        step_row("gpt on mixed hosts", 5e8, SAMPLES, [2.0, 2.0], 1.9),
        step_row("gpt on mixed hosts", 5e8, BY_SPEED, [1.6, 1.6], 1.76),
    ]
    claims = hybrid.claims([*vgg, *mixed])
    assert claims["worst_general_vs_spmd"].value == pytest.approx((2.0 + 1.25) / 2)
    assert claims["worst_general_vs_spmd"].setup.startswith("vgg at 100 Mbit/s against plan")
    assert claims["prediction_error_general_median"].value == pytest.approx((0.05 / 0.65 + 0.1) / 2)
    assert claims["worst_mixed_vs_equal"].value == pytest.approx(1.5)
    assert "against equal grid" in claims["worst_mixed_vs_equal"].setup
    assert claims["mixed_prediction_error_max"].value == pytest.approx(0.1)
    assert claims["worst_samples_by_speed_vs_data_parallel"].value == pytest.approx(1.5)
    assert claims["samples_by_speed_prediction_error_max"].value == pytest.approx(0.05)
    assert claims["worst_vs_best_baseline"].setup.startswith("vgg")  # mixed hosts have claims of their own
    assert hybrid.claims([]) == {}
