"""What cannot be right about a measurement, and how far measurements vary."""

import pytest

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.plausible import cluster_faults, cluster_spreads, noisy, spread_text, timing_faults
from jhpt.core.profile import Timing

GOOD = {"forward": (0.01, 0.08), "backward": (0.02, 0.16)}

FAULTS = {
    "nothing": (GOOD, None),
    "a block of no time": ({"forward": (0.0, 0.08)}, "a block takes 0 ms forward and 20 ms backward at batch 1"),
    "less than a launch": ({"backward": (1e-7, 0.16)}, "0.0001 ms backward at batch 1"),
    "hardly a backward pass": ({"backward": (0.02, 0.01)}, "the backward pass of a block takes 10 ms"),
    "no growth": ({"forward": (0.01, 0.01), "backward": (0.02, 0.02)}, "30 ms at batch 1 and 30 ms at batch 8"),
    "launches alone": ({"forward": (1e-4, 1e-4), "backward": (2e-4, 2e-4)}, None),
    "less than half": ({"forward": (1e-3, 1e-4), "backward": (2e-3, 2e-4)}, "3 ms at batch 1 and 0.3 ms at batch 8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_block_cannot_take(name):
    changes, words = FAULTS[name]
    timing = Timing(batches=(1.0, 8.0), **GOOD | changes)
    faults = timing_faults({"block": (timing,), "head": (timing,)}, 1e-9)
    assert [words in fault for fault in faults] == ([True] if words else [])


def test_seconds_need_not_grow_as_long_as_the_batch_hardly_does():
    timing = Timing(batches=(2.0, 8.0), forward=(0.1, 0.1), backward=(0.2, 0.1))
    assert timing_faults({"block": (timing,)}, 1e-9) == []
    assert timing_faults({}, 0.0) == ["the update takes no time"]


def cluster(inside: Link | None = None, **changes) -> Cluster:
    link = Link(bandwidth=1e9, latency=1e-6, spread=0.1, repetitions=7)
    device = Device(name="any", peak_flops={"float32": 1e12}, memory=1e9, memory_bandwidth=1e10)
    device = device.model_copy(update=changes)
    node = Node(device=device, devices=2, inside=inside or link, host=link, host_memory=1e9)
    return Cluster(name="one", nodes=(node,), network=link)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (cluster(), ()),
        (cluster(Link(bandwidth=1e20, latency=1e-6)), ("inside is 1e+20 bytes/s",)),
        (cluster(Link(bandwidth=1e9, latency=60.0)), ("inside has a latency of 60 s",)),
        (cluster(memory_bandwidth=1.0), ("memory_bandwidth is 1 bytes/s",)),
        (cluster(peak_flops={"float32": 1e30}), ("peak_flops.float32 is 1e+30 FLOP/s",)),
    ],
)
def test_what_a_machine_cannot_reach(one, words):
    assert cluster_faults(one) == list(words)


def test_spread_in_words():
    assert spread_text({}) == "" and not noisy([])
    quiet, loud = {"host": 0.02, "inside": 0.07, "block": 0.01}, {"host": 0.02, "inside": 0.7}
    assert spread_text(quiet) == "spread 2 % in the median, 7 % at worst (inside)"
    assert spread_text(loud) == "spread 36 % in the median, 70 % at worst (inside): noisy"
    assert cluster_spreads(cluster()) == {"host": 0.1, "inside": 0.1, "network": 0.1}
