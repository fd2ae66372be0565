"""The two streams: what is played by hand, what the additive cost says of it, and the best numbers of chunks."""

import itertools
import random

import numpy as np
import pytest

from benchmarks.comms.two_streams import layers_seconds, makespan
from jhpt.planner.cost.collectives import Operation, chunk_sizes, filling, partition, period


def operation(work, travel, least=0.0, latency=0.0):
    """Seconds of a sample; a chunk takes `least` at least, a sum `latency` more."""
    return Operation(
        work=lambda n: max(least, work * n),
        travel=lambda n: latency + travel * n,
    )


def drawn(r):
    """An operation with all that makes more chunks worse."""
    least, latency = r.choice([0.0, r.uniform(0, 2)]), r.choice([0.0, r.uniform(0, 1)])
    return operation(r.uniform(0, 1), r.choice([0.0, r.uniform(0.01, 2)]), least, latency)


@pytest.mark.parametrize("samples", range(1, 12))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
def test_chunks_are_those_of_array_split(samples, chunks):
    sizes = [len(part) for part in np.array_split(np.arange(samples), chunks)]
    assert list(chunk_sizes(samples, chunks)) == [size for size in sizes if size]


@pytest.mark.parametrize(
    ("each", "chunks", "seconds"),
    [
        ((4.0, 2.0), 1, 6 + 6),  # nothing overlaps
        ((4.0, 2.0), 2, 4 + 4 + 1),  # work 2, sums 1: busy until the last sum
        ((2.0, 4.0), 2, 1 + 4 + 4),  # work 1, sums 2: sums follow each other from 1 on
        ((4.0, 4.0), 4, 1 + 4 + 4),
    ],
)
def test_two_operations_by_hand(each, chunks, seconds):
    """4 samples; work and sum of all of them in seconds."""
    one = operation(each[0] / 4, each[1] / 4)
    assert makespan([one, one], [chunks, chunks], 4) == pytest.approx(seconds)


def test_uneven_chunks_by_hand():
    """3 samples in 2 and 1: work 2 | 1, sums 4 | 2.  Sums: 2-6-8; again work 6-8, 8-9, sums 8-12-14."""
    one = operation(1.0, 2.0)
    assert makespan([one, one], [2, 2], 3) == pytest.approx(14)


def test_a_new_chunk_waits_for_the_old_ones_that_hold_its_samples():
    """Four chunks of 1 (work 1, sums 1) before two of 2: sums end at 2, 3, 4, 5; work at 4-6 (samples 0 and 1 came at
    3, but work until 4), and 6-8.  The other way round: sums of 2 end at 4 and 6, work at 4, 5, 6, 7, then 8."""
    one = operation(1.0, 1.0)
    assert makespan([one, operation(1.0, 0.0)], [4, 2], 4) == pytest.approx(8)
    assert makespan([one, operation(1.0, 0.0)], [2, 4], 4) == pytest.approx(8)
    late = operation(0.0, 1.0)  # sums of the first two of four end at 2, of all at 4
    assert makespan([late, operation(1.0, 0.0)], [4, 2], 4) == pytest.approx(6)
    assert makespan([late, operation(1.0, 0.0)], [4, 1], 4) == pytest.approx(8)


def test_one_stream_adds_up():
    one = operation(1.0, 2.0, latency=0.5)
    assert makespan([one] * 2, [2, 2], 4, overlap=False) == pytest.approx(2 * (4 + 8 + 2 * 0.5))


@pytest.mark.parametrize("seed", range(100))
def test_layers_that_are_alike_take_their_period_and_one_filling(seed):
    r = random.Random(seed)
    one, samples, chunks, layers = drawn(r), r.randint(1, 9), r.randint(1, 5), r.randint(1, 8)
    additive = layers * period(one, samples, chunks) + filling(one, samples, chunks)
    assert makespan([one] * layers, [chunks] * layers, samples) == pytest.approx(additive, rel=1e-12)


def additive(operations, chunks, samples):
    """What `partition` minimises, written down."""
    seconds, before = 0.0, None
    for one, count in zip(operations, chunks, strict=True):
        seconds += period(one, samples, count) + (filling(one, samples, count) if count != before else 0.0)
        before = count
    return seconds


@pytest.mark.parametrize("seed", range(100))
def test_the_additive_cost_of_any_layers_is_within_a_factor_of_two(seed):
    """Work alone and sums alone are each no more than either, and both are no more than the two together."""
    r = random.Random(seed)
    samples, layers = r.randint(4, 9), r.randint(1, 8)
    operations, chunks = [drawn(r) for _ in range(layers)], [r.choice([1, 2, 4]) for _ in range(layers)]
    played, added = makespan(operations, chunks, samples), additive(operations, chunks, samples)
    assert played / 2 <= added * (1 + 1e-12) and added <= 2 * played * (1 + 1e-12)
    alike = [operations[0]] * layers
    assert makespan(alike, chunks, samples) <= additive(alike, chunks, samples) * (1 + 1e-12)


