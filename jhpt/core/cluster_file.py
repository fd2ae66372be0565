"""Clusters in files that people write.  What a file leaves out comes from the catalogue.

    name: rented
    device: h100                      # a kind of the catalogue, or a mapping of figures
    nodes: 8 x 8                      # nodes x devices of each, or a list of groups with these keys each
    inside: nvlink4                   # between the devices of a node: a link by name, or a rate in one direction
    network: 3200 Gbit/s per node     # between nodes: a network by name, or a rate per node or per device
    host_memory: 1TB                  # of a node

Wherever one of these is a mapping, its keys are those of `Cluster`, so what `Cluster.save` and `jhpt profile
--cluster-out` write is such a file, too.  A device without `efficiency` has that of its kind, and one that the
catalogue does not know has a share that training on any device there reaches: only `efficiency: null` counts all of
the peak.  Of a rate that is given, collectives reach the share that is usual (`jhpt.core.calibration`), unless the link
has `reached` or `measured`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jhpt.core.amounts import BYTES_PER_SECOND, FLOP_PER_SECOND, SECONDS, UNITS, parse_quantity
from jhpt.core.calibration import figures
from jhpt.core.catalogue import (
    MOST_DEVICES,
    cluster_named,
    device_named,
    efficiency_of,
    host_latency,
    kind_by_driver,
    kinds,
    link_named,
    links,
    network_named,
    networks,
    node_named,
    sources_of,
    usual_network,
)
from jhpt.core.cluster import Cluster, Device, Link, Node, parse, read_tree
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError, did_you_mean

FILES = (".json", ".yaml", ".yml")
"""Endings by which the name of a file is told from the name of a cluster."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
DTYPES |= {dtype: dtype for dtype in ("bfloat16", "float16", "float32")}
"""Names of dtypes in files.  XLA multiplies float32 in TF32 by default."""

TCP_RATE = 1.25e10
"""Bytes/s of a node.  Up to 100 Gbit/s a network without a name has the latency of TCP, above it that of InfiniBand."""

MOST_GROUPS = 256
"""Groups of nodes, which follow each other."""

SHARED = ("device", "inside", "host", "host_memory")
"""Keys of a group of nodes that may stand beside `nodes`, for all groups that have none of their own."""

_GRID = re.compile(r"\s*(\d{1,9})\s*x\s*(\d{1,9})\s*")
_PER = re.compile(r"(.*?)\s*per\s+(node|device)\s*")

Tree = dict[str, Any]


