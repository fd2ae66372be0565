"""The plan to run: plain where plain is about as fast."""

import pytest

from jhpt.core.catalogue import find_cluster
from jhpt.core.load import load_config
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.choice import MARGIN, plainest, plan_to_run
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.sharding.plans import mixed, piped


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
    ],
)
def test_plainest(others, winner):
    assert plainest(others) == others[winner]


def test_the_plan_to_run_is_about_as_fast_as_the_fastest_and_uses_all_devices():
    cluster = find_cluster("v100x4x4-10gbe")
    profile = analytic_profile(load_config("gpt2-124m"), cluster.nodes[0].device, "float32")
    asked = request(64)
    answer = solve(profile, cluster, asked)
    plan = plan_to_run(answer, asked, cluster.num_devices)
    assert plan.devices == cluster.num_devices
    assert plan.device == answer.plan.device
    assert answer.plan.seconds <= plan.seconds <= (1 + MARGIN) * answer.plan.seconds
