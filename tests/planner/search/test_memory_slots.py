"""Slots for what is streamed: as few as overlap, and never two of one."""

import itertools

import numpy as np
import pytest

from jhpt.bench.memory.instances import drawn
from jhpt.planner.cost.streaming import ON_HOST, Home, bytes_of, held
from jhpt.planner.search.memory_slots import residencies, slots


def test_as_many_slots_as_overlap():
    """2,000 sets of intervals."""
    for seed in range(2000):
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
