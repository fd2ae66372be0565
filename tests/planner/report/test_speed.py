"""Tokens per second and MFU: of all devices, by the model's own FLOP, against nominal peaks."""

from dataclasses import replace

import pytest

from jhpt.core.catalogue import cluster_named, device_named
from jhpt.core.config import Compression
from jhpt.core.load import load_config
from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.networks import network_profile
from jhpt.planner.report.answer import to_json
from jhpt.planner.report.speed import headline, peak_flops, seconds_range, speed
from jhpt.planner.report.words import duration
from tests.planner.report.test_explain import PIPELINE, SINGLE, answer_of, model_of


def named_device(cluster, **changes):
    """The cluster with another first device."""
    node = cluster.nodes[0]
    device = node.device.model_copy(update=changes)
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}), *cluster.nodes[1:])})


def test_a_step_by_hand():
    """8 sequences of 128 tokens in a step, on 6 A100 of which 4 work; FLOP per token 2 x 3 x (products of a token)."""
    answer = answer_of(PIPELINE)
    found, seconds = speed(answer), answer.estimate.seconds
    assert (found.seconds, found.devices) == (seconds, 6)
    assert found.samples == pytest.approx(8 / seconds)
    assert found.tokens == pytest.approx(8 * 128 / seconds)
    assert found.tokens_per_device == pytest.approx(8 * 128 / seconds / 6)
    config = load_config("gpt-tiny")
    flops = config.model.flops_per_token(128).total
    products = 6 * config.model.parameter_count().per_layer * 4  # two FLOP per parameter, three passes, four blocks
    assert flops > products
    assert found.mfu == pytest.approx(8 * 128 / seconds * flops / (6 * 312e12))


@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny"])
def test_the_head_counts_on_predicted_tokens_only(preset):
    config = load_config(preset)
    profile, length = analytic_profile(config, device_named("a100")), config.data.sequence_length
    share = config.model.predicted_tokens(length, config.data.mask_fraction) / length
    assert (share < 1) == config.model.masked
    assert profile.flops_per_sample == pytest.approx(
        length * config.model.flops_per_token(length, predicted_share=share).total
    )


def test_recomputation_is_no_use_of_the_device():
    plain, again = (speed(answer_of(SINGLE.model_copy(update={"recompute": on}))) for on in (False, True))
    assert again.mfu / plain.mfu == pytest.approx(plain.seconds / again.seconds)


def test_peaks_of_a_mixed_cluster_add_up():
    first, second = cluster_named("h100x8x2"), cluster_named("a100x4x3")
    mixed = first.model_copy(update={"nodes": (*first.nodes, *second.nodes)})
    assert peak_flops(mixed, "bfloat16") == pytest.approx(16 * 989.4e12 + 12 * 312e12)


def test_which_peak_counts():
    """The catalogue's, whatever was measured; a file's for other devices; none for a CPU."""
    cluster, measured = cluster_named("a100x2x1"), {"bfloat16": 200e12}
    assert peak_flops(named_device(cluster, peak_flops=measured), "bfloat16") == 2 * 312e12
    assert peak_flops(named_device(cluster, name="card", peak_flops=measured), "bfloat16") == 2 * 200e12
    assert peak_flops(named_device(cluster, name="card", peak_flops=measured), "float32") is None
    assert peak_flops(named_device(cluster, name="cpu", peak_flops=measured), "bfloat16") is None


def test_a_network_has_samples_only():
    cluster = cluster_named("a100x2x3")
    model = CostModel(network_profile("vgg16", cluster.nodes[0].device, "bfloat16"), cluster)
    layers = model.num_layers
    runs = (SINGLE.stages[0].chunks[0].runs[0].model_copy(update={"layers": layers, "tensor": 1}),)
    chunk = SINGLE.stages[0].chunks[0].model_copy(update={"runs": runs})
    stage = SINGLE.stages[0].model_copy(update={"chunks": (chunk,)})
    answer = answer_of(SINGLE.model_copy(update={"stages": (stage,), "zero": 0}), model=model)
    found = speed(answer)
    assert (found.tokens, found.tokens_per_device, found.mfu) == (None, None, None)
    assert "samples/s per GPU" in headline(answer) and "MFU" not in headline(answer)
    assert price(answer.plan, model).seconds == found.seconds


def test_the_first_line_says_what_the_json_says():
    answer = answer_of(SINGLE)
    tree, line = to_json(answer), headline(answer)
    assert f"{tree['tokens_per_second_per_device']:,.0f} tokens/s per GPU" in line
    assert f"MFU {100 * tree['mfu']:.1f} % (causal)" in line
    assert line.startswith("gpt-tiny on a100x2x3: ") and line.endswith(" per step")
    cpus = model_of()
    cpus = CostModel(cpus.profile, named_device(cpus.cluster, name="cpu"))
    assert "per device" in headline(answer_of(SINGLE, model=cpus))


@pytest.mark.parametrize(("kind", "most"), [("h100", 0.60), ("a100", 0.65)])
def test_no_datasheet_promises_more_than_training_reaches(kind, most):
    """The best published utilisations, causal convention, are below 0.60 on H100 and 0.65 on A100."""
    found = {
        preset: speed(prepare(preset, cluster=f"{kind}x8x1", batch=64).solve()).mfu
        for preset in ("gpt-13b", "gpt-6.7b")
    }
    assert all(0.35 < mfu < most for mfu in found.values()), found


def test_a_prediction_from_a_datasheet_has_a_range():
    answer = prepare("gpt-6.7b", cluster="h100x8x1", batch=64).solve()
    low, high = seconds_range(answer)
    assert 0.5 * answer.estimate.seconds < low < answer.estimate.seconds < high < 2 * answer.estimate.seconds
    assert f"(8 of 10 such runs: {duration(low)} to {duration(high)})" in headline(answer)
    assert to_json(answer)["seconds_range"] == [low, high]
    compressed = answer.plan.model_copy(update={"compression": Compression(bits=8)})
    assert seconds_range(replace(answer, plan=compressed)) is None
    profile = answer.model.profile
    timing = profile.kinds["block"].timings[0].model_copy(update={"repetitions": 5})
    block = profile.kinds["block"].model_copy(update={"timings": (timing,)})
    measured = profile.model_copy(update={"kinds": {**profile.kinds, "block": block}})
    assert seconds_range(replace(answer, model=CostModel(measured, answer.model.cluster))) is None
