"""Measurements that cannot be right, and how far the others vary.

A degenerate measurement (a block that takes no time, a link of 10^20 bytes/s) would make a plan worthless without a
word.  The faults here are physically impossible, or next to it.  Values that are only unlikely pass.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jhpt.core.cluster import Cluster, Link
from jhpt.core.profile import ModelProfile, Timing

RESOLUTION = 1e-6
"""Seconds.  No program that a processor starts takes less: a launch alone takes several microseconds."""

GROWTH = 8
"""Of work that grows this much, or more, the seconds must grow."""

LAUNCHES = 2e-3
"""Seconds.  Of a block that takes less, all may be launches of kernels, which do not grow with the batch."""

LEAST_BACKWARD = 0.25
"""A block's backward pass computes two products for each of the forward pass.  Less than this share of the forward
seconds is noise."""

RATES = {
    "peak_flops": (1e6, 1e17, "FLOP/s"),
    "memory_bandwidth": (1e5, 1e15, "bytes/s"),
    "link": (1e3, 1e14, "bytes/s"),
}
"""(least, largest) rates of any device or link, with some orders of magnitude to spare."""

MOST_LATENCY = 10.0
"""Seconds before the first byte."""

NOISY, VERY_NOISY = 0.15, 0.6
"""Spread, in the median and at worst, above which measurements are called noisy."""


def timing_faults(timings: Mapping[str, Sequence[Timing]], update: float) -> list[str]:
    """What cannot be right about the measured layers of a model.

    Args:
      timings: by kind of layer.  Only `block` is checked: embedding and head are what the blocks leave of a step, and
        where a deeper model takes more time for each block, because it does not fit the caches, that may be nothing.
      update: seconds of the optimizer per parameter.
    """
    faults = [fault for timing in timings.get("block", ()) for fault in _block_faults(timing)]
    return faults + ([] if update > 0 else ["the update takes no time"])


def _block_faults(timing: Timing) -> Iterator[str]:
    for batch, forward, backward in zip(timing.batches, timing.forward, timing.backward, strict=True):
        if min(forward, backward) < RESOLUTION:
            yield f"a block takes {_ms(forward)} forward and {_ms(backward)} backward{_at(timing, batch)}"
        elif backward < LEAST_BACKWARD * forward:
            yield (
                f"the backward pass of a block takes {_ms(backward)}, its forward pass {_ms(forward)}"
                f"{_at(timing, batch)}"
            )
    both = [forward + backward for forward, backward in zip(timing.forward, timing.backward, strict=True)]
    for (few, little), (many, much) in itertools.combinations(zip(timing.batches, both, strict=True), 2):
        if many >= GROWTH * few and (much <= little / 2 or LAUNCHES < much <= little):
            yield f"a block takes {_ms(little)} at batch {few:g} and {_ms(much)} at batch {many:g}"


def profile_faults(profile: ModelProfile) -> list[str]:
    """What cannot be right about a measured profile."""
    timings = {name: kind.timings for name, kind in profile.kinds.items()}
    return timing_faults(timings, profile.update_seconds)


def link_faults(name: str, link: Link) -> list[str]:
    """What cannot be right about a measured link."""
    rates = [link.bandwidth, *(link.measured.values if link.measured else ())]
    slow = [f"{name} has a latency of {link.latency:.3g} s"] if link.latency > MOST_LATENCY else []
    return slow + [fault for rate in (min(rates), max(rates)) for fault in rate_faults(name, "link", rate)][:1]


def rate_faults(name: str, kind: str, rate: float) -> list[str]:
    """Whether a rate is out of the range of all devices or links.  kind: a key of `RATES`."""
    least, most, unit = RATES[kind]
    return [] if least <= rate <= most else [f"{name} is {rate:.3g} {unit}"]


def cluster_faults(cluster: Cluster) -> list[str]:
    """What cannot be right about a measured cluster."""
    faults = link_faults("network", cluster.network)
    for node in cluster.nodes:
        device = node.device
        for dtype, peak in device.peak_flops.items():
            faults += rate_faults(f"peak_flops.{dtype}", "peak_flops", peak)
        faults += rate_faults("memory_bandwidth", "memory_bandwidth", device.memory_bandwidth)
        faults += link_faults("inside", node.inside) + link_faults("host", node.host)
    return list(dict.fromkeys(faults))


def profile_spreads(profile: ModelProfile) -> dict[str, float]:
    """The spread of every measurement of a profile that is known, by what was measured."""
    spreads = {
        f"{name}{_at(timing, batch)}": spread
        for name, kind in profile.kinds.items()
        for timing in kind.timings
        for batch, spread in zip(timing.batches, timing.spread or (), strict=False)
    }
    return spreads | ({} if profile.update_spread is None else {"update": profile.update_spread})


def cluster_spreads(cluster: Cluster) -> dict[str, float]:
    """The spread of every measurement of a cluster that is known, by what was measured."""
    node = cluster.nodes[0]
    spreads = {
        "device": node.device.spread,
        "host": node.host.spread,
        "inside": node.inside.spread,
        "network": cluster.network.spread,
    }
    return {name: spread for name, spread in spreads.items() if spread is not None}


def spread_text(spreads: Mapping[str, float]) -> str:
    """`spread 2 % in the median, 7 % at worst (block at batch 8)`, and `noisy` where it is large; empty if unknown."""
    if not spreads:
        return ""
    middle, worst = statistics.median(spreads.values()), max(spreads, key=lambda name: spreads[name])
    text = f"spread {100 * middle:.0f} % in the median, {100 * spreads[worst]:.0f} % at worst ({worst})"
    return f"{text}: noisy" if noisy(spreads.values()) else text


def noisy(spreads: Iterable[float]) -> bool:
    """Whether measurements vary so much that their medians say little."""
    known = list(spreads)
    return bool(known) and (statistics.median(known) > NOISY or max(known) > VERY_NOISY)


def _at(timing: Timing, batch: float) -> str:
    return f" at batch {batch:g}" + (f", tensor degree {timing.tensor}" if timing.tensor > 1 else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
