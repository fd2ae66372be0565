"""Families of candidates: visited in the order of their bounds, and opened only when they have to be."""

from functools import partial

import numpy as np
import pytest

from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.ascending import ascending
from jhpt.planner.search.bounds import bounded_grids
from jhpt.planner.search.request import Incumbent, request
from jhpt.planner.search.saved_sets import SavedSets
from jhpt.planner.search.spmd import search_spmd
from tests.planner.instances import random_cluster, random_profile


@pytest.mark.parametrize("seed", range(5))
def test_members_come_as_if_all_were_sorted(seed):
    rng = np.random.default_rng(seed)
    families = [sorted(rng.integers(0, 9, rng.integers(0, 6)).tolist()) for _ in range(7)]
    named = [[(float(bound), (at, number)) for number, bound in enumerate(f)] for at, f in enumerate(families)]
    bounds = [min(family, default=0) - int(rng.integers(0, 3)) for family in families]
    merged = ascending((float(b), partial(iter, f)) for b, f in zip(bounds, named, strict=True))
    assert list(merged) == sorted((pair for family in named for pair in family), key=lambda pair: pair[0])


def test_families_stay_closed_until_their_bound_is_reached():
    opened = []

    def family(name):
        opened.append(name)
        yield 5.0, name

    merged = ascending((bound, partial(family, name)) for bound, name in ((4.0, "near"), (6.0, "far")))
    assert next(merged) == (5.0, "near")
    assert opened == ["near"]
    assert [name for _, name in merged] == ["far"]


def test_no_grid_has_a_bound_below_that_of_its_family():
    grids = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        model = CostModel(random_profile(rng, 5), random_cluster(rng, 4))
        asked = request(6, sample_chunks=(1, 2))
        bounds = [bound for bound, _ in bounded_grids(asked, model, "spmd", SavedSets(asked, model, "spmd"))]
        assert bounds == sorted(bounds)
        grids += len(bounds)
    assert grids > 100


@pytest.mark.parametrize("seed", range(6))
def test_a_search_for_any_plan_ends_with_the_first(seed):
    rng = np.random.default_rng(seed)
    model, asked = CostModel(random_profile(rng, 5), random_cluster(rng, 4)), request(4)
    first, best = Incumbent(any_plan=True), Incumbent()
    for incumbent in (first, best):
        search_spmd(asked, model, incumbent)
    assert first.settled == (best.plan is not None)
    assert len(first.shapes) <= 1
