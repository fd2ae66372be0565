"""The streamed step against events played one by one."""

import itertools

import numpy as np
import pytest

from jhpt.bench.memory.instances import drawn
from jhpt.core.cluster import Link
from jhpt.planner.cost.streaming import Bucket, Home, group_copies, periodic, stream

CHANGED = {Home.RESIDENT: [], Home.OPTIMIZER: ["state"], Home.BOTH: ["weights", "state"], Home.PARAMETERS: ["weights"]}
AGAIN = {home: ["weights"] if home in (Home.BOTH, Home.PARAMETERS) else [] for home in Home}
ROWS = {home: CHANGED[home] + AGAIN[home] for home in Home}


def cut(layers, comes):
    """A pass's layers in order -> its groups: of layers that stay before all others, then of each that comes."""
    groups = [[]]
    for layer in layers:
        if comes(layer):
            groups.append([])
        groups[-1].append(layer)
    return groups


def play(tasks):
    """name -> when it ends; tasks: name -> (seconds, what has to end before)."""
    ended = {}
    while len(ended) < len(tasks):
        for name, (seconds, needs) in tasks.items():
            if name not in ended and all(need in ended for need in needs):
                ended[name] = max((ended[need] for need in needs), default=0.0) + seconds
    return ended


def played(buckets, link, homes):
    """(seconds, peak)."""

    def size(layer, parts):
        return sum(getattr(buckets[layer], part) for part in parts[homes[layer]])

    def copying(moved):
        return link.latency + moved / link.rate(moved) if moved else 0.0

    tasks, spans, groups_of = {"start": (0.0, [])}, [], []
    # Forward: group 0 is of those that stay, and may be empty.
    groups = cut(range(len(buckets)), lambda layer: homes[layer] != Home.RESIDENT)
    heads = [None, *(group[0] for group in groups[1:]), None]
    barrier = ["start"]
    for at, group in enumerate(groups):
        own, coming = heads[at], heads[at + 1]
        fetch, first, second, write = (("forward", what, at) for what in ("fetch", "first", "second", "write"))
        gradient = ("forward", "gradient", at)
        early = buckets[own].forward if own is not None else 0.0
        late = sum(buckets[layer].forward for layer in group) - early
        if not early or len(group) == 1:
            early, late = (early + late) / 2, (early + late) / 2
        tasks[write] = (copying(size(own, CHANGED)) if own is not None else 0.0, barrier)
        tasks[gradient] = (copying(size(coming, AGAIN)) if coming is not None else 0.0, barrier)
        tasks[first], tasks[second] = (early, barrier), (late, [write, first, gradient])
        tasks[fetch] = (copying(size(coming, CHANGED)) if coming is not None else 0.0, [write, first, gradient])
        barrier = [fetch, second]
        if own is not None:
            spans.append((at - 1, at, size(own, ROWS)))
        groups_of += [at] * len(group)
    # Backward: a group ends with the layer that comes and goes; the last one is of those that stay before all others.
    first = len(groups)
    groups = [group[::-1] for group in cut(range(len(buckets)), lambda layer: AGAIN[homes[layer]])][::-1]
    heads = [*(group[-1] for group in groups[:-1]), None]
    if heads[0] is not None:
        tasks["fill"] = (copying(size(heads[0], AGAIN)), barrier)
        barrier = ["fill"]
    for at, group in enumerate(groups):
        before, coming = heads[at - 1] if at else None, heads[at + 1] if at + 1 < len(heads) else None
        fetch, compute, write = (("backward", what, at) for what in ("fetch", "compute", "write"))
        tasks[fetch] = (copying(size(coming, AGAIN)) if coming is not None else 0.0, barrier)
        tasks[compute] = (sum(buckets[layer].backward for layer in group), barrier)
        tasks[write] = (copying(size(before, AGAIN)) if before is not None else 0.0, barrier)
        barrier = [fetch, compute, write]
        if heads[at] is not None:
            spans.append((first + max(at - 1, 0), first + at, size(heads[at], AGAIN)))  # weights
            spans.append((first + at, first + at + 1, size(heads[at], AGAIN)))  # gradient
        groups_of += [first + at] * len(group)
    resident = sum(2 * bucket.weights + bucket.state for bucket in buckets)
    resident -= sum(size(layer, ROWS) for layer in range(len(buckets)))
    peak = 0.0
    order = [*range(len(buckets)), *reversed(range(len(buckets)))]
    for layer, group in zip(order, groups_of, strict=True):
        total = resident + sum(bucket.saved for bucket in buckets[: layer + 1]) + buckets[layer].working
        peak = max(peak, total + sum(moved for begin, end, moved in spans if begin <= group <= end))
    return max(play(tasks).values()), peak


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_those_of_events(seed):
    buckets, link = drawn(seed, 6)
    homes = np.random.default_rng(seed + 1000).integers(0, 4, (20, len(buckets)))
    found = stream(buckets, link, homes)
    for index, own in enumerate(homes):
        seconds, peak = played(buckets, link, own)
        assert found.seconds[index] == pytest.approx(seconds)
        assert found.peak[index] == pytest.approx(peak)


