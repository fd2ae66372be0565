"""Clusters in files: what is left out is the catalogue's, what is written counts, and what is wrong is said."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.catalogue import cluster_named, device_named, efficiency_of, kinds, network_named, node_named
from jhpt.core.cluster import Cluster, load_cluster
from jhpt.core.cluster_file import find_cluster, read_cluster
from jhpt.core.errors import InputError

FIGURES = {
    "name": "card",
    "peak_flops": {"bf16": "200 TFLOP/s", "fp32": 1e14},
    "memory": "20GB",
    "memory_bandwidth": "1TB/s",
}
"""A device that the catalogue does not know."""

WHOLE = {
    "device": FIGURES,
    "nodes": "2 x 4",
    "inside": "pcie4",
    "host": "pcie4",
    "host_memory": "1TB",
    "network": "25gbe",
}


@pytest.fixture
def read(tmp_path):
    """The cluster of a tree in a file."""

    def read_tree(tree) -> Cluster:
        (tmp_path / "rented.yaml").write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return read_cluster(tmp_path / "rented.yaml")

    return read_tree


@pytest.mark.parametrize("kind", kinds())
def test_a_kind_and_a_grid_are_the_cluster_of_that_name(kind, read):
    named = cluster_named(f"{kind}x1x3")
    assert read({"device": kind, "nodes": "3 x 1"}) == named.model_copy(update={"name": "rented"})


@pytest.mark.parametrize("name", ["h100x8x8", "a100pciex4x2-25gbe", "v100x8x2"])
@pytest.mark.parametrize("efficiency", [True, False])
def test_what_is_saved_is_read_unchanged(name, efficiency, tmp_path):
    cluster = cluster_named(name)
    node = cluster.nodes[0]
    if not efficiency:
        node = node.model_copy(update={"device": node.device.model_copy(update={"efficiency": None, "name": "mine"})})
    cluster = cluster.model_copy(update={"nodes": (node, node), "sources": {}})
    cluster.save(tmp_path / "saved.json")
    assert read_cluster(tmp_path / "saved.json") == find_cluster(tmp_path / "saved.json") == cluster
    assert load_cluster(tmp_path / "saved.json") == cluster


def test_links_by_name_and_by_rate(read):
    node = read({"device": "h100", "nodes": "1 x 8", "inside": "nvlink3", "host": "pcie4"}).nodes[0]
    assert node.inside == node_named("a100", 8).inside
    assert node.host == node_named("a100", 8).host
    node = read({"device": "h100", "nodes": "1 x 8", "inside": "450GB/s", "host": 5e10}).nodes[0]
    assert node.inside == node_named("h100", 8).inside.model_copy(update={"bandwidth": 450e9})
    assert node.host.bandwidth == 5e10
    slow = {"bandwidth": "1 GB/s", "latency": "3us"}
    assert read({"device": "h100", "nodes": "1 x 8", "inside": slow}).nodes[0].inside.latency == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("device", "network", "ports", "rate"),
    [
        ("h100", "3200 Gbit/s per node", 8, 50e9),  # 3200 / 8 bits / 8 ports
        ("h100", "400Gbit/s per device", 8, 50e9),
        ("v100", "3200 Gbps per node", 4, 100e9),  # a V100 server has a port for two devices
        ("h100pcie", "50GB/s per node", 1, 50e9),
    ],
)
def test_rates_of_a_node_are_shared_by_its_ports(device, network, ports, rate, read):
    link = read({"device": device, "nodes": "2 x 8", "network": network}).network
    assert (link.ports, link.bandwidth) == (ports, pytest.approx(rate))
    assert link.latency == network_named("400gib", None, 1).latency


def test_a_slow_network_has_the_latency_of_tcp(read):
    link = read({"device": "h100", "nodes": "2 x 1", "network": "100Gbit/s per node"}).network
    assert link.latency == network_named("100gbe", None, 1).latency > network_named("400gib", None, 1).latency


def test_figures_take_the_place_of_a_kinds(read):
    device = {"kind": "h100", "memory": "60GB", "peak_flops": {"bf16": "800TFLOP/s"}}
    read_device = read({"device": device, "nodes": "1 x 8"}).nodes[0].device
    usual = device_named("h100")
    assert read_device.memory == 60e9
    assert read_device.peak_flops == usual.peak_flops | {"bfloat16": 800e12}
    assert read_device.model_copy(update={"memory": usual.memory, "peak_flops": usual.peak_flops}) == usual


@pytest.mark.parametrize("share", [None, 0.5])
def test_nothing_computes_at_its_peak_unless_the_file_says_so(share, read):
    device = FIGURES | ({} if share is None else {"efficiency": share})
    found = read(WHOLE | {"device": device}).nodes[0].device
    assert found.efficiency == efficiency_of(200e12, share)
    assert max(found.efficiency.values) < 0.9
    assert read(WHOLE | {"device": FIGURES | {"efficiency": None}}).nodes[0].device.efficiency is None


def test_groups_of_nodes_share_what_stands_beside_them(read):
    groups = [{"device": "h100", "count": 2, "devices": 8}, {"device": "h200", "devices": 8, "host_memory": "1TB"}]
    cluster = read({"nodes": groups, "inside": "100GB/s"})
    assert (cluster.num_devices, cluster.num_nodes, cluster.mixed) == (24, 3, True)
    assert [node.inside.bandwidth for node in cluster.nodes] == [100e9, 100e9]
    assert [node.host_memory for node in cluster.nodes] == [2e12, 1e12]
    assert cluster.network == cluster_named("h100x8x2").network


def test_sources_tell_the_file_from_the_catalogue(read):
    sources = read({"device": {"kind": "h100", "memory": "60GB"}, "nodes": "2 x 8", "inside": "100GB/s"}).sources
    own = {place for place, source in sources.items() if source == "rented.yaml"}
    assert own == {"device.memory", "inside.bandwidth", "inside.latency"}
    assert set(sources) == set(cluster_named("h100x8x2").sources)


BAD = {
    "no mapping": ("just text", "expected a mapping", "nodes"),
    "no nodes": ({"device": "h100"}, "nodes=None", "8 x 8"),
    "misspelt key": ({"device": "h100", "node": "8 x 8"}, "unknown key 'node'", "did you mean nodes?"),
    "no device": ({"nodes": "8 x 8"}, "device=None", "h100"),
    "misspelt kind": ({"device": "h10", "nodes": "8 x 8"}, "device='h10'", "did you mean h100?"),
    "no devices": ({"device": "h100", "nodes": "8 x 0"}, "devices=0"),
    "unknown link": ({"device": "h100", "nodes": "8 x 8", "inside": "nvlnk4"}, "inside='nvlnk4'", "nvlink4?"),
    "bits or bytes": ({"device": "h100", "nodes": "8 x 8", "inside": "450Gb/s"}, "inside='450Gb/s'", "450GB/s"),
    "network of what": ({"device": "h100", "nodes": "8 x 8", "network": "3200Gbit/s"}, "per node or per device"),
    "misspelt network": ({"device": "h100", "nodes": "8 x 8", "network": "400gb"}, "did you mean 400gib?"),
    "memory without a unit of memory": (
        {"device": "h100", "nodes": "8 x 8", "host_memory": "1TF"},
        "host_memory: '1TF'",
    ),
    "dtype": ({"device": {"kind": "h100", "peak_flops": {"int8": 1e15}}, "nodes": "8 x 8"}, "'int8'", "bf16"),
    "dtype twice": ({"device": FIGURES | {"peak_flops": {"fp32": 1, "tf32": 1}}, "nodes": "8 x 8"}, "float32 twice"),
    "incomplete device": ({"device": {"name": "card", "memory": 1e9}, "nodes": "8 x 8"}, "missing", "h100"),
    "more than the peak": ({"device": FIGURES | {"efficiency": 1.2}, "nodes": "8 x 8"}, "efficiency=1.2", "0.7"),
    "no network in common": (
        {"nodes": [{"device": "h100", "devices": 8}, {"device": "a100", "devices": 8}]},
        "network is missing",
    ),
    "said twice": ({"device": "h100", "nodes": [{"device": "a100", "devices": 8}]}, "device stands", "leave out one"),
    "negative": ({"device": {"kind": "h100", "memory": -1}, "nodes": "8 x 8"}, "device.memory", "80GB"),
    "a date": ("name: 2026-13-41", "not valid YAML"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name, read):
    tree, *words = BAD[name]
    with pytest.raises(InputError) as error:
        read(tree)
    assert all(word in str(error.value) for word in (*words, "rented.yaml")), str(error.value)


WORDS = st.sampled_from(
    ["h100", "nvlink4", "pcie5", "400gib", "8 x 8", "0 x 1", "450GB/s", "3200Gbit/s per node", "1TB", "bf16", "1us"]
)
KEYS = st.sampled_from(
    sorted({*Cluster.model_fields, *WHOLE, *FIGURES, "kind", "count", "devices", "bandwidth", "latency", "ports",
            "measured", "efficiency", "reserve", "sizes", "values", "bf16", "fp32"})
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats(allow_nan=True) | WORDS | st.text(max_size=4)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(changes=st.dictionaries(KEYS, TREES, max_size=3), device=st.dictionaries(KEYS, TREES, max_size=2), bare=TREES)
def test_a_malformed_file_is_an_input_error_or_a_cluster(changes, device, bare, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    for tree in (WHOLE | changes, WHOLE | {"device": FIGURES | device}, WHOLE | {"nodes": [bare]}, bare):
        path.write_text(json.dumps(tree))
        try:
            cluster = read_cluster(path)
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert Cluster.model_validate(cluster.model_dump()) == cluster
