"""What is asked and cannot be: the message names numbers, and the change it names is enough."""

import re

import numpy as np
import pytest

from jhpt.core.cluster import Cluster
from jhpt.core.errors import InputError
from jhpt.planner.api import prepare
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import Request, request
from jhpt.planner.search.solve import plan, search, solve
from tests.planner.cost.test_estimate import between_embedding_and_head, cluster, layer, model
from tests.planner.instances import random_cluster, random_profile

GIB = 2.0**30
BIG = between_embedding_and_head(*[layer(parameters=1 << 30, activation_bytes=GIB) for _ in range(2)])
"""Two blocks of 16 GiB of state each, and 1 GiB of activations a sample.  One SPMD program adds gradients up in
float32, 18 GiB, and holds the gradient of the block at work, 2 GiB."""


def refusal(profile, given: Cluster, asked: Request, space: str) -> str:
    with pytest.raises(InputError) as caught:
        solve(profile, given, asked, space)
    return str(caught.value)


def with_memory(given: Cluster, memory: float) -> Cluster:
    nodes = tuple(
        node.model_copy(update={"device": node.device.model_copy(update={"memory": memory})}) for node in given.nodes
    )
    return given.model_copy(update={"nodes": nodes})


def with_devices(given: Cluster, devices: int) -> Cluster:
    factor, rest = divmod(devices, given.num_devices)
    assert not rest
    nodes = tuple(node.model_copy(update={"count": node.count * factor}) for node in given.nodes)
    return given.model_copy(update={"nodes": nodes})


@pytest.mark.parametrize("space", ["spmd", "general"])
def test_numbers(space):
    message = refusal(BIG, cluster(1, memory=10 * GIB), request(1), space)
    assert message.splitlines()[0] == (
        "toy with batch 1 fits no plan on toy: 1 device of 10.0 GiB; weights and optimizer of 2.15 G parameters alone "
        "take 24.0 GiB, 12 bytes each"
    )


@pytest.mark.parametrize("space", ["spmd", "general"])
def test_memory_that_would_do(space):
    # Both blocks on the one device; with recomputation one block's GiB beside them, within 1 %.  A program for each
    # stage keeps 12 bytes, a copy of 2 and a gradient of 4 for each parameter.  One program may keep 12 bytes and a
    # gradient of 2 for each parameter, and of one block its gradient and half of its weights, rounded.
    given, needed = cluster(1, memory=10 * GIB), {"general": 24 + 4 + 8 + 1, "spmd": 24 + 4 + 1 + 2 + 1}[space]
    message = refusal(BIG, given, request(1), space)
    (enough,) = map(float, re.findall(r"it would fit with (\S+) GiB per device", message))
    assert needed <= enough <= needed * 1.011 + 0.05
    assert plan(BIG, with_memory(given, enough * GIB), batch=1, space=space).recompute


@pytest.mark.parametrize("space", ["spmd", "general"])
def test_devices_that_would_do(space):
    # One block with its activations fits: two nodes of one device.
    given = cluster(1, memory={"general": 20, "spmd": 22}[space] * GIB)
    message = refusal(BIG, given, request(1), space)
    (enough,) = map(int, re.findall(r"it would fit on (\d+) such devices", message))
    assert enough == 2
    assert len(plan(BIG, with_devices(given, enough), batch=1, space=space).stages) == 2


def test_no_number_of_devices_would_do():
    # A layer cannot be cut, and one sample's activations are larger than the device; with their gradient half as much
    # more, in half the width.
    profile = model(layer(activation_bytes=100 * GIB))
    message = refusal(profile, cluster(1, memory=GIB), request(1, recompute=(False,)), "spmd")
    assert "such devices" not in message
    assert "it would fit with 150." in message
    # However little there is: a budget in MiB that was meant in GiB.
    message = refusal(profile, cluster(1, memory=GIB / 1024), request(1, recompute=(False,)), "spmd")
    assert "it would fit with 150." in message and "no amount of memory" not in message
    profile = model(layer(activation_bytes=2.0**61))
    message = refusal(profile, cluster(1, memory=GIB), request(1, recompute=(False,)), "spmd")
    assert "no amount of memory or devices would do" in message


