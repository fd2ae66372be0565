"""What the planner chooses for random machines, the runtime executes: gradients equal one device's."""

import numpy as np
import pytest

from benchmarks.planner.instances import random_cluster
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.profile import ModelProfile
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.covers import quick_and_exhaustive
from tests.sharding.test_parity import BATCH, MODELS, check_gradients, setup_of

__all__ = ["setup_of"]

pytestmark = pytest.mark.usefixtures("strict")

PLANS = 50
BLOCKS = 4


def drawn_profile(rng, profile: ModelProfile) -> ModelProfile:
    """The same layers in random time, of random sizes: what is best differs from draw to draw."""
    kinds = {}
    for name, kind in profile.kinds.items():
        faster, larger = 10 ** rng.uniform(-1, 1, 2)
        timings = tuple(
            timing.model_copy(
                update={
                    "forward": tuple(faster * seconds for seconds in timing.forward),
                    "backward": tuple(faster * seconds for seconds in timing.backward),
                }
            )
            for timing in kind.timings
        )
        kinds[name] = kind.model_copy(update={"timings": timings, "parameters": int(larger * kind.parameters) + 1})
    return profile.model_copy(update={"kinds": kinds})


def drawn_plan(seed: int, config):
    """The best plan of a random problem, for as many of eight devices as it likes; drawn again where nothing fits."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        try:
            return solve(*drawn_problem(rng, config)).plan
        except InputError:
            continue
    raise AssertionError(f"ten problems of seed {seed} in which nothing fits: the generator draws them too tight")


def drawn_problem(rng, config):
    """Model, cluster and request of random sizes: fast and slow links, wide and narrow layers."""
    device = Device(name="toy", peak_flops={"float32": 1e9}, memory=1e9, memory_bandwidth=1e9)
    cluster = random_cluster(rng, 8, min_devices=8)
    scale = 10 ** rng.uniform(5, 7)  # the generator's links carry a byte a second
    nodes = tuple(
        node.model_copy(
            update={
                "device": device,
                "inside": node.inside.model_copy(update={"bandwidth": scale * node.inside.bandwidth, "latency": 1e-5}),
            }
        )
        for node in cluster.nodes
    )
    network = cluster.network.model_copy(update={"bandwidth": scale * cluster.network.bandwidth, "latency": 1e-5})
    cluster = cluster.model_copy(update={"nodes": nodes, "network": network})
    profile = drawn_profile(rng, analytic_profile(config, device, "float32"))
    requested = request(
        BATCH,
        tuple(rng.choice([2, 4, 8, 16], 2, replace=False).tolist()),
        zero=tuple(rng.choice([0, 1, 3], 2, replace=False).tolist()),
        recompute=(bool(rng.integers(2)),),
        schedules=tuple(rng.choice(["gpipe", "1f1b", "eager-1f1b", "interleaved"], 2, replace=False).tolist()),
    )
    return profile, cluster, requested


def check(setup_of, seed):
    name = list(MODELS)[seed % len(MODELS)]
    plan = drawn_plan(seed, setup_of(name, BLOCKS, unrolled=99).config)
    check_gradients(setup_of, name, BLOCKS, 99 * (seed % 2), plan)


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(3), [1]))
def test_planned_gradients_equal_one_device(setup_of, seed):
    check(setup_of, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(PLANS))
def test_planned_gradients_equal_one_device_everywhere(setup_of, seed):
    check(setup_of, seed)
