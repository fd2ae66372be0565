"""Known devices, networks and clusters by name.  The figures, each with its source, are in `catalogue.yaml`.

A cluster's name is KINDxDEVICESxNODES[-NETWORK]: `h100x8x4` is 4 nodes of 8 H100 with the network of a DGX H100,
`v100x4x4-10gbe` is 4 nodes of 4 V100 with 10 Gb/s Ethernet.

    a node's host memory = that of the vendor's 8-device node * devices / 8
    ports of a node on InfiniBand = one per device (DGX A100 and later), one per two (DGX-1 with V100), one per node
                                    for servers with PCIe cards; on Ethernet always one

A network that the name gives has as many ports as the kind's usual network.  Peak rates and InfiniBand rates are the
vendors' nominal ones; NVLink and PCIe rates are the smaller ones that NCCL assumes.

`jhpt.core.cluster_file` reads clusters from files; what a file leaves out comes from here.
"""

import functools
import re
import statistics
from dataclasses import dataclass
from typing import Any

from jhpt.core.calibration import LAUNCH, MEMORY_SHARE, POWER, Figures, architecture, figures
from jhpt.core.cluster import Cluster, Curve, Device, Link, Node
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.text_files import data_of_package

NODE_DEVICES = 8
"""Devices of the vendors' nodes that `host_memory` holds for."""

MATMUL_SIZES = tuple(2.0 ** (exponent / 2) for exponent in range(2 * 16, 2 * 42 + 1))
"""FLOP at which efficiency is tabulated: from products too small to matter to those within 1 % of the largest share.
Half octaves: straight lines between whole ones would make a product up to 6 % faster for being larger."""

FLOAT8_CAPABILITY = 8.9
"""The least compute capability whose tensor cores multiply e4m3 and e5m2: Ada, Hopper and newer (PTX ISA, `mma`)."""

CAPABILITIES = {"V100": 7.0, "A10G": 8.6, "L40S": 8.9, "RTX 4090": 8.9, "GB200": 10.0}
"""Compute capabilities of devices without a chip in the catalogue, by a part of their name."""

