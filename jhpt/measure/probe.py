"""The local machine as a `Cluster`: rates that small programs reach on it.

    matrix products   n x n, chained inside one program: FLOP/s, and each size's share of the best
    device memory     y = x + 1 on an array larger than every cache: read once and written once
    host              copies from host memory (pinned if the device offers it) to the device, by size
    inside            all-reduce over all local devices by size, taken for a ring: 2 (n - 1) messages of size / n

A copy or message of s bytes takes latency + s / rate(s): the smallest gives the latency, the others give rates.  Every
rate is measured alone, on an idle machine, without other programs or directions at the same time.
"""

import itertools
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.core.cluster import Cluster, Curve, Device, Link, Node
from jhpt.core.errors import InputError
from jhpt.core.host import host_memory
from jhpt.core.plausible import cluster_spreads, link_faults, rate_faults, spread_text
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.measure.repeated import until_plausible
from jhpt.measure.timer import interleaved, relative_spread, steady
from jhpt.sharding.gather import gathered

PRODUCTS = {False: (64, 128, 256, 512, 1024), True: (256, 512, 1024, 2048, 4096, 8192)}
"""Widths n of the products, on CPU and on GPU."""

CHAIN_FLOP = {False: 4e9, True: 1e13}
"""FLOP in one chain of products, on CPU and on GPU: about 20 ms, much more than a launch."""

STREAM_BYTES = {False: 1 << 27, True: 1 << 30}
"""Size of the array that is read and written, larger than the caches, on CPU and on GPU."""

SMALLEST = 1 << 10
SMALL_BYTES = 1 << 18
SIZES = tuple(1 << exponent for exponent in range(16, 27, 2))
"""Bytes of copies and messages: the smallest, for the latency, and 64 KiB ... 64 MiB, for the rates."""

MUCH_LARGER = 1 << 10
"""A message this much larger than another takes longer on any link."""

Samples = dict[float, list[float]]
"""Seconds of every repetition by bytes."""


def probe_cluster(rounds: int = 5) -> Cluster:
    """Measures the first local device, and the links of all devices; a few seconds on CPU.

    `sources` says which figures cannot be measured with one device or one node.

    Raises:
      InputError: rounds below 1.
    """
    if rounds < 1:
        raise InputError(f"rounds={rounds}: measure at least once")
    info, devices = device_info(), jax.local_devices()
    peaks, efficiency, spread = until_plausible("matrix products", partial(_products, info), rounds)
    bandwidth, spread_of_memory = until_plausible("device memory", partial(_memory_bandwidth, info), rounds)
    host_bytes = host_memory()
    device = Device(
        name=info.kind,
        peak_flops=peaks,
        memory=info.memory or host_bytes / len(devices),
        memory_bandwidth=bandwidth,
        efficiency=efficiency,
        spread=max((one for one in (spread, spread_of_memory) if one is not None), default=None),
    )
    host = _host_copies(devices[0], rounds)
    inside = ring_link([devices], rounds) if len(devices) > 1 else Link(bandwidth=bandwidth, latency=0.0)
    node = Node(device=device, devices=len(devices), inside=inside, host=host, host_memory=host_bytes)
    name = f"{platform.node() or 'local'}: {len(devices)} x {info.kind}"
    sources = _sources(info, len(devices), rounds)
    cluster = Cluster(name=name, nodes=(node,), network=inside, overlap=info.is_gpu, sources=sources)
    return cluster.model_copy(update={"sources": sources | _spread_sources(cluster)})


def _sources(info: DeviceInfo, count: int, rounds: int) -> dict[str, str]:
    when = f"measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, jax {jax.__version__}, {rounds} rounds"
    widths = PRODUCTS[info.is_gpu]
    alone = "not measured with one device: its own memory's bandwidth"
    return {
        "peak_flops": f"{when}: best of products of width {widths[0]} to {widths[-1]}",
        "efficiency": f"{when}: the same products",
        "memory": "reported by the device" if info.memory else "the host's, shared equally among the devices",
        "memory_bandwidth": f"{when}: x + 1 on {STREAM_BYTES[info.is_gpu] >> 20} MiB",
        "host": f"{when}: copies of {SMALLEST >> 10} KiB to {SIZES[-1] >> 20} MiB to the device",
        "host_memory": "reported by the operating system, or a container's limit",
        "inside": f"{when}: all-reduce over {count} devices, read as a ring" if count > 1 else alone,
        "network": "not measured with one node: as inside",
    }