def tables(operations, candidates, samples):
    periods = np.array([[period(one, samples, c) for c in candidates] for one in operations])
    firsts = np.array([[filling(one, samples, c) for c in candidates] for one in operations])
    return periods, firsts


@pytest.mark.parametrize("block", range(5))
def test_partition_is_the_best_of_all_assignments(block):
    """500 random rows of up to 6 layers and up to 4 numbers of chunks, some not allowed, against all of them."""
    for seed in range(100 * block, 100 * block + 100):
        r = random.Random(seed)
        layers, candidates = r.randint(1, 6), sorted(r.sample([1, 2, 3, 4, 6], r.randint(1, 4)))
        samples = r.randint(max(candidates), 12)
        kinds = [(drawn(r), drawn(r)) for _ in range(r.randint(1, 3))]
        row = [r.choice(kinds) for _ in range(layers)]
        ahead, first = tables([forward for forward, _ in row], candidates, samples)
        back, last = tables([backward for _, backward in row], candidates, samples)
        periods = ahead + back
        for layer in range(layers):
            periods[layer, [c for c in range(1, len(candidates)) if r.random() < 0.2]] = np.inf
        found, chosen = partition(periods, first, last)

        def cost(path, periods=periods, first=first, last=last):
            seconds = sum(periods[layer, c] for layer, c in enumerate(path))
            for row, joins in ((list(enumerate(path)), first), (list(enumerate(path))[::-1], last)):
                before = [None, *(c for _, c in row[:-1])]
                seconds += sum(joins[at] for at, c in zip(row, before, strict=True) if at[1] != c)
            return seconds

        least = min(map(cost, itertools.product(range(len(candidates)), repeat=layers)))
        assert found == pytest.approx(least, rel=1e-12)
        counts = [candidates[c] for c in chosen]
        played = additive([one for one, _ in row], counts, samples)
        played += additive([one for _, one in row][::-1], counts[::-1], samples)
        assert played == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_partition_of_like_layers_is_near_the_best_that_can_be_played(seed):
    """Never better than the best simulated one, and worse by one layer's filling at most, for chunks cost nothing."""
    r = random.Random(seed)
    one, samples, layers = operation(r.uniform(0.1, 1), r.uniform(0.1, 1)), 4, 4
    candidates = [1, 2, 4]
    periods, first = tables([one] * layers, candidates, samples)
    found, _ = partition(periods, first, np.zeros_like(first))
    played = min(makespan([one] * layers, c, samples) for c in itertools.product(candidates, repeat=layers))
    assert played <= found * (1 + 1e-12)
    assert found <= played + filling(one, samples, 4) * (1 + 1e-12)


def test_latency_and_small_pieces_decide_against_chunks():
    """Work and sums of 4 s: 8 s with one chunk, 4 with more, of four least at the ends.  Then a sum costs 1 or 5 s
    more, or no chunk is computed in less than 4.5 s."""

    def best(**losses):
        costs = tables([operation(1.0, 1.0, **losses)] * 8, [1, 2, 4], 4)
        return {[1, 2, 4][index] for index in partition(*costs, np.zeros((8, 3)))[1]}

    assert best() == {4}
    assert best(latency=1.0) == {2}
    assert best(latency=5.0) == {1}
    assert best(least=4.5) == {1}


def test_layers_seconds_by_hand():
    """2 layers of 2 sums, 2 chunks of 1 s forward and 2 s backward a layer, sums of 0.5 s.

    Forward 8 pieces of 0.5 s and the last sum; backward 8 of 1 s and the last sum; in line all 16 sums."""
    times = {"layers": 2, "forward": 1.0, "backward": 2.0, "travel": 0.5, "chunks": 2}
    assert layers_seconds(**times) == pytest.approx(4 + 0.5 + 8 + 0.5)
    assert layers_seconds(**times, overlap=False) == pytest.approx(4 + 8 + 16 * 0.5)
    one = times | {"chunks": 1}
    assert (
        layers_seconds(**one) == pytest.approx(layers_seconds(**one, overlap=False)) == pytest.approx(2 + 4 + 8 * 0.5)
    )


@pytest.mark.parametrize("seed", range(100))
def test_two_streams_are_never_slower_than_one_and_faster_by_two_at_most(seed):
    r = random.Random(seed)
    samples, layers = r.randint(1, 9), r.randint(1, 6)
    operations, chunks = [drawn(r) for _ in range(layers)], [r.randint(1, 4) for _ in range(layers)]
    two, one = (makespan(operations, chunks, samples, overlap=overlap) for overlap in (True, False))
    assert two <= one * (1 + 1e-12) <= 2 * two * (1 + 1e-9)