_NAME = re.compile(r"(?P<kind>[a-z0-9]+?)x(?P<devices>[1-9]\d*)x(?P<nodes>[1-9]\d*)(-(?P<network>\w+))?")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the compiler has to know of a device and the planner does not, for the chip as it is sold.

    capability: compute capability, (major, minor).  l2_bytes: size of the L2 cache.  clock: in Hz.  links: number of
    NVLink links.
    """

    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    clock: float
    links: int


MOST_DEVICES = 1 << 17
"""Devices of a cluster, up to which plans are found within seconds."""


def cluster_named(name: str, fitted: Figures | None = None) -> Cluster:
    """KINDxDEVICESxNODES[-NETWORK], e.g. `h100x8x4` or `a100x8x2-100gbe`.

    Args:
      fitted: what devices and links reach; None: the figures that come with jhpt.

    Raises:
      InputError: unknown kind or network, more devices than such a node takes, or a name of another form.
    """
    match = _NAME.fullmatch(name.lower())
    if match is None:
        hint = did_you_mean(name.lower(), [f"{kind}x8x1" for kind in kinds()])
        raise InputError(
            f"there is no cluster {name!r}{hint}: give the path of a JSON or YAML file, "
            f"or KINDxDEVICESxNODES[-NETWORK] as in h100x8x4 or v100x4x4-10gbe; {_known()}"
        )
    kind, devices, nodes = match["kind"], int(match["devices"]), int(match["nodes"])
    entry = _kind(kind)
    if devices > (limit := entry["max_devices"][0]):
        raise InputError(f"{name}: a node takes at most {limit} {kind} ({entry['max_devices'][1]}); use more nodes")
    if devices * nodes > MOST_DEVICES:
        raise InputError(f"{name}: has {devices * nodes:.3g} devices, and plans are found for up to {MOST_DEVICES:,}")
    network = match["network"] or entry["network"][0]
    return Cluster(
        name=name.lower(),
        nodes=(node_named(kind, devices, nodes, fitted),),
        network=network_named(network, kind, devices, fitted),
        sources=sources_of(kind, network),
    )


def device_named(kind: str, *, power: float | None = None, fitted: Figures | None = None) -> Device:
    """The device of a kind, e.g. `h100`.

    Args:
      power: limit in watts; None: that of the datasheet.
      fitted: what devices reach; None: the figures that come with jhpt.

    Raises:
      InputError: the kind is unknown.
    """
    entry, fitted = _kind(kind), fitted or figures()
    name, dtypes = entry["name"][0], ("bfloat16", "float16", "float32")
    chip, era = chip_by_driver(name), architecture(capability_by_driver(name))
    share = entry["share"][0] * fitted.products[era]
    if power is not None:
        if "power" not in entry:
            raise InputError(f"the catalogue does not know the power limit of {kind}, so power={power:g} says nothing")
        share *= min(1.0, power / entry["power"][0]) ** POWER
    return Device(
        name=name,
        peak_flops={dtype: entry[dtype][0] for dtype in dtypes},
        memory=entry["memory"][0],
        memory_bandwidth=entry["memory_bandwidth"][0],
        efficiency=efficiency_of(entry["bfloat16"][0], share),
        multiprocessors=chip.multiprocessors if chip else entry.get("multiprocessors", (None,))[0],
        fused_attention=fitted.fused_attention.get(era, 1.0),
        memory_share=MEMORY_SHARE,
        launch=LAUNCH,
    )


def efficiency_of(peak: float, share: float | None = None) -> Curve:
    """Share of the peak that a product of so many FLOP reaches, on a device of this 16-bit peak.

    share: that of the largest products; None: the median of the devices here, times the least that training sustains.
    """
    if share is None:
        median = statistics.median(entry["share"][0] for entry in _data()["kinds"].values())
        share = median * min(figures().products.values())
    return _matmul_efficiency(peak, share, _data()["matmul"]["overhead"][0])


def node_named(kind: str, devices: int, count: int = 1, fitted: Figures | None = None) -> Node:
    """`count` nodes of so many devices of a kind; InputError for an unknown kind."""
    entry, fitted = _kind(kind), fitted or figures()
    return Node(
        device=device_named(kind, fitted=fitted),
        devices=devices,
        inside=Link(bandwidth=entry["inside"][0], latency=entry["inside_latency"][0], reached=fitted.inside),
        host=Link(bandwidth=entry["host"][0], latency=_data()["latency"]["host"][0]),
        host_memory=entry["host_memory"][0] * devices / NODE_DEVICES,
        count=count,
    )


def usual_network(kind: str) -> str:
    """The name of the network that nodes of a kind have unless something else is said."""
    name: str = _kind(kind)["network"][0]
    return name


def network_named(network: str, kind: str | None, devices: int, fitted: Figures | None = None) -> Link:
    """A network, with the ports of a node of so many devices of a kind; None: a kind with a port for each device.

    Raises:
      InputError: unknown network or kind.
    """
    if network not in networks():
        raise InputError(f"there is no network {network!r}{did_you_mean(network, networks())}; {_known()}")
    entry, fitted = _data()["networks"][network], fitted or figures()
    per_device = 1 if kind is None else _kind(kind)["ports_per_device"][0]
    ports = entry["per_node"] or max(1, int(devices * per_device))
    return Link(
        bandwidth=entry["bandwidth"][0],
        latency=entry["latency"][0],
        ports=ports,
        reached=fitted.network,
        decline=fitted.decline,
        sharing=fitted.sharing,
    )


def link_named(name: str) -> Link:
    """A link between the devices of a node, such as `nvlink4` or `pcie5`; InputError for an unknown one."""
    if name not in links():
        raise InputError(f"there is no link {name!r}{did_you_mean(name, links())}; links: {one_of(links())}")
    entry = _kind(_data()["links"][name])
    return Link(bandwidth=entry["inside"][0], latency=entry["inside_latency"][0], reached=figures().inside)


def host_latency() -> float:
    """Seconds before the first byte of a copy between a device and its host."""
    seconds: float = _data()["latency"]["host"][0]
    return seconds


def links() -> tuple[str, ...]:
    """Names of the links between the devices of a node."""
    return tuple(_data()["links"])


def most_devices(kind: str) -> int:
    """How many devices of a kind a node takes."""
    most: int = _kind(kind)["max_devices"][0]
    return most


def kinds() -> tuple[str, ...]:
    """Names of the devices."""
    return tuple(_data()["kinds"])


def networks() -> tuple[str, ...]:
    """Names of the networks between nodes."""
    return tuple(_data()["networks"])


def peak_bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by the driver's name for it, or None where it is not known.

    V100 has no bfloat16, so it is not known here.
    """
    rate = _by_driver(device_kind).get("bfloat16")
    return float(rate[0]) if rate else None


def chip_by_driver(device_kind: str) -> Chip | None:
    """The chip of a device by the driver's name for it, or None where it is not known."""
    figures = _by_driver(device_kind).get("chip")
    if figures is None:
        return None
    values = {name: value for name, (value, _) in figures.items()}
    return Chip(**values | {"capability": tuple(values["capability"])})


