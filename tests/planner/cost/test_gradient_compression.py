"""Compressed gradients in the planner: what they take, what they spare, and where there are none."""

from dataclasses import replace

import pytest

from jhpt.core.cluster import Link
from jhpt.core.cluster_file import find_cluster
from jhpt.core.compression import gradient_bytes
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.planner.api import prepare
from jhpt.planner.cost.communication import all_reduce, gradient_kernel_seconds, gradient_seconds, residual_bytes
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.cost.model import CostModel
from jhpt.planner.report.alternatives import changed
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve

QUANTIZE = GradientCompression(kind="quantize")
TOPK = GradientCompression(kind="topk", momentum=0.9)
FAST = find_cluster("a100x8x4")
LINK = Link(bandwidth=1.25e9, latency=FAST.network.latency)
NODE = FAST.nodes[0].model_copy(update={"devices": 1, "count": 32})
SLOW = FAST.model_copy(update={"network": LINK, "nodes": (NODE,)})
"""A device in a node, 10 Gbit/s between them."""


def task(kind="off", **options):
    overrides = {"parallel.gradient_compression.kind": kind}
    return prepare("gpt2-350m", cluster=SLOW, overrides=overrides, **options)


def by_data(asked, how):
    """All devices take samples of their own."""
    runs = (Run(layers=asked.profile.num_layers, tensor=1),)
    stage = Stage(device=0, devices=32, chunks=(Chunk(first=0, runs=runs),))
    return Plan(model="any", cluster="any", batch=32, micro_batches=1, stages=(stage,), gradient_compression=how)


def test_a_plan_carries_the_setting_and_is_what_its_estimate_says():
    found = task("quantize", micro_batches=2).solve()
    profile, cluster = found.model.profile, found.model.cluster
    for plan in (found.plan, *found.alternatives):
        assert plan.gradient_compression == QUANTIZE and plan.zero < 3
        assert evaluate(plan, profile, cluster).seconds == pytest.approx(plan.seconds)


def test_devices_of_a_node_share_its_port():
    """Four nodes of eight devices.  Rings of sums and gathers pass each port with 31 parts of 32; of codes that are
    dealt, eight devices send 24 parts of 32 each."""
    asked, network, numbers = task(), FAST.model_copy(update={"network": LINK}), 1 << 30
    group = CostModel(asked.profile, network).places.at(0, 32).data_group(1)
    plain = all_reduce(group, 2.0 * numbers)
    assert plain == pytest.approx(2 * 31 / 32 * 2 * numbers / LINK.bandwidth, rel=0.02)
    codes = (8 * 24 / 32 + 31 / 32) * numbers * (1 + 2 / 128)
    assert gradient_seconds(group, QUANTIZE, numbers) == pytest.approx(codes / LINK.bandwidth, rel=0.02)
    plain, found = (evaluate(by_data(asked, how), asked.profile, network) for how in (PLAIN_GRADIENTS, QUANTIZE))
    assert found.seconds > plain.seconds


def test_on_a_slow_network_a_step_is_shorter():
    asked = task()
    plain, found = (evaluate(by_data(asked, how), asked.profile, SLOW) for how in (PLAIN_GRADIENTS, QUANTIZE))
    exposed = [estimate.stages[0].seconds["gradients exposed"] for estimate in (plain, found)]
    assert 0.4 * exposed[0] < exposed[1] < 0.7 * exposed[0]  # 8 bits for 16, and ranges
    assert found.seconds < plain.seconds


WAYS = {
    "two steps": (32, QUANTIZE, False),
    "gathered": (4, QUANTIZE.model_copy(update={"bits": 4}), False),
    "ZeRO": (32, QUANTIZE, True),
    "top-k": (4, TOPK.model_copy(update={"momentum": 0.0}), False),
    "top-k, momentum": (32, TOPK, False),
    "top-k, ZeRO": (32, TOPK, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_wire_seconds_are_those_of_the_bytes(way):
    """Of gradients so large that latency is nothing."""
    ranks, how, shares = WAYS[way]
    asked, numbers = task(), 1 << 30
    group = CostModel(asked.profile, SLOW).places.at(0, ranks).data_group(1)
    sent = gradient_bytes(ranks, how, numbers, shares=shares)
    seconds = gradient_seconds(group, how, numbers, shares=shares)
    assert seconds == pytest.approx(sent / LINK.bandwidth, rel=1e-3)
    assert gradient_seconds(replace(group, size=1), how, numbers) == 0


@pytest.mark.parametrize("way", WAYS)
def test_kernels_move_what_they_read_and_write(way):
    """Pass by pass: float32 numbers in, codes and numbers out."""
    ranks, how, shares = WAYS[way]
    device, n = SLOW.nodes[0].device, 1 << 30
    part = n // ranks
    whole = gradient_bytes(ranks, how, n, shares=shares) * ranks / (ranks - 1)
    if how.kind == "topk":
        packed = whole if shares else whole / ranks
        passes = {
            "velocity": 3 * n * bool(how.momentum),  # itself, gradient, sum
            "select": 3 * n,  # gradient, residual, residual
            "sum": part if shares else n,
        }
        codes = packed + 2 * whole
    else:
        two_steps = way == "two steps"
        packed = whole / 2 if two_steps else whole if shares else whole / ranks
        passes = {
            "add": 3 * n,
            "quantize": n,
            "decode": n,
            "residual": 3 * n,
            "sum": part if two_steps or shares else n,
            "quantize, decode, error, into the residual": (1 + 1 + 3 + 1) * part * two_steps,
            "decode all": n * two_steps,
        }
        codes = 2 * packed + (2 * packed if two_steps else whole)
    expected = (4 * sum(passes.values()) + codes) / device.stream_rate
    assert gradient_kernel_seconds(ranks, how, n, device, shares=shares) == pytest.approx(expected, rel=1e-6)
    assert gradient_kernel_seconds(1, how, n, device) == 0


def test_kernels_run_beside_nothing():
    """They count with the update, whatever the network hides."""
    asked = task()
    plans = [by_data(asked, how) for how in (PLAIN_GRADIENTS, QUANTIZE)]
    plain, found = (evaluate(plan, asked.profile, SLOW).stages[0].seconds["update"] for plan in plans)
    device = SLOW.nodes[0].device
    each = [asked.profile.kinds[layer].parameters for layer in asked.profile.layers]
    kernels = sum(gradient_kernel_seconds(32, QUANTIZE, numbers, device) for numbers in each)
    assert found - plain == pytest.approx(kernels)


def test_plans_say_what_they_were_priced_with():
    asked = task("quantize", micro_batches=2)
    answer = asked.solve()
    for baseline in baselines(asked.request, answer.model):
        assert baseline.plan.gradient_compression == QUANTIZE
        seconds = evaluate(baseline.plan, answer.model.profile, answer.model.cluster).seconds
        assert seconds == pytest.approx(baseline.seconds)
    assert "gradients in 8 bits" in shape_text(answer.plan)
    options = {"parallel.gradient_compression.kind": "quantize"}
    answer = prepare("gpt2-124m", cluster=SLOW, micro_batches=1, overrides=options).solve()
    (plain,) = (each for each in changed(answer) if each.name == "no gradient compression")
    assert (
        plain.seconds == evaluate(plain.plan, answer.model.profile, answer.model.cluster).seconds > answer.plan.seconds
    )


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
    with pytest.raises(InputError, match="set parallel"):
        solve(asked.profile, asked.cluster, asked.request, "general")
