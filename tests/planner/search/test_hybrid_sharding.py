"""Hybrid sharding in the search: brute force where it may win, and what it wins there."""

from dataclasses import replace

import numpy as np
import pytest

from jhpt.core.cluster import Link
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import search
from tests.covers import quick_and_exhaustive
from tests.planner.brute_force import best, spmd_plans
from tests.planner.cost.test_estimate import cluster
from tests.planner.instances import random_profile

WINS = (6, 30, 37)
"""Of these seeds a hybrid plan is the fastest."""


def two_nodes(seed):
    """(costs, request) of few layers on two nodes of two devices, with a slow network between them."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, 4, min_layers=3, degrees=(1, 2))
    given = cluster(2, nodes=2, inside=float(10 ** rng.uniform(1, 3)), memory=float(10 ** rng.uniform(2, 4)))
    network = Link(bandwidth=float(10 ** rng.uniform(0, 2)), latency=float(rng.choice([0.0, 0.05])))
    overlap = bool(rng.random() < 0.75)
    return CostModel(profile, given.model_copy(update={"network": network, "overlap": overlap})), request(
        4, sorted(rng.choice([1, 2, 4], 2, replace=False).tolist()), sequence=False
    )


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(40), (6, 30)))
def test_brute_force(seed):
    costs, asked = two_nodes(seed)
    found = search(asked, costs, "spmd")
    seconds, chosen, _ = best(spmd_plans(asked, costs), costs)
    if chosen is None:
        assert found.plan is None
        return
    assert found.plan is not None
    assert found.seconds == pytest.approx(seconds, rel=1e-9) == found.lower_bound
    assert price(found.plan, costs).seconds == found.seconds
    assert found.plan.zero_ranks in (None, 2)
    without = search(replace(asked, hybrid=False), costs, "spmd")
    assert without.plan is not None and without.plan.zero_ranks is None
    assert found.seconds <= without.seconds * (1 + 1e-12)
    if seed in WINS:
        assert found.plan.zero_ranks == 2 and found.seconds < without.seconds
        assert f"ZeRO-{found.plan.zero} over 2 of 4 data ranks" in shape_text(found.plan)