def capability_by_driver(device_kind: str) -> float | None:
    """The compute capability of a device by the driver's name for it, or None where it is not known."""
    chip = chip_by_driver(device_kind)
    if chip is None:
        return next((known for name, known in CAPABILITIES.items() if name in device_kind), None)
    return chip.capability[0] + chip.capability[1] / 10


def kind_by_driver(device_kind: str) -> str | None:
    """The kind of a device, such as `h100`, by the driver's name for it; None where it is not known."""
    if (exact := next((kind for kind in kinds() if _kind(kind)["name"][0] == device_kind), None)) is not None:
        return exact
    for driver in _data()["drivers"]:
        if re.search(driver["pattern"], device_kind):
            kind: str | None = driver.get("kind")
            return kind
    return None


def kinds_with_chips() -> tuple[str, ...]:
    """Names of the devices whose chips are known."""
    return tuple(kind for kind in kinds() if "chip" in _kind(kind))


def known_to_differ(first: str, second: str) -> bool:
    """Whether two devices, by the drivers' names for them, are certainly not of one kind."""
    listed = {entry["name"][0] for entry in _data()["kinds"].values()}
    if first in listed and second in listed:
        return first != second
    chips = _chip(first), _chip(second)
    return None not in chips and chips[0] != chips[1]


def _chip(name: str) -> str | None:
    """The part that all drivers' names of one chip share; None: not known."""
    patterns = [driver["pattern"] for driver in _data()["drivers"] if re.search(driver["pattern"], name)]
    listed = [kind for kind, entry in _data()["kinds"].items() if entry["name"][0] == name]
    return next(iter((*patterns, *listed)), None)


def _by_driver(name: str) -> dict[str, Any]:
    """What the catalogue has on a device by the driver's name for it: a kind's entry, single figures, or nothing."""
    for driver in _data()["drivers"]:
        if re.search(driver["pattern"], name):
            return _kind(driver["kind"]) if "kind" in driver else driver
    return {}


@functools.cache
def _data() -> dict[str, Any]:
    """The catalogue, read at the first use: most runs need none of it."""
    return data_of_package("catalogue.yaml")


def _kind(kind: str) -> dict[str, Any]:
    if kind not in kinds():
        raise InputError(f"there is no device {kind!r}{did_you_mean(kind, kinds())}; {_known()}")
    entry: dict[str, Any] = _data()["kinds"][kind]
    return entry


def _known() -> str:
    return f"kinds: {one_of(kinds())}; networks: {one_of(networks())}"


def _matmul_efficiency(peak: float, share: float, overhead: float) -> Curve:
    """Share of the peak by FLOP f if a product takes overhead + f / (share peak) seconds:
    1 / (overhead peak / f + 1 / share)."""
    return Curve(sizes=MATMUL_SIZES, values=tuple(1 / (overhead * peak / flops + 1 / share) for flops in MATMUL_SIZES))


def sources_of(kind: str, network: str) -> dict[str, str]:
    """Where each figure of a cluster comes from, by its place."""
    device, link, shared = _kind(kind), _data()["networks"][network], _data()
    places = {f"device.peak_flops.{dtype}": device[dtype] for dtype in ("bfloat16", "float16", "float32")}
    places |= {f"device.{key}": device[key] for key in ("name", "memory", "memory_bandwidth")}
    places |= {"inside.bandwidth": device["inside"], "inside.latency": device["inside_latency"]}
    places |= {"host.bandwidth": device["host"], "host.latency": shared["latency"]["host"]}
    places |= {f"network.{key}": link[key] for key in ("bandwidth", "latency")}
    sources = {place: source for place, (_, source) in places.items()}
    sources["device.efficiency"] = (
        f"large products: {device['share'][1]}, times what training sustains of it (jhpt/core/calibration.yaml); "
        f"small ones: {shared['matmul']['overhead'][1]}"
    )
    calibrated = ("device.fused_attention", "inside.reached", "network.reached", "network.decline", "network.sharing")
    sources |= dict.fromkeys(calibrated, "jhpt/core/calibration.yaml, fitted to published runs")
    sources |= {"device.memory_share": "BabelStream", "device.launch": "jhpt.core.calibration.LAUNCH: ten kernels"}
    if multiprocessors := (device.get("chip") or device).get("multiprocessors"):
        sources["device.multiprocessors"] = multiprocessors[1]
    sources["host_memory"] = f"{device['host_memory'][1]}, in proportion to the devices of a node"
    sources["network.ports"] = "one per node" if link["per_node"] else device["ports_per_device"][1]
    return sources
