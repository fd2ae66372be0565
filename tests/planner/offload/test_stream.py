"""The streamed step against events played one by one."""

import itertools

import numpy as np
import pytest

from jhpt.core.cluster import Link
from jhpt.planner.offload.stream import Bucket, Home, stream
from tests.planner.offload.instances import drawn


def played(buckets, link, homes, ahead):
    """(seconds, peak): three workers, each with a queue; an item begins when its worker is free and its conditions are
    over.  Bytes are counted when an item begins and ends."""
    layers = [(at, "forward") for at in range(len(buckets))] + [
        (at, "backward") for at in reversed(range(len(buckets)))
    ]
    queues = {"fetch": [], "compute": [], "write": []}
    needs = {}

    def queue(worker, operation, seconds, conditions):
        queues[worker].append((operation, seconds))
        needs[worker, operation] = conditions

    def copying(size):
        return link.latency + size / link.rate(size)

    spans = []  # first and last operation, bytes
    for operation, (at, way) in enumerate(layers):
        bucket, home = buckets[at], homes[at]
        weights = bucket.weights if home == Home.BOTH else 0.0
        first = at - ahead if way == "backward" and operation - ahead <= at else None  # it has never left
        state = bucket.state if home != Home.RESIDENT and way == "backward" else 0.0
        size, back = (0.0 if first is not None else weights) + state, weights + state
        conditions = [("compute", operation - 1), ("write", operation - 2)]
        if way == "backward" and back:
            spans.append((operation + 1, operation + 1, back))
            if first is not None:
                spans.append((at + 1, operation, weights))
        if size:
            spans.append((operation - ahead, operation, size))
            queue("fetch", operation, copying(size), [("compute", operation - 1 - ahead)])
            conditions.append(("fetch", operation))
        queue("compute", operation, bucket.forward if way == "forward" else bucket.backward, conditions)
        if back and way == "backward":
            queue("write", operation, copying(back), [("compute", operation)])
    ended, free = {}, dict.fromkeys(queues, 0.0)
    known = {(worker, operation) for worker, items in queues.items() for operation, _ in items}
    while any(queues.values()):
        for worker, items in queues.items():
            if not items:
                continue
            operation, seconds = items[0]
            waits = [one for one in needs[worker, operation] if one in known]
            if all(one in ended for one in waits):
                free[worker] = max([free[worker], *(ended[one] for one in waits)]) + seconds
                ended[worker, operation] = free[worker]
                items.pop(0)
    resident = sum(
        (bucket.weights if home != Home.BOTH else 0) + (bucket.state if home == Home.RESIDENT else 0)
        for bucket, home in zip(buckets, homes, strict=True)
    )
    peak = 0.0
    for now, (at, _) in enumerate(layers):
        total = resident + sum(bucket.kept for bucket in buckets[: at + 1]) + buckets[at].working
        total += sum(size for first, last, size in spans if first <= now <= last)
        peak = max(peak, total)
    return max(ended.values()), peak


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_those_of_events(seed):
    buckets, link = drawn(seed, 6)
    rng = np.random.default_rng(seed + 1000)
    homes = rng.integers(0, 3, (5, len(buckets)))
    for ahead in range(4):
        found = stream(buckets, link, homes, ahead)
        for index, own in enumerate(homes):
            seconds, peak = played(buckets, link, own, ahead)
            assert found.seconds[index] == pytest.approx(seconds)
            assert found.peak[index] == pytest.approx(peak)


@pytest.mark.parametrize("seed", range(20))
def test_moving_on_never_needs_more(seed):
    buckets, link = drawn(seed, 4)
    for ahead, homes in itertools.product((0, 1, 3), itertools.product(range(3), repeat=len(buckets))):
        now = stream(buckets, link, homes, ahead)
        for at, home in enumerate(homes):
            if home < Home.BOTH:
                on = stream(buckets, link, [*homes[:at], home + 1, *homes[at + 1 :]], ahead)
                assert on.peak[0] <= now.peak[0] + 1e-9 and on.host[0] > now.host[0]


def test_by_hand():
    """Two layers of 4 bytes and as much state on a link of 1 byte a second, one operation ahead."""
    layer = Bucket(forward=3.0, backward=6.0, weights=4.0, state=4.0)
    link = Link(bandwidth=1.0, latency=0.0)
    everything = stream([layer, layer], link, [Home.BOTH, Home.BOTH], 1)
    # The second layer's weights stay: fetches 0-4, 4-8, 8-12, 12-20; forward 4-7, 8-11; backward 12-18, 20-26; writes
    # 18-26, 26-34.
    assert everything.seconds[0] == 34 and everything.host[0] == 16
    # During the last operation: 8 of its own, 8 that are written.
    assert everything.peak[0] == 16
    resident = stream([layer, layer], link, [Home.RESIDENT, Home.RESIDENT], 1)
    assert resident.seconds[0] == 18 and resident.peak[0] == 16 and resident.host[0] == 0