@pytest.mark.parametrize("seed", range(20))
def test_moving_on_never_needs_more(seed):
    buckets, link = drawn(seed, 4)
    for homes in itertools.product(range(3), repeat=len(buckets)):
        now = stream(buckets, link, homes)
        for at, home in enumerate(homes):
            if home < Home.BOTH:
                on = stream(buckets, link, [*homes[:at], home + 1, *homes[at + 1 :]])
                assert on.peak[0] <= now.peak[0] + 1e-9 and on.host[0] > now.host[0]


def test_by_hand():
    """Two layers of 4 bytes, as much gradient and state, on a link of 1 byte a second."""
    layer = Bucket(forward=3.0, backward=6.0, weights=4.0, state=4.0)
    link = Link(bandwidth=1.0, latency=0.0)
    everything = stream([layer, layer], link, [Home.BOTH, Home.BOTH])
    # Forward: fetch 4 + 8, then beside half of the first layer a write of 8 and a fetch of 4, beside the other half a
    # fetch of 8; of the second one the write.  Backward: fetch 4, the second layer's max(6, 4), the first one's beside
    # the write of its gradient max(6, 4), a last write of 4.
    assert everything.seconds[0] == 12 + 8 + 8 + 8 + 1.5 + 4 + 6 + 6 + 4 and everything.host[0] == 24
    # Forward both layers' rows: 24.  Backward 8 of weights, 8 of gradients.
    assert everything.peak[0] == 24
    mixed = stream([layer, layer], link, [Home.OPTIMIZER, Home.RESIDENT])
    # Fetch 4, then the first layer beside the write of 4, and the second.
    assert mixed.seconds[0] == 4 + 4 + 3 + 12 and mixed.host[0] == 4 and mixed.peak[0] == 24
    resident = stream([layer, layer], link, [Home.RESIDENT, Home.RESIDENT])
    assert resident.seconds[0] == 18 and resident.peak[0] == 24 and resident.host[0] == 0


def test_at_once_by_hand():
    """The same two layers, whose steps are taken in the backward pass."""
    layer, link = Bucket(forward=3.0, backward=6.0, weights=4.0, state=4.0), Link(bandwidth=1.0, latency=0.0)
    copies = group_copies(layer, link, Home.BOTH, update_in_backward=True)
    forward, backward = periodic(layer, copies, 2, 1, update_in_backward=True)
    # Fetch 4; half of the first layer, the other half beside a fetch of 4, the second layer.
    assert forward == 4 + 1.5 + 4 + 3
    # Fetch 4; of each layer half beside a write of 8, half beside what is fetched, 8; a last write.
    assert backward == 4 + 2 * (8 + 8) + 8
    # One layer that comes and one that stays: writes beside the one that stays, fetches beside the other.
    assert periodic(layer, copies, 1, 2, update_in_backward=True) == (4 + 3 + 3, 4 + max(6, 8) + max(6, 8) + 8)
    optimizer = group_copies(layer, link, Home.OPTIMIZER, update_in_backward=True)
    assert periodic(layer, optimizer, 2, 1, update_in_backward=True) == (6, 2 * (4 + 4) + 4)


@pytest.mark.parametrize("home", [Home.OPTIMIZER, Home.BOTH, Home.PARAMETERS])
def test_equal_groups_are_steps_too(home):
    for seed in range(20):
        (bucket, *_), link = drawn(seed, 3)
        for groups, size in itertools.product((1, 2, 5), (1, 3)):
            homes = ([home] + [Home.RESIDENT] * (size - 1)) * groups
            expected = stream([bucket] * len(homes), link, homes).seconds[0]
            assert sum(periodic(bucket, group_copies(bucket, link, home), groups, size)) == pytest.approx(expected)
