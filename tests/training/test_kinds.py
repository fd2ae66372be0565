"""A cluster of several kinds of devices: each has its own seconds, layers go by speed, and the plan trains."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jhpt
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training import auto, kinds, processes
from jhpt.training.kinds import device_here, named_by_driver, profiles_by_kind
from tests.conftest import tiny_overrides

MIXED = """
network: {bandwidth: 200MB/s, latency: 1us}
host: 10GB/s
host_memory: 10GB
inside: 10GB/s
nodes:
  - {devices: 4, device: {name: cpu, peak_flops: {fp32: 2e9}, memory: 1GB, memory_bandwidth: 10GB/s, efficiency: null}}
  - {devices: 4, device: {name: cpu, peak_flops: {fp32: 7e8}, memory: 1GB, memory_bandwidth: 10GB/s, efficiency: null}}
"""
"""Four devices, and four that are a third as fast."""

SETTINGS = {
    "model.num_layers": 2,
    "train.steps": 2,
    "data.validation_fraction": 0.0,
    "checkpoint.every": 100,
    "optimizer.schedule": "constant",
}
AUTO = {"parallel.auto": True, "parallel.space": "general"}


@dataclass(frozen=True, eq=False)
class NamedDevice:
    """What is asked of a device of jax."""

    process_index: int = 0
    device_kind: str = "cpu"


@pytest.fixture
def mixed(tmp_path):
    """The file of a mixed cluster."""
    file = tmp_path / "mixed.yaml"
    file.write_text(MIXED)
    return str(file)


@pytest.fixture
def unmeasured(monkeypatch):
    """The datasheet of the first device in place of a measurement."""

    def profile(config, grid):
        device = find_cluster(config.parallel.cluster).nodes[0].device
        return analytic_profile(config, device, "float32"), None, False

    monkeypatch.setattr(auto, "cached_profile", profile)


def test_a_mixed_cluster_is_planned_by_speed_and_trains_like_one_device(corpus, mixed, unmeasured, tmp_path):
    """On a fast network by samples, on a slow one by layers."""
    settings = tiny_overrides(corpus) | SETTINGS | {"model.num_layers": 4}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings | {"parallel.data": 1})
    for network in ("200MB/s", "40MB/s"):
        Path(mixed).write_text(MIXED.replace("200MB/s", network))
        out = tmp_path / network.partition("/")[0]
        run = jhpt.train("gpt-tiny", out=out, overrides=settings | AUTO | {"parallel.cluster": mixed})
        plan = Plan.load(run.run_dir / "plan.json")
        assert (plan.space, plan.origin, plan.device) == ("general", "auto", None)
        if network == "200MB/s":
            samples = plan.stages[0].samples
            assert plan.devices == 8 and samples[0] > samples[-1]
        else:
            layers = {stage.device < 4: len(stage.chunks[0].tensor) for stage in plan.stages}
            assert len(plan.stages) == 2 and layers[True] > layers[False]
        assert run.losses == pytest.approx(one.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel.space": "spmd"}, "parallel.space=general"),
        ({"memory.offload": "both"}, "memory.offload"),
        ({"optimizer.clip": "layer"}, "optimizer.clip=global"),
        ({"memory.recompute": "qkv"}, "memory.recompute"),
        ({"parallel.gradient_compression": "quantize"}, "parallel.gradient_compression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_programs_of_stages_cannot_run_is_refused(tiny, mixed, unmeasured, tmp_path, settings, words):
    config = tiny(**SETTINGS | AUTO | {"parallel.cluster": mixed} | settings)
    with pytest.raises(InputError, match=words):
        jhpt.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_kind_has_the_profile_that_its_own_process_measured(tiny, mixed, monkeypatch):
    """Two processes of four devices, each of one kind; the driver calls all of them cpu."""
    cluster = named_by_driver(find_cluster(mixed))
    fast, slow = (node.device for node in cluster.nodes)
    profiles = [analytic_profile(tiny(), device, "float32") for device in (fast, slow)]
    devices = [replace(NamedDevice(), process_index=number // 4) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[4:])
    monkeypatch.setattr(kinds, "texts_of_all", lambda mine: [profiles[0].model_dump_json(), mine])
    assert device_here(cluster) == slow
    profile, others = profiles_by_kind(profiles[1], cluster)
    assert profile == profiles[0] and others == {slow.rates: profiles[1]}


def test_texts_of_all_processes_keep_their_lengths(monkeypatch):
    def gathered(mine):
        if np.ndim(mine) == 0:
            return np.array([mine, 6])
        return np.stack([mine, np.frombuffer("zwölf".encode().ljust(len(mine), b"-"), np.uint8)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gathered", gathered)
    assert processes.texts_of_all("a longer text") == ["a longer text", "zwölf"]
    assert processes.texts_of_all("one") == ["one", "zwölf"]
