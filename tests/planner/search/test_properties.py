"""What must hold of every answer: more is never slower, names and units do not matter, files change nothing."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.cluster import Cluster, Link, load_cluster
from jhpt.core.plan import Plan
from jhpt.core.profile import ModelProfile, load_profile
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Incumbent, Request, request
from jhpt.planner.search.solve import search
from tests.planner.instances import random_cluster, random_profile

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8)
SPACES = ("spmd", "general")


@st.composite
def instances(draw) -> tuple[ModelProfile, Cluster, Request, str]:
    """Up to 5 layers on 4 devices, some decisions open."""
    space = draw(st.sampled_from(SPACES))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    profile = random_profile(rng, 5)
    cluster = random_cluster(rng, 4, mixed=space == "general" and draw(st.booleans()))
    asked = request(
        draw(st.sampled_from([1, 4, 6])),
        zero=draw(st.sampled_from([(0,), (0, 1), (0, 1, 3)])),
        recompute=draw(st.sampled_from([(False,), (False, True)])),
    )
    return profile, cluster, asked, space


def found(profile: ModelProfile, cluster: Cluster, asked: Request, space: str) -> Incumbent:
    return search(asked, CostModel(profile, cluster), space)


def of_every_node(cluster: Cluster, change) -> Cluster:
    return cluster.model_copy(update={"nodes": tuple(map(change, cluster.nodes))})


def more_memory(cluster: Cluster, factor: float) -> Cluster:
    def grown(node):
        return node.model_copy(
            update={"device": node.device.model_copy(update={"memory": node.device.memory * factor})}
        )

    return of_every_node(cluster, grown)


def scaled(link: Link, bandwidth: float = 1.0, latency: float = 1.0) -> Link:
    return link.model_copy(update={"bandwidth": link.bandwidth * bandwidth, "latency": link.latency * latency})


def more_bandwidth_inside(cluster: Cluster, factor: float) -> Cluster:
    return of_every_node(cluster, lambda node: node.model_copy(update={"inside": scaled(node.inside, factor)}))


def more_bandwidth_between(cluster: Cluster, factor: float) -> Cluster:
    return cluster.model_copy(update={"network": scaled(cluster.network, factor)})


def more_nodes(cluster: Cluster, factor: float) -> Cluster:
    """Behind the others: those keep their places."""
    *front, last = cluster.nodes
    return cluster.model_copy(update={"nodes": (*front, last.model_copy(update={"count": last.count + 1}))})


def untied(profile: ModelProfile) -> ModelProfile:
    kinds = {name: kind.model_copy(update={"tied_parameters": 0}) for name, kind in profile.kinds.items()}
    return profile.model_copy(update={"kinds": kinds})


@pytest.mark.parametrize("more", [more_memory, more_bandwidth_inside, more_bandwidth_between, more_nodes])
@PROPERTY
@given(instances(), st.floats(1, 20))
def test_more_is_never_slower(more, instance, factor):
    profile, cluster, asked, space = instance
    if more is more_nodes:
        # The exchange of a tied table is priced over the network as soon as there are several nodes.
        profile = untied(profile)
    # Interleaving takes the balanced chunks, which are not always the fastest ones.
    asked = Request(
        batch=asked.batch,
        micro_batches=asked.micro_batches,
        zero=asked.zero,
        recompute=asked.recompute,
        schedules=("eager-1f1b", "gpipe"),
    )
    before = found(profile, cluster, asked, space)
    after = found(profile, more(cluster, factor), asked, space)
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert after.lower_bound <= before.lower_bound * (1 + 1e-9)


@PROPERTY
@given(instances())
def test_the_same_again(instance):
    one, two = found(*instance), found(*instance)
    assert (one.seconds, one.lower_bound, one.plan) == (two.seconds, two.lower_bound, two.plan)


@PROPERTY
@given(instances())
def test_names_do_not_matter(instance):
    profile, cluster, asked, space = instance
    names = {name: f"{index:03} {name[::-1]}" for index, name in enumerate(reversed(profile.kinds))}
    renamed = profile.model_copy(
        update={
            "name": "another",
            "device": "another",
            "kinds": {names[name]: profile.kinds[name] for name in reversed(profile.kinds)},
            "layers": tuple(names[name] for name in profile.layers),
        }
    )

    def device_renamed(node):
        return node.model_copy(update={"device": node.device.model_copy(update={"name": "another"})})

    elsewhere = of_every_node(cluster, device_renamed).model_copy(update={"name": "elsewhere"})
    one, two = found(profile, cluster, asked, space), found(renamed, elsewhere, asked, space)
    assert one.seconds == two.seconds
    if one.plan is not None and two.plan is not None:
        assert two.plan == one.plan.model_copy(update={"model": "another", "cluster": "elsewhere"})


@PROPERTY
@given(instances(), st.sampled_from([2.0**-7, 2.0**5, 0.3, 11.0]))
def test_a_slower_clock(instance, factor):
    """All seconds times x, all rates divided by x: the answer times x."""
    profile, cluster, asked, space = instance

    def slower(timing):
        times = {name: tuple(factor * x for x in getattr(timing, name)) for name in ("forward", "backward")}
        return timing.model_copy(update=times)

    kinds = {
        name: kind.model_copy(update={"timings": tuple(map(slower, kind.timings))})
        for name, kind in profile.kinds.items()
    }
    late = profile.model_copy(update={"kinds": kinds, "update_seconds": profile.update_seconds * factor})
    link = functools.partial(scaled, bandwidth=1 / factor, latency=factor)

    def slow_node(node):
        peak = {dtype: rate / factor for dtype, rate in node.device.peak_flops.items()}
        return node.model_copy(
            update={"inside": link(node.inside), "device": node.device.model_copy(update={"peak_flops": peak})}
        )

    slow = of_every_node(cluster, slow_node).model_copy(update={"network": link(cluster.network)})
    one, two = found(profile, cluster, asked, space), found(late, slow, asked, space)
    assert two.seconds == pytest.approx(one.seconds * factor, rel=1e-9)
    assert two.lower_bound == pytest.approx(one.lower_bound * factor, rel=1e-9)


@PROPERTY
@given(instances())
def test_equal_kinds_may_be_one(instance):
    """A model that repeats a kind costs what one costs that has a kind for every layer."""
    profile, cluster, asked, space = instance
    kind = profile.kinds[profile.layers[0]].model_copy(update={"tied_parameters": 0})
    count = profile.num_layers
    one = profile.model_copy(update={"kinds": {"same": kind}, "layers": ("same",) * count})
    many = profile.model_copy(
        update={"kinds": {f"{i}": kind for i in range(count)}, "layers": tuple(f"{i}" for i in range(count))}
    )
    assert found(one, cluster, asked, space).plan == found(many, cluster, asked, space).plan


@PROPERTY
@given(instances())
def test_files_change_nothing(tmp_path_factory, instance):
    profile, cluster, asked, space = instance
    folder = tmp_path_factory.mktemp("files")
    profile.save(folder / "profile.json")
    cluster.save(folder / "cluster.json")
    assert load_profile(folder / "profile.json") == profile
    assert load_cluster(folder / "cluster.json") == cluster
    chosen = found(profile, cluster, asked, space).plan
    if chosen is not None:
        chosen = chosen.model_copy(update={"seconds": 1 / 3, "lower_bound": 1e-17})
        chosen.save(folder / "plan.json")
        assert Plan.load(folder / "plan.json") == chosen
        assert evaluate(Plan.load(folder / "plan.json"), profile, cluster) is not None
