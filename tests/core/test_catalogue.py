"""Every figure of the catalogue has a source, names mean what they say, wrong ones are answered with the right ones."""

import dataclasses
import itertools
import math
import re

import pytest

from jhpt.core import catalogue
from jhpt.core.catalogue import (
    Chip,
    capability_by_driver,
    chip_by_driver,
    cluster_named,
    device_named,
    kind_by_driver,
    kinds,
    kinds_with_chips,
    most_devices,
    networks,
    peak_bf16_flops,
)
from jhpt.core.cluster import load_cluster
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError

ALL = list(itertools.product(kinds(), (None, *networks())))


def named(kind, network, nodes=2):
    devices = min(8, most_devices(kind))
    return cluster_named(f"{kind}x{devices}x{nodes}" + (f"-{network}" if network else ""))


@pytest.mark.parametrize(("kind", "network"), ALL)
def test_every_entry_survives_a_file(kind, network, tmp_path):
    cluster = named(kind, network)
    cluster.save(tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster
    assert find_cluster(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(("kind", "network"), ALL)
def test_every_figure_of_a_cluster_has_a_source(kind, network):
    cluster = named(kind, network)
    tree = {**cluster.nodes[0].model_dump(exclude_none=True), "network": cluster.network.model_dump(exclude_none=True)}
    # Chosen by the name or by plans; or links in a node, which have one port in every entry and no congestion.
    chosen = {"devices", "count", "device.reserve", "inside.ports", "host.ports", "host.reached"}
    chosen |= {f"{link}.{loss}" for link in ("inside", "host") for loss in ("decline", "sharing")}
    figures = {place for place in leaves(tree) if place not in chosen}
    assert figures == set(cluster.sources)
    assert all(len(source) > 5 for source in cluster.sources.values())


def leaves(tree, prefix=""):
    for key, value in tree.items():
        place = f"{prefix}{key}"
        if isinstance(value, dict) and key != "efficiency":
            yield from leaves(value, f"{place}.")
        else:
            yield place


def test_every_pair_in_the_file_is_a_figure_and_its_source():
    """A figure with a typing error in its exponent is a string to YAML."""

    def pairs(tree):
        if isinstance(tree, list) and len(tree) == 2 and not isinstance(tree[0], dict):
            yield tree
        else:
            for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
                yield from pairs(child)

    figures = list(pairs(catalogue._data()))
    assert len(figures) > 100
    for value, source in figures:
        assert isinstance(source, str)
        assert not isinstance(value, str) or not re.match(r"[-+.\d]+e", value), f"{value} is text"


@pytest.mark.parametrize("kind", kinds())
def test_larger_products_are_more_efficient_and_take_longer(kind):
    device = device_named(kind)
    assert list(device.efficiency.values) == sorted(device.efficiency.values)
    assert 0.5 < device.efficiency.values[-1] < 1
    seconds = [device.seconds(flops, 0, "bfloat16") for flops in device.efficiency.sizes]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("kind", kinds())
def test_orders_of_magnitude(kind):
    node = named(kind, None).nodes[0]
    device = node.device
    assert 14e12 <= device.peak_flops["float32"] < device.peak_flops["bfloat16"] == device.peak_flops["float16"] < 3e15
    assert 20e9 < device.memory < 200e9
    assert max(node.host.bandwidth, node.inside.bandwidth) < device.memory_bandwidth
    assert (node.inside.bandwidth == node.host.bandwidth) == (kind.endswith("pcie") or kind in ("l40s", "a10g"))
    # Only cards without peer access are closer to the host than to each other.
    assert (node.host.bandwidth > node.inside.bandwidth) == (kind == "rtx4090")
    assert node.host_memory >= node.devices * device.memory


def test_a_name_says_kind_devices_nodes_and_network():
    cluster = cluster_named("v100x4x3-10gbe")
    assert (cluster.num_devices, cluster.num_nodes, cluster.mixed) == (12, 3, False)
    assert cluster.nodes[0].device == device_named("v100")
    # 10 Gb/s are 1.25e9 bytes/s before headers.
    assert 1.1e9 < cluster.network.bandwidth < 1.25e9
    assert cluster_named("H100x8x4") == cluster_named("h100x8x4") == find_cluster("h100x8x4")


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("h100x8x2", 8),
        ("h100x4x2-200gib", 4),
        ("v100x8x2", 4),
        ("v100x1x2", 1),
        ("h100pciex8x2", 1),
        ("h100x8x2-100gbe", 1),
    ],
)
def test_ports_follow_the_vendors_node(name, ports):
    assert cluster_named(name).network.ports == ports


