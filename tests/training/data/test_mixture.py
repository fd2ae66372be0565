"""Sources take turns by their weights, exactly, whoever reads which part; held-out text is mixed by size."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.training.data.batches import evaluation_batches, shuffled, training_batches
from jhpt.training.data.mixture import Mixture, turn, whole_shares
from jhpt.training.data.windows import Windows, causal_windows

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
BATCH = 8


@given(shares=SHARES, start=st.integers(0, 10**12))
@PROPERTY
def test_every_period_has_the_exact_shares(shares, start):
    period = sum(shares)
    for first in (start, start + 1):
        sources = [turn(index, shares)[0] for index in range(first, first + period)]
        assert [sources.count(source) for source in range(len(shares))] == shares


@given(shares=SHARES)
@PROPERTY
def test_each_source_is_read_in_order_without_gaps_and_evenly(shares):
    period = sum(shares)
    taken = [0] * len(shares)
    for index in range(3 * period):
        source, position = turn(index, shares)
        assert position == taken[source]
        taken[source] += 1
        for count, share in zip(taken, shares, strict=True):
            assert abs(count - Fraction((index + 1) * share, period)) < len(shares)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1.0], (1,)),
        ([2.0, 1.0], (2, 1)),
        ([0.7, 0.3], (7, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([5e-3, 1e2], (1, 20_000)),
    ],
)
def test_weights_are_the_numbers_that_were_written(weights, shares):
    assert whole_shares(weights) == shares


def source(first: int, count: int) -> Windows:
    """Windows whose tokens tell the source (by thousands) and the window."""
    return causal_windows(np.arange(first * 1000, first * 1000 + 3 * count + 1, dtype=np.uint16), 3, "training")


def mixture(shares=(3, 1)) -> Mixture:
    return Mixture(sources=(source(1, 21), source(2, 5)), shares=shares)


def batches(steps, first=0, local=slice(0, BATCH), windows=None, seed=0) -> list[np.ndarray]:
    rows = shuffled(windows or mixture(), seed)
    return list(itertools.islice(training_batches(rows, BATCH, local, first), steps))


def test_batches_have_the_shares_and_each_source_its_epochs():
    rows = np.concatenate(batches(21))[:, 0]
    for batch in rows.reshape(-1, BATCH):
        assert np.count_nonzero(batch // 1000 == 1) == 6
    for number, count in ((1, 21), (2, 5)):
        own = ((rows[rows // 1000 == number] - 1000 * number) // 3).tolist()
        epochs = [own[at : at + count] for at in range(0, len(own) - count + 1, count)]
        assert len(epochs) >= 6 and all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("first", [1, 5, 17])
def test_a_mixture_resumes_at_any_step(first):
    np.testing.assert_array_equal(batches(20 - first, first), batches(20)[first:])


def test_processes_read_their_rows_of_the_same_batch():
    halves = [batches(5, local=slice(at, at + 4)) for at in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(halves, 1), batches(5))


def test_a_far_step_of_a_mixture_is_reached_without_the_way_there():
    (batch,) = batches(1, first=10**12)
    assert np.count_nonzero(batch[:, 0] // 1000 == 1) == 6


def test_another_seed_is_another_order():
    assert not np.array_equal(batches(3), batches(3, seed=1))


def test_held_out_windows_come_once_each_and_in_proportion_to_size():
    held = Mixture(sources=(source(1, 20), source(2, 5)), shares=(20, 5))
    found = list(evaluation_batches(held, 5, slice(0, 5), 100))
    rows = np.concatenate([rows for rows, _ in found])[:, 0]
    assert len(held) == 25 and len(set(rows.tolist())) == 25
    for batch in rows.reshape(-1, 5):
        assert np.count_nonzero(batch // 1000 == 2) == 1
