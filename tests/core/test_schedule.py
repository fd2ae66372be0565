"""Timetables: complete, in order, without a wait, as large as the planner says, and legible."""

import itertools

import numpy as np
import pytest

from jhpt.core.schedule import Pass, chunk_of, delay, in_flight, stride, timetable

PLAIN = list(itertools.product(("gpipe", "eager-1f1b", "1f1b"), (1, 2, 3, 4, 6), (1,), (1, 2, 3, 4, 7, 12)))
CHUNKED = [
    ("interleaved", stages, chunks, stages * n) for stages in (2, 3, 4) for chunks in (1, 2, 3) for n in (1, 2, 4)
]
CASES = [*PLAIN, *CHUNKED]


def ticks_of(table, device):
    """(micro-batch, chunk) -> (tick, slot), of everything that the device does; twice is a mistake."""
    ticks = {}
    for tick, entry in enumerate(table[:, device]):
        micro_batch, chunk, slot = map(int, entry)
        if micro_batch >= 0:
            assert (micro_batch, chunk) not in ticks
            ticks[micro_batch, chunk] = tick, slot
    return ticks


@pytest.mark.parametrize(("schedule", "stages", "chunks", "micro_batches"), CASES)
def test_every_pass_is_run_once_and_none_waits(schedule, stages, chunks, micro_batches):
    """A pass follows what it needs: on the neighbour one tick later, on the same device in the same tick or after."""
    table = timetable(schedule, stages, chunks, micro_batches)
    everything = set(itertools.product(range(micro_batches), range(chunks)))
    forward = [ticks_of(table.forward, device) for device in range(stages)]
    backward = [ticks_of(table.backward, device) for device in range(stages)]
    for device in range(stages):
        assert forward[device].keys() == backward[device].keys() == everything
    last = stages * chunks - 1
    for micro_batch, part in itertools.product(range(micro_batches), range(stages * chunks)):
        chunk, device = divmod(part, stages)
        here, back = forward[device][micro_batch, chunk][0], backward[device][micro_batch, chunk][0]
        if part > 0:
            before, place = divmod(part - 1, stages)
            assert here == forward[place][micro_batch, before][0] + 1
        if part < last:
            after, place = divmod(part + 1, stages)
            assert back == backward[place][micro_batch, after][0] + 1
        assert back >= here if part == last else back > here


@pytest.mark.parametrize(("schedule", "stages", "chunks", "micro_batches"), CASES)
def test_a_slot_is_taken_from_forward_to_backward(schedule, stages, chunks, micro_batches):
    """On every device; together they are as many as the planner counts there."""
    table = timetable(schedule, stages, chunks, micro_batches)
    for device in range(stages):
        taken, most = {}, 0
        for tick in range(table.ticks):
            for kind, (micro_batch, chunk, slot) in (
                ("forward", map(int, table.forward[tick, device])),
                ("backward", map(int, table.backward[tick, device])),
            ):
                if micro_batch < 0:
                    continue
                assert 0 <= slot < table.slots
                if kind == "forward":
                    assert slot not in taken
                    taken[slot] = micro_batch, chunk
                else:
                    assert taken.pop(slot) == (micro_batch, chunk)
                most = max(most, len(taken))
        assert not taken
        assert most == in_flight(schedule, stages, device, chunks, micro_batches)
    assert table.slots == in_flight(schedule, stages, 0, chunks, micro_batches)


@pytest.mark.parametrize(("schedule", "stages", "chunks", "micro_batches"), CASES)
def test_ticks_are_the_planners(schedule, stages, chunks, micro_batches):
    """The planner's n-th backward of device d falls into tick delay + (S-1-d) + stride n."""
    table, first = timetable(schedule, stages, chunks, micro_batches), delay(schedule, stages, chunks, micro_batches)
    numbers = stride(schedule) * np.arange(micro_batches * chunks)
    assert table.ticks == first + stages + numbers[-1]
    for device in range(stages):
        (busy,) = np.nonzero(table.forward[:, device, 0] >= 0)
        np.testing.assert_array_equal(busy, device + numbers)
        (busy,) = np.nonzero(table.backward[:, device, 0] >= 0)
        np.testing.assert_array_equal(busy, first + stages - 1 - device + numbers)