def test_half_a_node_has_half_the_host_memory():
    whole, half = cluster_named("h100x8x1").nodes[0], cluster_named("h100x4x1").nodes[0]
    assert half.host_memory == whole.host_memory / 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h10x8x4", ["h100?", "b200", "10gbe"]),
        ("h100x8", ["h100x8x1?", "KINDxDEVICESxNODES"]),
        ("h100x8x4-10gb", ["10gbe?", "400gib"]),
        ("h100x9x4", ["at most 8 h100"]),
        ("h100x0x4", ["KINDxDEVICESxNODES"]),
        ("", ["KINDxDEVICESxNODES"]),
        ("no-such-file.json", ["no-such-file.json", "cannot be read"]),
    ],
)
def test_wrong_names_are_answered(name, words):
    with pytest.raises(InputError) as error:
        find_cluster(name)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("kind", kinds())
def test_the_kind_of_a_device_of_the_catalogue(kind):
    assert kind_by_driver(device_named(kind).name) == kind


def test_unknown_device():
    with pytest.raises(InputError, match="did you mean a100"):
        device_named("a1000")


@pytest.mark.parametrize("kind", [kind for kind in kinds() if not kind.startswith("v100")])
def test_peak_by_the_drivers_name_is_that_of_the_kind(kind):
    device = device_named(kind)
    assert peak_bf16_flops(device.name) == device.peak_flops["bfloat16"]


@pytest.mark.parametrize(
    ("driver", "teraflops"),
    [
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
    ],
)
def test_peak_by_the_drivers_name(driver, teraflops):
    peak = peak_bf16_flops(driver)
    assert peak is None if teraflops is None else math.isclose(peak, teraflops * 1e12)


def test_every_figure_of_a_chip_has_a_source():
    fields = {field.name for field in dataclasses.fields(Chip)}
    others = {kind for kind in kinds() if kind not in kinds_with_chips()}
    assert others == {"v100", "v100pcie", "gb200", "l40s", "rtx4090", "a10g"}
    assert all(capability_by_driver(device_named(kind).name) for kind in kinds())
    for kind in kinds_with_chips():
        chip = catalogue._data()["kinds"][kind]["chip"]
        assert set(chip) == fields
        assert all(isinstance(source, str) and len(source) > 5 for _, source in chip.values())


@pytest.mark.parametrize("kind", kinds_with_chips())
def test_chip_by_the_drivers_name_is_that_of_the_kind(kind):
    chip, figures = chip_by_driver(device_named(kind).name), catalogue._data()["kinds"][kind]["chip"]
    assert dataclasses.asdict(chip) == {name: value for name, (value, _) in figures.items()} | {
        "capability": tuple(figures["capability"][0])
    }
    assert (chip.links == 0) == kind.endswith("pcie")
    # Multiprocessors x clock x bf16 FLOP per clock, of which 8.0 has 2048, 9.0 4096 and 10.0 8192: more than the peak,
    # which vendors state for a somewhat lower clock.
    highest = chip.multiprocessors * chip.clock * 2048 * 2 ** (chip.capability[0] - 8)
    assert 0.85 * highest < device_named(kind).peak_flops["bfloat16"] <= 1.01 * highest


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100pcie"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("A100-SXM4-40GB", "a10040"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L4", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
    ],
)
def test_chip_by_the_drivers_name(driver, kind):
    assert chip_by_driver(driver) == (None if kind is None else chip_by_driver(device_named(kind).name))
