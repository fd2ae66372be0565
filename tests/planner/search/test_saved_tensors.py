"""The dynamic programme of a chain, against every choice there is."""

import itertools

import numpy as np
import pytest

from jhpt.planner.search.saved_tensors import LayerOption, choose_in_chain
from tests.covers import quick_and_exhaustive


def drawn_chain(seed):
    """Up to five layers of up to four options, equal layers among them, and a budget."""
    rng = np.random.default_rng(seed)
    kinds = [
        [
            LayerOption(
                saved=float(rng.integers(0, 9)),
                working=float(rng.choice([0, 2, 5])),
                seconds=float(rng.choice([0, 0.5, 1, 3])),
            )
            for _ in range(rng.integers(1, 5))
        ]
        for _ in range(2)
    ]
    layers = [kinds[rng.integers(0, 2)] for _ in range(rng.integers(1, 6))]
    return layers, float(rng.integers(0, 40)), int(rng.integers(1, 4))


def every_choice(layers, in_flight):
    """(seconds, bytes, options)."""
    for chosen in itertools.product(*(range(len(options)) for options in layers)):
        own = [options[at] for options, at in zip(layers, chosen, strict=True)]
        size = in_flight * sum(one.saved for one in own) + max(one.working for one in own)
        yield sum(one.seconds for one in own), size, chosen


@pytest.mark.parametrize("first", quick_and_exhaustive(range(0, 500, 100), (0,)))
def test_choices_in_a_chain_are_the_best(first):
    """100 chains: fewest seconds of those that fit, and none exactly where none does."""
    for seed in range(first, first + 100):
        layers, budget, in_flight = drawn_chain(seed)
        every = list(every_choice(layers, in_flight))
        fitting = [seconds for seconds, size, _ in every if size <= budget]
        found = choose_in_chain(layers, budget, in_flight)
        assert (found is None) == (not fitting), seed
        if found:
            assert found.seconds == pytest.approx(min(fitting)) and found.bytes <= budget
            (same,) = (one for one in every if one[2] == found.options)
            assert same[:2] == (pytest.approx(found.seconds), pytest.approx(found.bytes))


def test_a_hundred_equal_layers():
    """Counts are all that matters: the cheap option wherever it fits."""
    keep, again = LayerOption(saved=3.0, working=0.0, seconds=0.0), LayerOption(saved=1.0, working=2.0, seconds=1.0)
    found = choose_in_chain([[keep, again]] * 100, 202.0)
    assert found is not None and found.seconds == 50 and found.bytes == 202
    assert choose_in_chain([[keep, again]] * 100, 101.0) is None


def test_no_layers():
    found = choose_in_chain([], 0.0)
    assert found is not None and found.options == () and found.bytes == 0