@pytest.mark.parametrize(("stages", "micro_batches"), list(itertools.product((2, 3, 4, 6), (1, 2, 4, 7, 12))))
def test_1f1b_keeps_as_many_in_flight_as_stages_are_left_and_exchanges_in_turn(stages, micro_batches):
    """Whatever a pass needs of a neighbour comes with the exchange of these two in the tick before."""
    table = timetable("1f1b", stages, 1, micro_batches)
    assert table.in_turn and table.slots == min(stages, micro_batches)
    for tick, device in itertools.product(range(1, table.ticks), range(stages)):
        assert min(table.forward[tick, device, 0], table.backward[tick, device, 0]) == -1  # one pass a tick
        if table.forward[tick, device, 0] >= 0 and device > 0:
            assert (tick - 1 - (device - 1)) % 2 == 0
        if table.backward[tick, device, 0] >= 0 and device < stages - 1:
            assert (tick - 1 - device) % 2 == 0


def test_entries_are_passes():
    table = timetable("eager-1f1b", 2, 1, 1)
    assert Pass(*table.forward[0, 0].tolist()) == Pass(micro_batch=0, chunk=0, slot=0)
    assert table.forward[0, 1, 0] == -1


PICTURES = {
    ("gpipe", 2, 1, 3): """
device 0   0    1    2    .   (0)  (1)  (2)
device 1   .    0    1   2(0) (1)  (2)   .
""",
    ("eager-1f1b", 3, 1, 4): """
device 0   0    1    2    3   (0)  (1)  (2)  (3)
device 1   .    0    1   2(0) 3(1) (2)  (3)   .
device 2   .    .   0(0) 1(1) 2(2) 3(3)  .    .
""",
    ("1f1b", 3, 1, 4): """
device 0   0   .   1   .   2  (0)  3  (1)  .  (2)  .  (3)
device 1   .   0   .   1  (0)  2  (1)  3  (2)  .  (3)  .
device 2   .   .   0  (0)  1  (1)  2  (2)  3  (3)  .   .
""",
    ("interleaved", 2, 2, 2): """
device 0    0a     1a     0b     1b    (0b)   (1b)   (0a)   (1a)
device 1    .      0a     1a   0b(0b) 1b(1b)  (0a)   (1a)    .
""",
}
"""`3` forward, `(3)` backward; of two chunks, `3a` and `3b`."""


@pytest.mark.parametrize("case", PICTURES)
def test_a_timetable_prints_itself(case):
    lines = str(timetable(*case)).splitlines()
    assert [line.rstrip() for line in lines] == PICTURES[case].strip("\n").splitlines()


def test_chunks_have_letters_enough():
    lines = str(timetable("interleaved", 2, 28, 2))
    assert all(f"0{letters}" in lines for letters in ("a", "h", "i", "z", "aa", "ab"))


def test_the_number_in_flight_is_that_of_the_table():
    """The closed form that the planner searches with, for all small S, M and v."""
    for stages, chunks, micro_batches in itertools.product(range(1, 7), range(1, 4), range(1, 19)):
        if chunks > 1 and (stages == 1 or micro_batches % stages):
            continue
        for schedule in ("gpipe", "eager-1f1b", "1f1b") if chunks == 1 else ("interleaved",):
            table = timetable(schedule, stages, chunks, micro_batches)
            running = np.cumsum((table.forward[..., 0] >= 0).astype(int), axis=0)
            running[1:] -= np.cumsum((table.backward[..., 0] >= 0).astype(int), axis=0)[:-1]
            expected = [in_flight(schedule, stages, stage, chunks, micro_batches) for stage in range(stages)]
            assert running.max(axis=0).tolist() == expected, (schedule, stages, chunks, micro_batches)
            chunk_order = [chunk_of(n, stages, chunks) for n in range(micro_batches * chunks)]
            assert table.forward[table.forward[:, 0, 0] >= 0, 0, 1].tolist() == chunk_order