def _spread_sources(cluster: Cluster) -> dict[str, str]:
    """A source that says how far the measurements vary."""
    text = spread_text(cluster_spreads(cluster))
    return {"spread": f"{text}; (q90 - q10) / median of the rounds"} if text else {}


def _products(info: DeviceInfo, rounds: int) -> tuple[tuple[dict[str, float], Curve, float | None], list[str]]:
    """((best FLOP/s by dtype, share of it by FLOP of a product in the dtype that models compute in, largest spread),
    faults)."""
    usual = "bfloat16" if info.is_gpu else "float32"
    widths = PRODUCTS[info.is_gpu]
    products = [(usual, width) for width in widths]
    products += [(dtype, widths[-1]) for dtype in ("bfloat16", "float32") if dtype != usual]
    chains = {f"{dtype} {width}": _chain(dtype, width, CHAIN_FLOP[info.is_gpu]) for dtype, width in products}
    samples = interleaved({name: call for name, (call, _) in chains.items()}, rounds)
    seconds = steady(samples)
    rates = {name: flop / seconds[name] for name, (_, flop) in chains.items()}
    peaks = {dtype: max(rates[f"{d} {w}"] for d, w in products if d == dtype) for dtype, _ in products}
    sizes = tuple(2.0 * width**3 for width in widths)
    efficiency = Curve(sizes=sizes, values=tuple(rates[f"{usual} {width}"] / peaks[usual] for width in widths))
    faults = [fault for name, rate in rates.items() for fault in rate_faults(f"{name} product", "peak_flops", rate)]
    return (peaks, efficiency, _largest_spread(samples)), faults


def _chain(dtype: str, width: int, flop: float) -> tuple[Callable[[], Any], float]:
    """(x w w ... w as one program, its FLOP)."""
    length = max(round(flop / (2.0 * width**3)), 1)
    # Random numbers, because GPUs need less power for constants and multiply them faster.  Their variance of 1 / width
    # lets powers neither grow nor vanish.
    weights = (jax.random.normal(jax.random.key(0), (width, width)) * width**-0.5).astype(dtype)
    program = jax.jit(lambda x, w: jax.lax.fori_loop(0, length, lambda _, y: y @ w, x))
    return lambda: program(weights, weights), length * 2.0 * width**3


def _largest_spread(samples: Mapping[str, Sequence[float]]) -> float | None:
    spreads = [spread for spread in map(relative_spread, samples.values()) if spread is not None]
    return max(spreads, default=None)


