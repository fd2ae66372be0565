"""Clusters side by side, the best first; the catalogue with all its sources."""

import io
import json

import pytest
from rich.console import Console

from jhpt.core.catalogue import cluster_named, kinds, networks
from jhpt.planner.api import compare
from jhpt.planner.report.clusters import catalogue_json, options_json, print_catalogue, print_options, ranked
from jhpt.planner.report.rent import read_prices

NAMES = ("a100x1x1", "h100x2x1", "v100x1x1")


@pytest.fixture(scope="module")
def clusters():
    """Three of which the last is too small."""
    found = [cluster_named(name) for name in NAMES]
    node = found[-1].nodes[0]
    tiny = node.model_copy(update={"device": node.device.model_copy(update={"memory": 1e5}), "host_memory": 1e5})
    return [*found[:-1], found[-1].model_copy(update={"nodes": (tiny,)})]


@pytest.fixture(scope="module")
def options(clusters):
    return compare("gpt-tiny", clusters, batch=8, micro_batches=1)


def printed(options, width=120):
    stream = io.StringIO()
    print_options(Console(file=stream, width=width), options)
    return stream.getvalue()


def names(options):
    return [option.cluster.name for option in options]


def test_the_fastest_or_the_cheapest_comes_first_and_what_fits_nothing_last(options, clusters):
    seconds = {option.cluster.name: option.answer.estimate.seconds for option in options if option.answer}
    assert names(ranked(options, None, None)) == [*sorted(seconds, key=seconds.get), "v100x1x1"]
    dear = read_prices("a100=1000,h100=1,v100=1", clusters)
    assert names(ranked(options, None, dear)) == ["h100x2x1", "a100x1x1", "v100x1x1"]
    cheap = read_prices("a100=0.001,h100=1,v100=1", clusters)
    assert names(ranked(options, 1e9, cheap)) == ["a100x1x1", "h100x2x1", "v100x1x1"]


def test_the_table_has_a_row_for_each_and_why_nothing_fits(options, clusters):
    table = printed(ranked(options, 1e9, read_prices("2", clusters)))
    for name in NAMES:
        assert f"\n{name}" in table
    for word in ("tokens/s per GPU", "MFU", "memory full", "cost", "cheapest first", "fits no plan on v100x1x1"):
        assert word in table
    assert max(map(len, table.splitlines())) <= 120
    assert "cost" not in printed(ranked(options, None, None))


def test_json_says_the_same(options, clusters):
    tree = options_json(ranked(options, 1e9, read_prices("2", clusters)))
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
    first, second, last = tree["clusters"]
    assert first["rent"]["cost"] < second["rent"]["cost"]
    assert first["idle"] == first["devices"] - sum(stage["devices"] for stage in first["plan"]["stages"])
    assert 0 < first["memory_full"] < 1 and 0 < first["mfu"] < 1
    assert (last["plan"], "fits no plan" in last["why"]) == (None, True)


def test_the_catalogue_is_complete():
    stream = io.StringIO()
    print_catalogue(Console(file=stream, width=120))
    for name in (*kinds(), *networks()):
        assert f"\n{name} " in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 120
    tree = catalogue_json()
    assert json.loads(json.dumps(tree)) == tree
    assert (list(tree["kinds"]), list(tree["networks"])) == (list(kinds()), list(networks()))
    assert all("device.memory" in kind["sources"] for kind in tree["kinds"].values())
    assert all(len(link["bandwidth"]["source"]) > 5 for link in tree["networks"].values())