def test_changes_suffice():
    """Random models on devices that are too small: GiB instead of bytes, so that the message shows digits."""
    checked = 0
    for seed in range(6):
        rng = np.random.default_rng(5000 + seed)
        profile, given = random_profile(rng, 3), random_cluster(rng, 2)
        profile = profile.model_copy(
            update={
                "kinds": {
                    name: kind.model_copy(
                        update={
                            "parameters": kind.parameters * 2**27,
                            "tied_parameters": kind.tied_parameters * 2**27,
                            "activation_bytes": kind.activation_bytes * GIB,
                            "boundary_bytes": kind.boundary_bytes * GIB,
                            "replicated_bytes": kind.replicated_bytes * GIB,
                        }
                    )
                    for name, kind in profile.kinds.items()
                }
            }
        )
        given, asked = with_memory(given, 8 * GIB), request(2, zero=(0, 1))
        if search(asked, CostModel(profile, given), "spmd").plan is not None:
            continue
        message = refusal(profile, given, asked, "spmd")
        for enough in re.findall(r"with (\S+) GiB per device", message):
            # The message shows one decimal, to the nearest.
            grown = with_memory(given, (float(enough) + 0.05) * GIB)
            assert solve(profile, grown, asked, "spmd").plan.seconds > 0
            checked += 1
        for enough in re.findall(r"on (\d+) such devices", message):
            assert solve(profile, with_devices(given, int(enough)), asked, "spmd").plan.seconds > 0
            checked += 1
    assert checked > 2


def test_memory_is_rounded_up():
    # 1.04 GiB are needed; 1.0 GiB will not do.
    profile, given = model(layer(activation_bytes=1.04 * GIB)), cluster(1, memory=0.5 * GIB)
    asked = request(1, recompute=(False,))
    (enough,) = re.findall(r"with (\S+) GiB", refusal(profile, given, asked, "spmd"))
    assert search(asked, CostModel(profile, with_memory(given, float(enough) * GIB)), "spmd").plan is not None


def test_the_least_number_of_devices():
    # Three blocks of 18 GiB, and 2 GiB of gradient, on devices of 21 GiB: three nodes.
    profile = between_embedding_and_head(*[layer(parameters=1 << 30) for _ in range(3)])
    message = refusal(profile, cluster(1, memory=21 * GIB), request(1), "spmd")
    assert re.findall(r"on (\d+) such devices", message) == ["3"]


@pytest.mark.parametrize(
    ("batch", "micro_batches", "message"),
    [
        (0, None, "batch=0: a step needs at least one sample"),
        (-4, 2, "batch=-4"),
        (12, 5, "batch=12 is not divisible by micro_batches=5; use 1, 2, 3, 4, 6 or 12"),
        (12, (3, 8), "batch=12 is not divisible by micro_batches=8"),
        (12, 0, "micro_batches=0 does not divide"),
        (12, -3, "micro_batches=-3 does not divide"),
        (12, 24, "is not divisible by micro_batches=24"),
    ],
)
def test_request_errors(batch, micro_batches, message):
    with pytest.raises(InputError, match=re.escape(message)):
        request(batch, micro_batches)


def test_request_defaults():
    asked = request(12)
    assert asked.micro_batches == (1, 2, 3, 4, 6, 12)
    assert (asked.zero, asked.recompute) == ((0, 1, 2, 3), (False, True))
    assert request(12, 4).micro_batches == (4,)
    assert request(12, [6, 2]).micro_batches == (6, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero": (4,)},
        {"zero": ()},
        {"recompute": ()},
        {"micro_batches": ()},
        {"schedules": ("1f1",)},
        {"schedules": ()},
    ],
)
def test_request_refuses_what_it_does_not_know(wrong):
    with pytest.raises(InputError):
        request(**({"batch": 4} | wrong))


@pytest.mark.parametrize(
    ("settings", "how", "said"),
    [
        ({"memory.offload": "both"}, {"space": "general"}, "within one SPMD program only: memory.offload"),
        ({"model.matmul_dtype": "float8"}, {"cluster": "a100x8x1"}, "NVIDIA A100.* has 8.0"),
        ({"model.matmul_dtype": "float8"}, {"cluster": "v100x8x1"}, "V100.* has 7.0"),
        ({}, {"budget": "24"}, "24 bytes, in which nothing fits; write the unit"),
        ({"memory.budget_bytes": 24}, {}, "24 bytes, in which nothing fits; write the unit"),
        ({"memory.recompute": "full,qkv"}, {}, "'full' cannot stand beside names"),
        ({"memory.recompute": []}, {}, "names nothing; write full"),
        ({"memory.recompute": "qkv,qkv"}, {}, "has a name twice"),
        ({"memory.recompute": "residual_in"}, {}, "which is always saved"),
    ],
)
def test_settings_that_no_plan_follows(settings, how, said):
    with pytest.raises(InputError, match=said):
        prepare("gpt2-1.5b", **({"cluster": "h100x1x1"} | how), overrides=settings)


def test_what_would_fit_fits():
    """What a refusal names is enough, reserve and all."""
    settings = {"memory.offload": "off", "memory.recompute": "full", "data.batch_size": 8}
    with pytest.raises(InputError) as caught:
        prepare("gpt2-1.5b", cluster="h100x1x1", budget="16GiB", overrides=settings).solve()
    enough = re.search(r"it would fit with ([\d.]+ GiB) per device", str(caught.value))[1]
    assert prepare("gpt2-1.5b", cluster="h100x1x1", budget=enough, overrides=settings).solve().estimate.fits