def find_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster in a JSON or YAML file, or the one of that name in the catalogue.

    Raises:
      InputError: neither; the message lists what is known.
    """
    path = Path(name_or_path)
    if path.suffix.lower() in FILES or path.is_file():
        return read_cluster(path)
    return cluster_named(str(name_or_path))


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file of the form above; InputError names the file and what is wrong with it."""
    tree = read_tree(path)
    try:
        complete = _complete(_mapping(tree, "a cluster", (*Cluster.model_fields, *SHARED)), Path(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    cluster = parse(Cluster, complete, path)
    if cluster.num_devices > MOST_DEVICES:
        raise InputError(
            f"{path}: has {cluster.num_devices:.3g} devices, and plans are found for up to {MOST_DEVICES:,}"
        )
    return cluster


def _complete(tree: Tree, path: Path) -> Tree:
    """The tree of a `Cluster`."""
    shared = {key: tree[key] for key in SHARED if key in tree}
    groups = [shared | group for group in _groups(tree.get("nodes"), shared)]
    nodes = [_node(group, "" if len(groups) == 1 else f"nodes.{number}.") for number, group in enumerate(groups)]
    kinds_of_nodes = [_kind_of(group.get("device")) for group in groups]
    network = _network(tree.get("network"), nodes, kinds_of_nodes)
    rest: Tree = {key: tree[key] for key in ("name", "overlap", "sources") if key in tree}
    sources = _sources(tree, groups, kinds_of_nodes, path.name)
    return {"name": path.stem, "sources": sources, **rest, "nodes": nodes, "network": network}


def _groups(nodes: Any, shared: Tree) -> list[Tree]:
    """Groups of equal nodes, with the keys that each has of its own.  shared: what stands beside them for all."""
    if isinstance(nodes, str) and (match := _GRID.fullmatch(nodes)):
        return [{"count": int(match[1]), "devices": int(match[2])}]
    if not isinstance(nodes, list) or not nodes:
        raise InputError(
            f"nodes={nodes!r:.60}: write nodes x devices of each, as in 8 x 8, or a list of groups such as "
            "{device: h100, count: 8, devices: 8}"
        )
    if len(nodes) > MOST_GROUPS:
        raise InputError(
            f"nodes: has {len(nodes):,} groups, and up to {MOST_GROUPS} are read; write count: for equal nodes"
        )
    groups = [_mapping(group, f"nodes.{number}", Node.model_fields) for number, group in enumerate(nodes)]
    for key in shared:
        if all(key in group for group in groups):
            raise InputError(f"{key} stands beside nodes and in all of their groups; leave out one of them")
    return groups


def _node(group: Tree, place: str) -> Tree:
    """The tree of a `Node`."""
    kind, devices = _kind_of(group.get("device")), group.get("devices")
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices < 10**9:
        raise InputError(f"{place}devices={devices!r:.60}: give the number of devices of a node")
    usual = node_named(kind, devices) if kind else None
    device = _device(group.get("device"), f"{place}device")
    host = _link(group.get("host"), usual.host if usual else None, f"{place}host")
    if devices == 1 and usual is None and group.get("inside") is None:
        inside = host  # not used: there is nothing to link
    else:
        inside = _link(group.get("inside"), usual.inside if usual else None, f"{place}inside")
    memory = group.get("host_memory")
    if memory is None and usual is None:
        raise InputError(f"{place}host_memory is missing: {_unknown_device()}")
    host_memory = usual.host_memory if memory is None and usual else _read(memory, UNITS, f"{place}host_memory", "1TB")
    tree = {"device": device, "devices": devices, "inside": inside, "host": host, "host_memory": host_memory}
    return tree | {key: group[key] for key in ("count",) if key in group}


def _kind_of(device: Any) -> str | None:
    """The kind of the catalogue that a device is or is based on; None: figures of a device that is not there."""
    if isinstance(device, Mapping):
        kind, name = device.get("kind"), device.get("name")
        device = kind if kind is not None else kind_by_driver(name) if isinstance(name, str) else None
        if device is None:
            return None
    if not isinstance(device, str) or device.lower() not in kinds():
        hint = did_you_mean(device.lower(), kinds()) if isinstance(device, str) else ""
        raise InputError(
            f"device={device!r:.60}{hint}: give one of the kinds {one_of(kinds())}, or a mapping of figures: "
            f"{', '.join(Device.model_fields)}"
        )
    return device.lower()


def _device(device: Any, place: str) -> Tree:
    """The tree of a `Device`."""
    kind = _kind_of(device)
    base = device_named(kind).model_dump() if kind else {}
    if not isinstance(device, Mapping):
        return base
    given = _mapping(device, place, ("kind", *Device.model_fields))
    based = given.pop("kind", None) is not None
    for key, units, example in (("memory", UNITS, "80GB"), ("memory_bandwidth", BYTES_PER_SECOND, "3.35TB/s")):
        if key in given:
            given[key] = _read(given[key], units, f"{place}.{key}", example)
    if "peak_flops" in given:
        given["peak_flops"] = (base["peak_flops"] if based else {}) | _peaks(given["peak_flops"], place)
    tree = base | given
    if missing := [key for key, field in Device.model_fields.items() if field.is_required() and key not in tree]:
        raise InputError(f"{place}.{missing[0]} is missing: {_unknown_device()}")
    if isinstance(share := given.get("efficiency"), int | float) or "efficiency" not in tree:
        tree["efficiency"] = _efficiency(tree["peak_flops"], share, f"{place}.efficiency")
    return tree


def _peaks(peaks: Any, place: str) -> dict[str, float]:
    """FLOP/s by the names that dtypes have in programs."""
    place, read = f"{place}.peak_flops", dict[str, float]()
    for name, peak in _mapping(peaks, place, DTYPES).items():
        if DTYPES[name] in read:
            raise InputError(f"{place} has {DTYPES[name]} twice; leave one out")
        read[DTYPES[name]] = _read(peak, FLOP_PER_SECOND, f"{place}.{name}", "989TFLOP/s")
    if not read or not min(read.values()) > 0:
        raise InputError(f"{place}={peaks!r:.60}: give FLOP/s by dtype, such as {{bf16: 989TFLOP/s}}")
    return read


def _efficiency(peaks: dict[str, float], share: Any, place: str) -> Tree:
    """The efficiency of products where the file has none, or only the share of large ones."""
    fault = InputError(f"{place}={share!r:.60}: give the share of the peak that large products reach, such as 0.7")
    if share is not None and (isinstance(share, bool) or not 0 < share <= 1):
        raise fault
    try:
        return efficiency_of(peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values()), share).model_dump()
    except (ValidationError, ZeroDivisionError):  # rates or shares that are no machine's
        raise fault from None


def _link(link: Any, usual: Link | None, place: str) -> Tree:
    """The tree of a `Link` inside a node, or to the host."""
    host = place.endswith("host")
    latency = host_latency() if host else (usual or link_named("pcie4")).latency
    if link is None:
        if usual is None:
            raise InputError(f"{place} is missing: {_unknown_device()}")
        return usual.model_dump()
    reached = 1.0 if host else figures().inside
    if isinstance(link, Mapping):
        return _link_mapping(link, usual.model_dump() if usual else {"latency": latency, "reached": reached}, place)
    if isinstance(link, str) and link.lower() in links():
        named = link_named(link.lower())
        return named.model_copy(update={"latency": latency, "reached": reached} if host else {}).model_dump()
    known = f"a link ({one_of(links())}) or a rate such as 450GB/s, in one direction"
    try:
        bandwidth = parse_quantity(link, BYTES_PER_SECOND, "450GB/s")
    except ValueError:
        hint = did_you_mean(link.lower(), links()) if isinstance(link, str) else ""
        raise InputError(f"{place}={link!r:.60}: give {known}{hint}") from None
    return {"bandwidth": bandwidth, "latency": latency, "reached": reached}


def _link_mapping(link: Any, usual: Tree, place: str) -> Tree:
    tree = _mapping(link, place, Link.model_fields)
    if tree.get("measured") is not None:  # what is measured is reached
        usual = {key: value for key, value in usual.items() if key == "latency"}
    for key, units, example in (("bandwidth", BYTES_PER_SECOND, "450GB/s"), ("latency", SECONDS, "2us")):
        if key in tree:
            tree[key] = _read(tree[key], units, f"{place}.{key}", example)
    return usual | tree


def _network(network: Any, nodes: list[Tree], kinds_of_nodes: list[str | None]) -> Tree:
    """The tree of the `Link` between nodes."""
    sizes = [node["devices"] for node in nodes]
    several = len(nodes) > 1 or nodes[0].get("count", 1) != 1
    if network is None:
        usual = {usual_network(kind) if kind else None for kind in kinds_of_nodes}
        if len(usual) > 1 or (several and None in usual):
            raise InputError(f"network is missing, and these nodes have none in common; known: {one_of(networks())}")
        network = usual.pop() or networks()[0]
    if isinstance(network, Mapping):
        reached = {
            key: getattr(network_named(networks()[0], None, 1), key) for key in ("reached", "decline", "sharing")
        }
        return _link_mapping(network, reached, "network")
    if isinstance(network, str) and network.lower() in networks():
        pairs = zip(kinds_of_nodes, sizes, strict=True)
        found = {network_named(network.lower(), kind, devices) for kind, devices in pairs}
        if len(found) > 1:
            raise InputError(
                f"network={network}: these nodes have {one_of(sorted(link.ports for link in found))} ports; write "
                "network: {bandwidth: ..., latency: ..., ports: ...} with the ports of a node"
            )
        return found.pop().model_dump()
    return _network_rate(network, sizes, kinds_of_nodes)


def _network_rate(network: Any, sizes: list[int], kinds_of_nodes: list[str | None]) -> Tree:
    """A network of `RATE per node` or `RATE per device`, shared equally by the ports that such nodes usually have."""
    match = _PER.fullmatch(network) if isinstance(network, str) else None
    try:
        rate = parse_quantity(match[1], BYTES_PER_SECOND, "") if match else None
    except ValueError:
        rate = None
    if match is None or not rate:
        hint = did_you_mean(network.lower(), networks()) if isinstance(network, str) else ""
        raise InputError(
            f"network={network!r:.60}: give a network ({one_of(networks())}), or a rate per node or per device, "
            f"such as 3200Gbit/s per node{hint}"
        )
    if match[2] == "device" and len(set(sizes)) > 1:
        raise InputError(f"network={network}: these nodes have {one_of(sizes)} devices; give the rate per node")
    rate *= sizes[0] if match[2] == "device" else 1
    usual = [
        network_named(usual_network(kind) if kind else "400gib", kind, size)
        for kind, size in zip(kinds_of_nodes, sizes, strict=True)
    ]
    ports = min(link.ports for link in usual)
    alike = network_named("100gbe" if rate <= TCP_RATE else "400gib", None, 1)
    return alike.model_dump() | {"bandwidth": rate / ports, "ports": ports}


def _sources(tree: Tree, groups: list[Tree], kinds_of_nodes: list[str | None], file: str) -> dict[str, str]:
    """Where the figures come from: those of one kind by their places, else only the file."""
    kind, group = kinds_of_nodes[0], groups[0]
    if kind is None or len(groups) > 1:
        return {"cluster": f"{file}; what it leaves out is the catalogue's"}
    network = tree.get("network")
    named = network.lower() if isinstance(network, str) and network.lower() in networks() else None
    sources = sources_of(kind, named or usual_network(kind))
    given = {key for key in ("inside", "host", "host_memory") if group.get(key) is not None}
    given |= {"network"} if network is not None and named is None else set()
    device = group.get("device")
    given |= {f"device.{key}" for key in device} if isinstance(device, Mapping) else set()

    def is_given(place: str) -> bool:
        parts = place.split(".")
        return any(".".join(parts[:length]) in given for length in range(1, len(parts) + 1))

    def says(place: str) -> bool:
        """Whether the file gives a figure itself; a rate says nothing about the share of it that is reached."""
        link, _, key = place.partition(".")
        if key not in ("reached", "decline", "sharing"):
            return is_given(place)
        mapping = network if link == "network" else group.get(link)
        return isinstance(mapping, Mapping) and key in mapping

    return {place: file if says(place) else source for place, source in sources.items()}


def _unknown_device() -> str:
    return f"a device without a kind of the catalogue ({one_of(kinds())}) needs all figures in the file"


def _mapping(tree: Any, place: str, keys: Any) -> Tree:
    """A copy of the mapping `tree`; InputError if it is none, or for a key other than `keys`."""
    names = list(dict.fromkeys(keys))
    if not isinstance(tree, Mapping):
        raise InputError(f"{place}: expected a mapping with {', '.join(names)}, found {tree!r:.60}")
    for key in tree:
        if key not in names:
            hint = did_you_mean(str(key), names) or f"; known: {', '.join(names)}"
            raise InputError(f"{place}: unknown key {key!r:.60}{hint}")
    return dict(tree)


def _read(value: Any, units: Mapping[str, float], place: str, example: str) -> float:
    try:
        return parse_quantity(value, units, example)
    except ValueError as error:
        raise InputError(f"{place}: {error}") from None
