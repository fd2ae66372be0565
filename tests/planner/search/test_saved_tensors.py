"""The integer programme of a block and the dynamic programme of a chain, against every choice there is."""

import itertools

import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.planner.cost.activations import Copies, Fate, Tensor
from jhpt.planner.search.saved_tensors import LayerOption, choose, choose_in_chain
from tests.covers import quick_and_exhaustive


def drawn(seed):
    """Up to six tensors, some without a name or a reader, of whole bytes; a budget; copies, every other time."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    tensors = [
        Tensor(
            name=f"t{at}" if rng.random() < 0.85 else None,
            bytes=int(rng.integers(1, 9)),
            seconds=float(rng.choice([0, 1, 2, 5])),
            inputs=tuple(int(i) for i in np.flatnonzero(rng.random(at) < 0.5)),
            read=bool(rng.random() < 0.7),
        )
        for at in range(count)
    ]
    budget = int(rng.integers(0, sum(tensor.bytes for tensor in tensors) + 1))
    copies = Copies(rate=2.0, forward=float(rng.integers(0, 4)), backward=float(rng.integers(0, 4)))
    return tensors, budget, copies if seed % 2 else None


def cost(tensors, fates, copies):
    """(seconds, bytes): what is read is at hand, or computed from what is at hand, each once."""
    again = set()

    def want(at):
        if fates[at] == Fate.RECOMPUTED and at not in again:
            again.add(at)
            for source in tensors[at].inputs:
                want(source)

    for at, tensor in enumerate(tensors):
        if tensor.read:
            want(at)
    seconds = sum(tensors[at].seconds for at in again)
    if copies:
        travel = sum(tensor.bytes for tensor, fate in zip(tensors, fates, strict=True) if fate == Fate.OFFLOADED) / 2.0
        seconds += max(0.0, travel - copies.forward) + max(0.0, travel - copies.backward)
    return seconds, sum(tensor.bytes for tensor, fate in zip(tensors, fates, strict=True) if fate == Fate.SAVED)


def every_cost(tensors, copies):
    """Of every choice that names allow."""
    saved = (Fate.SAVED, Fate.OFFLOADED) if copies else (Fate.SAVED,)
    fates = [(Fate.RECOMPUTED, *(saved if tensor.name else ())) for tensor in tensors]
    return [cost(tensors, each, copies) for each in itertools.product(*fates)]


@pytest.mark.parametrize("first", quick_and_exhaustive(range(0, 500, 50), (0, 50, 100)))
def test_choices_are_the_best(first):
    """50 blocks: fewest seconds, and of those with as many the fewest bytes."""
    for seed in range(first, first + 50):
        tensors, budget, copies = drawn(seed)
        found = choose(tensors, budget, copies)
        seconds, size = min(one for one in every_cost(tensors, copies) if one[1] <= budget)
        assert (found.seconds, found.bytes) == (pytest.approx(seconds), size), seed
        assert cost(tensors, found.fates, copies) == (pytest.approx(found.seconds), found.bytes)


@pytest.mark.parametrize("seed", range(20))
def test_shrinking_budgets_give_all_choices_that_nothing_beats(seed):
    tensors, _, copies = drawn(seed)
    costs = set(every_cost(tensors, copies))
    best = [one for one in costs if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in costs)]
    found, budget = [], sum(tensor.bytes for tensor in tensors)
    while budget >= 0:
        choice = choose(tensors, budget, copies)
        found.append((choice.seconds, choice.bytes))
        budget = choice.bytes - 1  # sizes are whole bytes: the next smaller choice has one byte less at least
    assert found == [(pytest.approx(seconds), size) for seconds, size in sorted(best)]


def test_what_everything_is_computed_from_is_worth_most():
    """A cheap tensor that nothing else is computed from is computed again, a product that two need is kept."""
    product = Tensor(name="product", bytes=4, seconds=9.0, read=False)
    left, right = (Tensor(name=name, bytes=4, seconds=1.0, inputs=(0,)) for name in ("left", "right"))
    assert choose([product, left, right], 4).fates == (Fate.SAVED, Fate.RECOMPUTED, Fate.RECOMPUTED)
    assert choose([product, left, right], 8).fates == (Fate.RECOMPUTED, Fate.SAVED, Fate.SAVED)


def test_hidden_copies_cost_nothing():
    tensor = Tensor(name="x", bytes=4, seconds=3.0)
    found = choose([tensor], 0, Copies(rate=2.0, forward=2.0, backward=1.5))
    assert found.fates == (Fate.OFFLOADED,) and found.seconds == pytest.approx(0.5) and found.host == 4
    assert choose([tensor], 0, Copies(rate=1.0, forward=0.0, backward=0.0)).fates == (Fate.RECOMPUTED,)


def test_ends():
    assert choose([], 0).fates == ()
    with pytest.raises(InputError, match="negative"):
        choose([Tensor(name="x", bytes=4, seconds=3.0)], -1)


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