def _memory_bandwidth(info: DeviceInfo, rounds: int) -> tuple[tuple[float, float | None], list[str]]:
    """((bytes/s, spread), faults)."""
    size = STREAM_BYTES[info.is_gpu]
    program = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.random.normal(jax.random.key(0), (size // 4,))

    def stream() -> jax.Array:
        nonlocal x
        x = program(x)
        return x

    samples = interleaved({"stream": stream}, rounds)
    rate = 2 * size / steady(samples)["stream"]
    return (rate, _largest_spread(samples)), rate_faults("memory_bandwidth", "memory_bandwidth", rate)


def _host_copies(device: jax.Device, rounds: int) -> Link:
    pinned = "pinned_host" in {memory.kind for memory in device.addressable_memories()} and device.platform != "cpu"

    def copy(size: int) -> Callable[[], Any]:
        source: Any = np.random.default_rng(0).standard_normal(size // 4, np.float32)
        if pinned:
            source = jax.device_put(source, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
        return lambda: jax.device_put(source, jax.sharding.SingleDeviceSharding(device), may_alias=False)

    calls = {size: copy(size) for size in (SMALLEST, *SIZES)}
    return until_plausible("copies from the host", lambda rounds: _link_of(_timed(calls, rounds)), rounds)


def ring_link(
    rings: Sequence[Sequence[jax.Device]], rounds: int, sizes: Sequence[int] | None = None, *, in_a_row: int = 1
) -> Link:
    """The link of an all-reduce over the devices of each row, taken for a ring, in all rows at the same time.

    If the devices belong to several processes, all processes must call this, also those without a device in the rings.
    All get the same link.

    Args:
      sizes: bytes; None: `SIZES`.
      in_a_row: how many all-reduces of up to `SMALL_BYTES` a sample consists of, one after the other in one program.
    """
    count, sent = len(rings[0]), (SMALLEST, *(sizes or SIZES))
    owners = [device.process_index for ring in rings for device in ring]
    calls = _all_reduces(rings, sent, in_a_row) if jax.process_index() in owners else None
    messages = 2 * (count - 1)

    def measure(rounds: int) -> tuple[Link, list[str]]:
        times = {float(size): [0.0] * rounds for size in sent} if calls is None else _timed(calls, rounds)
        if len(set(owners)) > 1:  # all decide alike whether to measure again
            times = _of_process(owners[0], times)
        return _link_of(
            {size / count: [time / messages / _repeats(size, in_a_row) for time in row] for size, row in times.items()}
        )

    return until_plausible(f"all-reduce over {count} devices", measure, rounds)


def _repeats(size: float, in_a_row: int) -> int:
    """All-reduces of so many bytes in a sample."""
    return in_a_row if size <= SMALL_BYTES else 1


def _all_reduces(
    rings: Sequence[Sequence[jax.Device]], sizes: Sequence[int], in_a_row: int
) -> dict[int, Callable[[], Any]]:
    """By bytes, the all-reduces of so many bytes on each device."""
    devices = np.asarray(rings)
    mesh, spec = Mesh(devices, ("ring", "all")), PartitionSpec("ring", "all")

    def program(size: int) -> Callable[[jax.Array], jax.Array]:
        def reduced(x: jax.Array) -> jax.Array:
            again = _repeats(size, in_a_row)
            return jax.lax.fori_loop(0, again, lambda _, total: jax.lax.psum(total, "all"), x)

        return jax.jit(jax.shard_map(reduced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def reduce(size: int) -> Callable[[], Any]:
        row = np.ones((1, 1, size // 4), np.float32)
        shape = (*devices.shape, size // 4)
        x = jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda _: row)
        run = program(size)
        return lambda: run(x)

    return {size: reduce(size) for size in sizes}


def _of_process(index: int, samples: Samples) -> Samples:
    """The samples that one process has taken, for all processes."""
    taken = gathered(np.array(list(samples.values()), np.float64))[index]
    return {size: row.tolist() for size, row in zip(samples, taken, strict=True)}


def _timed(calls: Mapping[int, Callable[[], Any]], rounds: int) -> Samples:
    samples = interleaved({str(size): call for size, call in calls.items()}, rounds)
    return {float(size): samples[str(size)] for size in calls}


def _link_of(samples: Samples) -> tuple[Link, list[str]]:
    """(the link, what cannot be right about it)."""
    by_name = {str(size): times for size, times in samples.items()}
    typical, spread = steady(by_name), _largest_spread(by_name)
    seconds = {size: typical[str(size)] for size in samples}
    link = _link(seconds).model_copy(update={"spread": spread, "repetitions": len(next(iter(samples.values())))})
    small, large = min(seconds), max(seconds)
    faults = link_faults("the link", link)
    if large >= MUCH_LARGER * small and seconds[large] <= seconds[small]:
        faults.append(f"{large:.0f} bytes take {seconds[large]:.3g} s, and {small:.0f} bytes {seconds[small]:.3g} s")
    return link, faults


def _link(seconds: Mapping[float, float]) -> Link:
    """Latency from the smallest size, rates from the others; latency counts for at most nine tenths of a time.

    A larger message never takes less time than a smaller one: times with such noise are raised.
    """
    smallest, *sizes = sorted(seconds)
    latency = seconds[smallest]
    moving = itertools.accumulate((max(seconds[size] - latency, seconds[size] / 10) for size in sizes), max)
    rates = [size / time for size, time in zip(sizes, moving, strict=True)]
    measured = Curve(sizes=tuple(sizes), values=tuple(rates))
    return Link(bandwidth=rates[-1], latency=latency, measured=measured)
