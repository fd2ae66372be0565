"""Batches are a pure function of (seed, step), whoever reads them."""

import itertools

import numpy as np
import pytest

from jhpt.training.data.batches import evaluation_batches, shuffled, training_batches
from jhpt.training.data.windows import Windows, causal_windows

BATCH = 8
WINDOWS = 21
"""A number that the batch does not divide: epochs end inside batches."""


def windows(count=WINDOWS) -> Windows:
    """Windows that begin with their own number times 3."""
    return causal_windows(np.arange(3 * count + 1, dtype=np.uint16), 3, "training")


def numbers(rows) -> list[int]:
    """Which windows these rows are."""
    return [int(row[0]) // 3 for row in rows]


def batches(steps, *, seed=0, first=0, local=slice(0, BATCH), count=WINDOWS) -> list[np.ndarray]:
    source = training_batches(shuffled(windows(count), seed), BATCH, local, first)
    return list(itertools.islice(source, steps))


def parts(processes) -> list[slice]:
    """The rows of each process."""
    share = BATCH // processes
    return [slice(index * share, (index + 1) * share) for index in range(processes)]


@pytest.fixture(scope="module")
def uninterrupted():
    """Eight epochs."""
    return batches(WINDOWS)


def test_a_batch_has_whole_windows(uninterrupted):
    source = windows()
    for batch in uninterrupted:
        assert batch.shape == (BATCH, 4) and batch.dtype == np.int32
        for row, number in zip(batch, numbers(batch), strict=True):
            np.testing.assert_array_equal(row, source[number])


@pytest.mark.parametrize("first", [1, 3, 17])
def test_resuming_is_the_tail_of_an_uninterrupted_run(uninterrupted, first):
    np.testing.assert_array_equal(batches(WINDOWS - first, first=first), uninterrupted[first:])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_rows_of_all_processes_are_the_global_batch(uninterrupted, processes):
    shares = [batches(6, local=local) for local in parts(processes)]
    together = [np.concatenate(rows) for rows in zip(*shares, strict=True)]
    np.testing.assert_array_equal(together, uninterrupted[:6])


def test_every_window_is_seen_once_in_an_epoch(uninterrupted):
    seen = numbers(np.concatenate(uninterrupted))
    epochs = [seen[start : start + WINDOWS] for start in range(0, len(seen), WINDOWS)]
    assert len(epochs) == BATCH
    for epoch in epochs:
        assert sorted(epoch) == list(range(WINDOWS))
    assert len(set(map(tuple, epochs))) == len(epochs)  # each in an order of its own
    assert list(range(WINDOWS)) not in epochs


@pytest.mark.parametrize("seed", [1, 2**32 - 1])
def test_another_seed_is_another_order(uninterrupted, seed):
    assert numbers(np.concatenate(batches(3, seed=seed))) != numbers(np.concatenate(uninterrupted[:3]))
    np.testing.assert_array_equal(batches(3, seed=seed), batches(3, seed=seed))


def test_a_single_window_is_repeated():
    assert {number for batch in batches(3, count=1) for number in numbers(batch)} == {0}


def test_a_far_step_is_reached_without_the_way_there():
    (batch,) = batches(1, first=10**12)
    assert set(numbers(batch)) <= set(range(WINDOWS))


@pytest.mark.parametrize(
    ("limit", "total"),
    [(1, 8), (2, 16), (3, 21), (100, 21)],  # 21 windows fill two batches and five rows of a third
)
def test_evaluation_reads_the_first_windows_in_order_each_weighted_once(limit, total):
    batches = list(evaluation_batches(windows(), BATCH, slice(0, BATCH), limit))
    assert len(batches) == -(-total // BATCH)
    rows, weights = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert rows.dtype == np.int32 and weights.dtype == np.float32
    assert all(batch.shape == (BATCH, 4) for batch, _ in batches)
    assert numbers(rows[:total]) == list(range(total))
    assert weights.tolist() == [1.0] * total + [0.0] * (len(rows) - total)


def test_evaluation_is_the_same_at_every_call():
    first, second = (list(evaluation_batches(windows(), BATCH, slice(0, BATCH), 3)) for _ in range(2))
    for (rows, weights), (rows_again, weights_again) in zip(first, second, strict=True):
        np.testing.assert_array_equal(rows, rows_again)
        np.testing.assert_array_equal(weights, weights_again)


@pytest.mark.parametrize("processes", [2, 4])
def test_evaluation_is_split_over_processes(processes):
    """Every process yields as many batches as the others, or the last ones would wait forever."""
    whole = list(evaluation_batches(windows(), BATCH, slice(0, BATCH), 3))
    shares = [list(evaluation_batches(windows(), BATCH, local, 3)) for local in parts(processes)]
    for index, (rows, weights) in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[index][0] for share in shares]), rows)
        np.testing.assert_array_equal(np.concatenate([share[index][1] for share in shares]), weights)
    assert {len(share) for share in shares} == {len(whole)}


def test_evaluation_on_fewer_windows_than_rows():
    ((rows, weights),) = evaluation_batches(windows(3), BATCH, slice(0, BATCH), 5)
    assert rows.shape == (BATCH, 4)
    assert numbers(rows[:3]) == [0, 1, 2] and weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
