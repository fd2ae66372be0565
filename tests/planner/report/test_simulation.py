"""Steps small enough to play by hand, closed forms where they are exact, and what holds of every step."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.report.simulation import Timeline, simulate

PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


def play(schedule, micro_batches, forward, backward, cut=0.0, sync=0.0, update=0.0, overlap=True) -> Timeline:
    """`simulate` with scalars spread out and one chunk written as a row."""
    forward_SV, backward_SV = (np.asarray(times, float) for times in (forward, backward))
    if forward_SV.ndim == 1:
        forward_SV, backward_SV = forward_SV[:, None], backward_SV[:, None]
    devices = len(forward_SV)
    cut, sync, update = (
        np.broadcast_to(np.asarray(times, float), (count,))
        for times, count in ((cut, forward_SV.size - 1), (sync, devices), (update, devices))
    )
    return simulate(schedule, micro_batches, forward_SV, backward_SV, cut, sync, update, overlap=overlap)


def in_flight(timeline: Timeline, device: int) -> int:
    """The most (micro-batch, chunk) pairs at a time whose forward has started and whose backward has not ended."""
    steps = (1 if span.kind == "forward" else -1 for span in timeline.rows[device] if span.stream == "compute")
    return max(itertools.accumulate(steps))


def even(schedule, devices, chunks, micro_batches, forward, backward) -> Timeline:
    """All chunks alike, nothing but compute."""
    return play(schedule, micro_batches, np.full((devices, chunks), forward), np.full((devices, chunks), backward))


def order(timeline: Timeline, device: int, stream: str = "compute") -> str:
    return " ".join(span.label for span in timeline.rows[device] if span.stream == stream)


def when(timeline: Timeline, device: int, stream: str, label: str) -> tuple[float, float]:
    """Start and end of the only such span."""
    found = [s for s in timeline.spans if (s.device, s.stream, s.label) == (device, stream, label)]
    assert len(found) == 1
    return found[0].start, found[0].end


@st.composite
def steps(draw, schedules=("gpipe", "1f1b", "eager-1f1b", "interleaved")):
    """Arguments of `simulate`.  Times are whole numbers, zero among them: many events at once."""
    schedule = draw(st.sampled_from(schedules))
    devices = draw(st.integers(2 if schedule == "interleaved" else 1, 5))
    chunks = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    micro_batches = draw(st.integers(1, 3)) * devices if chunks > 1 else draw(st.integers(1, 9))

    def times(*shape, most=9):
        count = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(0, most), min_size=count, max_size=count)), float).reshape(shape)

    cut, sync, update = times(devices * chunks - 1), times(devices, most=30), times(devices, most=30)
    return schedule, micro_batches, times(devices, chunks), times(devices, chunks), cut, sync, update


def test_one_device():
    # (2 + 3) * 3; the last backward starts at 12 and its gradients are there at 12 + 5, the update takes 1 more.
    assert play("eager-1f1b", 3, [2], [3]).seconds == 15
    for schedule, ran in {"eager-1f1b": "F0 B0 F1 B1 F2 B2", "gpipe": "F0 F1 F2 B0 B1 B2"}.items():
        timeline = play(schedule, 3, [2], [3], sync=5, update=1)
        assert timeline.seconds == 18
        assert order(timeline, 0) == ran
        assert timeline.busy(0) == 16 / 18
        assert timeline.bubble == pytest.approx(2 / 18)


def test_gpipe_of_two_devices():
    # Device 1 runs its forwards in 1..4 and 4..7, its backwards in 7..9, 9..11; device 0 its backwards in 9..13 and
    # 13..17: sum F + sum B + (max F + max B) = 4 + 6 + 7.
    timeline = play("gpipe", 2, [1, 3], [4, 2])
    assert timeline.seconds == 17
    assert when(timeline, 1, "compute", "F1") == (4, 7)
    assert when(timeline, 0, "compute", "B0") == (9, 13)
    assert timeline.busy(0) == timeline.busy(1) == 10 / 17


def test_1f1b_of_two_devices_with_slow_links():
    # F = (1, 1), B = (2, 2), c = 3, M = 2.  F0 0..1 on device 0, activations 1..4.  Errors, though there are none yet,
    # 4..7; beside them F1 on device 0 and F0 on device 1, 4..5, and activations 5..8.  B0 on device 1 when the errors
    # are over, 7..9.  Device 0 has waited until 8, so errors 9..12; F1 on device 1 9..10, activations 10..13, though
    # device 0 sends none; B0 and B1 12..14.  Errors 14..17, B1 17..19.
    timeline = play("eager-1f1b", 2, [1, 1], [2, 2], cut=3)
    assert timeline.seconds == 19
    assert when(timeline, 0, "forward link", "F1") == (5, 8)
    assert when(timeline, 1, "compute", "B0") == (7, 9)
    assert when(timeline, 1, "backward link", "B0") == (9, 12)
    assert when(timeline, 1, "compute", "F1") == (9, 10)
    assert when(timeline, 1, "backward link", "B1") == (14, 17)
    assert when(timeline, 0, "compute", "B1") == (17, 19)


def test_1f1b_of_two_devices_in_line():
    # F = (1, 1), B = (2, 2), c = 1, M = 2.  Device 0: F0 a e F1 a e a B0 e B1; device 1: a e F0 a B0 e F1 a B1 e.  F0
    # 0..1; both exchange 1..3, though there is no error yet; F1 and F0 3..4; a 4..5; B0 5..7, for which device 0 waits;
    # e 7..8, F1 8..9, a 9..10, though device 0 has nothing to send; B0 and B1 10..12; e 12..13; B1 13..15.
    timeline = play("eager-1f1b", 2, [1, 1], [2, 2], cut=1, overlap=False)
    assert timeline.seconds == 15
    assert when(timeline, 0, "forward link", "F0") == (1, 2)
    assert when(timeline, 1, "compute", "F0") == (3, 4)
    assert when(timeline, 1, "backward link", "B0") == (7, 8)
    assert when(timeline, 1, "compute", "B1") == (10, 12)
    assert [span.start for span in timeline.rows[0] if span.label == "forward"] == [9]
    assert [span.start for span in timeline.rows[1] if span.label == "backward"] == [2]
    assert order(timeline, 0) == "F0 F1 B0 B1"
    # Device 1 has its last exchange, until 13, before it updates.
    assert when(play("eager-1f1b", 2, [1, 1], [2, 2], 1, [0, 0], [0, 3], overlap=False), 1, "update", "update") == (
        13,
        16,
    )


def test_interleaved_of_two_devices_in_line():
    # An exchange takes as long as the dearest transfer between the two: 3 from device 0 to device 1 in chunk 0 or 1, 2
    # around the ring.  Device 0: F0 0..1, and, with nothing to receive yet, F1 4..5.
    cut = np.array([1.0, 2.0, 3.0])
    timeline = play("interleaved", 2, np.ones((2, 2)), np.ones((2, 2)), cut, overlap=False)
    assert when(timeline, 0, "forward link", "F0") == (1, 4)
    assert when(timeline, 0, "compute", "F1") == (4, 5)
    assert when(timeline, 1, "compute", "F0") == (4, 5)
    # Ring: device 1 sends while it receives, and both go on when the longer exchange is over.
    assert when(timeline, 1, "forward link", "F0") == (5, 7)
    assert when(timeline, 0, "compute", "F0.1") == (8, 9)


def test_interleaved_of_two_devices():
    # Virtual stages 0, 1, 2, 3 on devices 0, 1, 0, 1; all passes and transfers take 1.  Up to the first backward pass,
    # in tick 3, ticks take 2: F0 0..1 on device 0, 2..3 on device 1; F0.1 4..5 and 6..7.  From there on 2 too, because
    # every exchange runs beside a pass: B0.1 7..8.  Without forward passes, from tick 5 on, 2 again.
    timeline = play("interleaved", 2, np.ones((2, 2)), np.ones((2, 2)), cut=1)
    assert order(timeline, 0) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert order(timeline, 1) == "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"
    assert when(timeline, 0, "compute", "F0.1") == (4, 5)
    assert when(timeline, 1, "forward link", "F0") == (3, 4)  # around the ring
    assert when(timeline, 1, "compute", "B0.1") == (7, 8)
    assert when(timeline, 0, "backward link", "B1.1") == (12, 13)
    assert timeline.seconds == 16


def test_the_programs():
    one, two = even("eager-1f1b", 2, 1, 4, 1, 1), even("gpipe", 2, 1, 4, 1, 1)
    assert [order(one, d) for d in (0, 1)] == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert {order(two, d) for d in (0, 1)} == {"F0 F1 F2 F3 B0 B1 B2 B3"}
    assert order(one, 0, "backward link") == order(one, 1, "forward link") == ""


@pytest.mark.parametrize("sync", [0, 2, 3, 10])
def test_gradients_and_update(sync):
    # As above without cuts: the last backwards are in 13..17 on device 0 and in 9..11 on device 1, which has its last
    # exchange when device 0 begins its last backward, in 13.
    timeline = play("gpipe", 2, [1, 3], [4, 2], sync=[sync, 2 * sync], update=[1, 0.5])
    ready, earlier = max(17, 13 + sync), max(13, 9 + 2 * sync)
    assert when(timeline, 0, "gradients", "gradients") == (13, 13 + sync)
    assert when(timeline, 1, "gradients", "gradients") == (9, 9 + 2 * sync)
    assert when(timeline, 0, "update", "update") == (ready, ready + 1)
    assert when(timeline, 1, "update", "update") == (earlier, earlier + 0.5)
    assert timeline.seconds == max(ready + 1, earlier + 0.5)


@pytest.mark.parametrize("seed", range(60))
def test_gpipe_is_two_flow_shops(seed):
    """Equal jobs through stages and links in a row take sum + (M-1) max: once up, and once down.  A stage waits for the
    slower of its two exchanges before its next pass.  Links are fast enough for the tick in between."""
    rng = np.random.default_rng(seed)
    devices, micro_batches = int(rng.integers(1, 8)), int(rng.integers(1, 14))
    forward, backward = rng.uniform(0.2, 5, (2, devices))
    cut = rng.uniform(0, 0.2, devices - 1)
    exchange = np.maximum([0, *cut], [*cut, 0])
    slowest = max(forward + exchange) + max(backward + exchange)
    expected = forward.sum() + backward.sum() + 2 * cut.sum() + (micro_batches - 1) * slowest
    assert play("gpipe", micro_batches, forward, backward, cut).seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("forward", "backward", "cut"), [(1, 2, 0.5), (1, 2, 1.5), (1, 2, 5), (3, 1, 2), (2, 2, 3)])
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_equal_stages_with_links(devices, forward, backward, cut):
    """With D ticks before the first backward pass and n = M v passes: D ticks of a forward pass and an exchange, as
    many of a backward pass, and S - 1 + n - D of both, whose exchanges run beside the other pass."""
    both = max(forward + backward, cut + max(forward, backward))
    for schedule, chunks, micro_batches in [
        *((name, 1, m) for name in ("eager-1f1b", "gpipe") for m in (1, 2, 9)),
        *(("interleaved", v, k * devices) for v in (2, 3) for k in (1, 3)),
    ]:
        ahead = devices - 1 + (micro_batches - 1 if schedule == "gpipe" else devices * (chunks - 1))
        expected = ahead * (forward + 2 * cut + backward) + (devices - 1 + micro_batches * chunks - ahead) * both
        ones = np.ones((devices, chunks))
        timeline = play(schedule, micro_batches, forward * ones, backward * ones, cut)
        assert timeline.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("forward", "backward", "cut"), [(1, 2, 0.5), (3, 1, 1), (2, 2, 1.5)])
@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [2, 9])
def test_equal_stages_that_exchange_in_turn(devices, micro_batches, forward, backward, cut):
    """M + S - 1 rounds of both passes, and between any two passes an exchange, which is not longer than a pass; of two
    stages alone one a round."""
    ones, rounds = np.ones(devices), micro_batches + devices - 1
    exchanges = rounds if devices == 2 else 2 * rounds - 3
    expected = rounds * (forward + backward) + exchanges * cut
    assert play("1f1b", micro_batches, forward * ones, backward * ones, cut).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1), (1, 7), (7, 1)])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_equal_stages(devices, forward, backward):
    """(M v + S - 1)(f + b), whatever the ratio: the bubble is (S-1) / (M v + S - 1)."""
    for schedule, chunks, micro_batches in [
        *((name, 1, m) for name in ("1f1b", "eager-1f1b") for m in (1, 2, 4, 9, 16)),
        *(("gpipe", 1, m) for m in (1, 2, 4, 9, 16)),
        *(("interleaved", v, k * devices) for v in (1, 2, 3) for k in (1, 2, 3) if devices > 1 or v == 1),
    ]:
        timeline = even(schedule, devices, chunks, micro_batches, forward, backward)
        rounds = micro_batches * chunks + devices - 1
        assert timeline.seconds == rounds * (forward + backward)
        assert timeline.bubble == pytest.approx((devices - 1) / rounds)


@PROPERTY
@given(steps())
def test_every_operation_once(step):
    timeline = simulate(*step)
    devices, chunks = step[2].shape
    pairs = set(itertools.product(range(step[1]), range(chunks)))
    done = defaultdict(list)
    for span in timeline.spans:
        if span.micro_batch is not None or "link" not in span.stream:  # an exchange may carry nothing
            done[span.device, span.stream, span.kind].append((span.micro_batch, span.chunk))
    for device in range(devices):
        # The last virtual stage sends nothing forward, the first nothing backward.
        up = {pair for pair in pairs if pair[1] * devices + device < devices * chunks - 1}
        down = {pair for pair in pairs if pair[1] * devices + device > 0}
        expected = {
            ("compute", "forward"): pairs,
            ("compute", "backward"): pairs,
            ("forward link", "forward"): up,
            ("backward link", "backward"): down,
            ("gradients", "gradients"): {(None, None)},
            ("update", "update"): {(None, None)},
        }
        for key, wanted in expected.items():
            assert sorted(done.pop((device, *key), [])) == sorted(wanted)
    assert not done


@PROPERTY
@given(steps())
def test_inputs_come_before_and_nothing_overlaps(step):
    timeline = simulate(*step)
    devices, chunks = step[2].shape
    last = devices * chunks - 1
    span_of = {(s.stream, s.kind, s.device, s.chunk, s.micro_batch): s for s in timeline.spans}

    def find(stream, kind, stage, micro_batch):
        return span_of[stream, kind, stage % devices, stage // devices, micro_batch]

    for stage, m in itertools.product(range(last + 1), range(step[1])):
        forward, backward = (find("compute", kind, stage, m) for kind in ("forward", "backward"))
        assert forward.end <= backward.start
        assert forward.end == forward.start + step[2][stage % devices, stage // devices]
        assert backward.end == backward.start + step[3][stage % devices, stage // devices]
        if stage:
            up, down = find("forward link", "forward", stage - 1, m), find("backward link", "backward", stage, m)
            assert find("compute", "forward", stage - 1, m).end <= up.start
            assert up.end <= forward.start
            assert backward.end <= down.start
            assert down.end <= find("compute", "backward", stage - 1, m).start
            assert up.end - up.start == down.end - down.start == max(step[4][(stage - 1) % devices :: devices])
    for device, stream in itertools.product(range(devices), ("compute", "forward link", "backward link")):
        row = [span for span in timeline.rows[device] if span.stream == stream]
        assert all(one.end <= two.start for one, two in itertools.pairwise(row))


@PROPERTY
@given(steps())
def test_nothing_waits_without_a_reason(step):
    """Every start is 0 or the end of something: no stream is idle while its next work is ready."""
    timeline = simulate(*step)
    embedding_and_head = {0.0} | {span.end for span in timeline.spans}
    starts = {span.start for span in timeline.spans}
    assert starts <= embedding_and_head


@PROPERTY
@given(steps(schedules=("gpipe", "1f1b", "eager-1f1b")))
def test_in_flight(step):
    schedule, micro_batches, forward, *_ = step
    timeline = simulate(*step)
    for device in range(len(forward)):
        left = len(forward) - device
        ring = {"gpipe": micro_batches, "1f1b": left, "eager-1f1b": 2 * left - 1}[schedule]
        assert in_flight(timeline, device) == min(micro_batches, ring)


def test_in_flight_interleaved():
    # S = 2, v = 2, M = 4: forward n of device d is in tick d + n, backward 0 in tick S-1 + S(v-1) + S-1-d = 4 - d, so
    # 4 - 2d + 1 forwards come before it, and then one of each in turn.
    timeline = even("interleaved", 2, 2, 4, 1, 1)
    assert [in_flight(timeline, device) for device in (0, 1)] == [5, 3]


@PROPERTY
@given(steps(), st.booleans())
def test_the_closed_loop_takes_as_long(step, overlap):
    seconds = float(step_seconds(*step, overlap=overlap))
    assert simulate(*step, overlap=overlap).seconds == pytest.approx(seconds, rel=1e-9)


@PROPERTY
@given(steps())
def test_in_line_everything_happens_once_and_in_order(step):
    """Results are sent before they are used, by both of two neighbours at a time and by none that computes."""
    timeline = simulate(*step, overlap=False)
    devices, chunks = step[2].shape
    last = devices * chunks - 1
    span_of = {(s.stream, s.kind, s.device, s.chunk, s.micro_batch): s for s in timeline.spans}
    assert len([s for s in timeline.spans if s.stream == "compute"]) == 2 * step[1] * devices * chunks
    for stage, m in itertools.product(range(1, last + 1), range(step[1])):
        here, before = ((s % devices, s // devices, m) for s in (stage, stage - 1))
        up = span_of["forward link", "forward", *before]
        assert span_of["compute", "forward", *before].end <= up.start
        assert up.end <= span_of["compute", "forward", *here].start
        down = span_of["backward link", "backward", *here]
        assert span_of["compute", "backward", *here].end <= down.start
        assert down.end <= span_of["compute", "backward", *before].start
    for span in timeline.spans:
        if "link" in span.stream:
            edge = span.device if span.stream == "forward link" else (span.device - 1) % devices
            assert span.end - span.start == max(step[4][edge::devices])
            for device in (edge, (edge + 1) % devices):
                busy = [s for s in timeline.rows[device] if s.stream == "compute"]
                assert all(s.end <= span.start or s.start >= span.end for s in busy)


@PROPERTY
@given(steps())
def test_overlap_is_never_slower(step):
    assert simulate(*step).seconds <= simulate(*step, overlap=False).seconds * (1 + 1e-9)


@PROPERTY
@given(steps(), st.sampled_from([0.125, 4.0]), st.floats(0.1, 10))
def test_scale(step, exact, factor):
    schedule, micro_batches, *times = step
    seconds = simulate(*step).seconds
    # Powers of two do not round.
    assert simulate(schedule, micro_batches, *(exact * array for array in times)).seconds == exact * seconds
    scaled = simulate(schedule, micro_batches, *(factor * array for array in times)).seconds
    assert scaled == pytest.approx(factor * seconds, rel=1e-9)


@PROPERTY
@given(steps())
def test_the_same_again(step):
    assert simulate(*step) == simulate(step[0], step[1], *(array.tolist() for array in step[2:4]), *step[4:])


@PROPERTY
@given(steps(schedules=("gpipe",)))
def test_1f1b_is_never_slower_than_gpipe(step):
    """Its ticks run side by side what GPipe's run one after the other: passes with exchanges, and one pass with the
    other on the neighbour."""
    assert simulate("eager-1f1b", *step[1:]).seconds <= simulate(*step).seconds


def test_1f1b_may_be_slower_than_gpipe_in_line():
    # F = (2, 1, 2), B = (1, 1, 1), two micro-batches.  GPipe: F0 0..2, then F1 2..4 beside F0 of device 1; F0 on device
    # 2 3..5, F1 5..7; three backwards in a row from 8 on, and the last one.  1F1B has errors exchanged before the
    # forwards: device 2 waits for device 1, which waits for F1 on device 0, and begins F0 in 4 instead of 3.
    stages = [2, 1, 2], [1, 1, 1]
    gpipe, other = (play(name, 2, *stages, overlap=False) for name in ("gpipe", "eager-1f1b"))
    assert (gpipe.seconds, other.seconds) == (11, 12)
    assert when(gpipe, 2, "compute", "F0") == (3, 5)
    assert when(other, 2, "compute", "F0") == (4, 6)


def test_nothing_takes_time():
    timeline = play("eager-1f1b", 3, [0, 0], [0, 0])
    assert (timeline.seconds, timeline.busy(0), timeline.bubble) == (0, 1, 0)
    assert [in_flight(timeline, device) for device in (0, 1)] == [3, 1]


GOOD = {
    "schedule": "eager-1f1b",
    "micro_batches": 4,
    "forward": [[1.0], [1.0]],
    "backward": [[1.0], [1.0]],
    "cut": [0.0],
    "sync": [0.0, 0.0],
    "update": [0.0, 0.0],
}
TWO_CHUNKS = {"forward": np.ones((2, 2)), "backward": np.ones((2, 2)), "cut": np.ones(3)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "1f1"}, "no schedule '1f1'.*did you mean 1f1b"),
        ({"micro_batches": 0}, "micro_batches=0"),
        (TWO_CHUNKS, "schedule=eager-1f1b with 2 chunks per stage: interleaved"),
        (TWO_CHUNKS | {"schedule": "interleaved", "micro_batches": 5}, "use 4 or 6"),
        (TWO_CHUNKS | {"schedule": "interleaved", "micro_batches": 1}, "use 2, or one chunk"),
        (
            {"schedule": "interleaved", "forward": [[1, 1]], "backward": [[1, 1]], "sync": [0], "update": [0]},
            "needs several stages",
        ),
    ],
)
def test_input_errors(wrong, message):
    with pytest.raises(InputError, match=message):
        simulate(**(GOOD | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"forward": [1.0, 1.0]}, "forward has shape"),
        ({"forward": np.ones((0, 1))}, "needs a device"),
        ({"backward": [[1.0]]}, "backward has shape"),
        ({"cut": []}, "cut has shape"),
        ({"sync": 0.0}, "sync has shape"),
        ({"update": [0.0]}, "update has shape"),
        ({"cut": [-1.0]}, "cut holds -1"),
        ({"backward": [[1.0], [float("nan")]]}, "backward holds nan"),
        ({"sync": [float("inf"), 0]}, "sync holds inf"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=message):
        simulate(**(GOOD | wrong))
