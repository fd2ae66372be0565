"""The greedy choice with repair against the best of all, and as few slots as possible for what is streamed."""

import itertools

import numpy as np
import pytest

from jhpt.bench.memory.instances import best, drawn, instance
from jhpt.planner.cost.streaming import ON_HOST, Home, bytes_of, held, stream
from jhpt.planner.search.offload_buckets import Budget, choose, residencies, slots
from tests.covers import quick_and_exhaustive


@pytest.mark.parametrize("instances", quick_and_exhaustive([60, 300], [60]))
def test_greedy_and_repair_are_near_the_best(instances):
    """So many instances of up to 8 buckets: of their ratios 95 % are at most 1.05, all at most 1.15."""
    ratios = []
    for seed in range(instances):
        buckets, link, budget = instance(seed)
        expected, found = best(buckets, link, budget), choose(buckets, link, budget)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.peak <= budget.device and found.host <= budget.host
            own = stream(buckets, link, list(found.homes))
            assert (own.seconds[0], own.peak[0], own.host[0]) == (found.seconds, found.peak, found.host)
            ratios.append(found.seconds / expected)
    assert len(ratios) >= 2 / 3 * instances
    assert np.quantile(ratios, 0.95) <= 1.05 and max(ratios) <= 1.15


def test_what_fits_stays():
    buckets, link, _ = instance(1)
    found = choose(buckets, link, Budget(device=1e9, host=0.0))
    assert found is not None and set(found.homes) == {Home.RESIDENT}
    assert found.seconds == pytest.approx(sum(bucket.forward + bucket.backward for bucket in buckets))


def test_the_host_has_an_end():
    """What would fit the device does not fit the host."""
    buckets, link, budget = instance(3)
    fitting = choose(buckets, link, budget)
    assert fitting is not None and fitting.host > 0
    assert choose(buckets, link, Budget(device=budget.device, host=0.0)) is None


def test_as_many_slots_as_overlap():
    """1,000 sets of intervals."""
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        firsts = rng.integers(0, 12, rng.integers(0, 12))
        intervals = [(int(first), int(first + rng.integers(0, 6))) for first in firsts]
        found = slots(intervals)
        overlap = max((sum(first <= at <= last for first, last in intervals) for at in range(18)), default=0)
        assert len(set(found)) == overlap and set(found) == set(range(overlap))
        for (one, own), (other, its) in itertools.combinations(zip(intervals, found, strict=True), 2):
            assert own != its or one[1] < other[0] or other[1] < one[0]


@pytest.mark.parametrize("seed", range(60))
def test_residencies_are_what_a_step_holds(seed):
    """Their bytes, operation by operation, beside what is resident and what operations leave."""
    buckets, _ = drawn(seed, 6)
    layers = len(buckets)
    homes = np.random.default_rng(seed + 1).integers(0, 4, layers)
    size = np.zeros(2 * layers)
    for one in residencies([Home(home) for home in homes]):
        parts = ON_HOST[homes[one.layer]] if one.part == "rows" else np.array([1.0, 0.0])
        size[one.first : one.last + 1] += parts @ np.array([buckets[one.layer].weights, buckets[one.layer].state])
    still = held(buckets, np.full((1, layers), Home.RESIDENT))[0]
    gone = bytes_of(buckets, homes[None], ON_HOST).sum()
    assert np.allclose(held(buckets, homes[None])[0], still - gone + size)
