"""Compressed gradients in the planner: what they take, what they spare, and where there are none."""

from dataclasses import replace

import pytest

from jhpt.core.catalogue import find_cluster
from jhpt.core.compression import gradient_bytes
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.planner.compression import gradient_seconds, residual_bytes
from jhpt.planner.costs import CostModel
from jhpt.planner.estimate import evaluate
from jhpt.planner.front import prepare
from jhpt.planner.request import request
from jhpt.planner.solve import solve

QUANTIZE = GradientCompression(kind="quantize")
TOPK = GradientCompression(kind="topk", momentum=0.9)
FAST = find_cluster("a100x8x4")
LINK = FAST.network.model_copy(update={"bandwidth": 1.25e9, "ports": 1})
NODE = FAST.nodes[0].model_copy(update={"devices": 1, "count": 32})
SLOW = FAST.model_copy(update={"network": LINK, "nodes": (NODE,)})
"""A device in a node, 10 Gbit/s between them."""


def task(kind="off"):
    return prepare("gpt2-350m", cluster=SLOW, overrides={"parallel.gradient_compression.kind": kind})


def by_data(asked, how):
    """All devices take samples of their own."""
    runs = (Run(layers=asked.profile.num_layers, tensor=1),)
    stage = Stage(device=0, devices=32, chunks=(Chunk(first=0, runs=runs),))
    return Plan(model="any", cluster="any", batch=32, micro_batches=1, stages=(stage,), gradient_compression=how)


def test_a_plan_carries_the_setting_and_is_what_its_estimate_says():
    found = task("quantize").solve()
    profile, cluster = found.model.profile, found.model.cluster
    for plan in (found.plan, *found.alternatives):
        assert plan.gradient_compression == QUANTIZE and plan.zero < 3
        assert evaluate(plan, profile, cluster).seconds == pytest.approx(plan.seconds)


def test_devices_of_a_node_share_its_port():
    """A ring passes every port once, codes are sent from every device to every other: eight times the bytes."""
    asked, network = task(), FAST.model_copy(update={"network": LINK})
    plain, found = (evaluate(by_data(asked, how), asked.profile, network) for how in (PLAIN_GRADIENTS, QUANTIZE))
    assert found.seconds > plain.seconds


def test_on_a_slow_network_a_step_is_shorter():
    asked = task()
    plain, found = (evaluate(by_data(asked, how), asked.profile, SLOW) for how in (PLAIN_GRADIENTS, QUANTIZE))
    exposed = [estimate.stages[0].seconds["gradients exposed"] for estimate in (plain, found)]
    assert 0.4 * exposed[0] < exposed[1] < 0.7 * exposed[0]  # 8 bits for 16, and ranges
    assert found.seconds < plain.seconds


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("how", [QUANTIZE, TOPK], ids=lambda how: how.kind)
def test_seconds_are_those_of_bytes_and_kernels(how, shares):
    """Of gradients so large that latency is nothing."""
    asked, numbers = task(), 1 << 30
    group = CostModel(asked.profile, SLOW).places.at(0, SLOW.num_devices).data_group(1)
    device = SLOW.nodes[0].device
    sent = gradient_bytes(32, how, numbers, shares=shares)
    codes = sent * 32 / 31
    once = codes if shares else codes / 2
    moved = {"quantize": 24 * numbers + 4 * once, "topk": 16 * numbers + 2 * codes}[how.kind]
    by_hand = sent / LINK.bandwidth + moved / device.memory_bandwidth
    assert gradient_seconds(group, how, numbers, device, shares=shares) == pytest.approx(by_hand, rel=1e-3)
    assert gradient_seconds(replace(group, size=1), how, numbers, device) == 0


def test_what_is_left_takes_memory():
    """A float32 of every parameter on a rank, and with momentum another."""
    asked = task()

    def held(how):
        return evaluate(by_data(asked, how), asked.profile, SLOW).stages[0].bytes["optimizer"]

    parameters = sum(asked.profile.kinds[layer].parameters for layer in asked.profile.layers)
    assert residual_bytes(PLAIN_GRADIENTS) == 0
    assert held(QUANTIZE) - held(PLAIN_GRADIENTS) == pytest.approx(4 * parameters)
    assert held(TOPK) - held(PLAIN_GRADIENTS) == pytest.approx(8 * parameters)


def test_refusals():
    with pytest.raises(InputError, match="use zero=1"):
        request(8, zero=(3,), gradient_compression=QUANTIZE)
    asked = task("quantize")
    with pytest.raises(InputError, match="use space=spmd"):
        solve(asked.profile, asked.cluster, asked.asked, "general")
