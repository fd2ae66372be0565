"""VGG as it is trained, in numbers: the table of the classic network, and plans of one program and of any stages."""

import pytest

import jhpt
from jhpt.core.cluster import Device
from jhpt.core.load import load_config
from jhpt.planner.api import prepare
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.networks import network_layers

ENDLESS = Device(name="endless", peak_flops={"bfloat16": 1.0}, memory=1.0, memory_bandwidth=1e300)
"""One FLOP a second, and memory that costs nothing."""

IMAGENET = {"model.image_size": 224, "model.num_classes": 1000}


def test_layers_are_those_of_the_classic_table():
    """But for the 24 columns that pad the head."""
    profile, table = analytic_profile(load_config("vgg16-cifar", IMAGENET), ENDLESS), network_layers("vgg16")
    assert profile.layers == tuple(layer.kind for layer in table)
    for layer in table[:-1]:
        kind = profile.kinds[layer.kind]
        assert kind.parameters == layer.parameters and kind.boundary_bytes == 2 * layer.outputs
        assert kind.seconds(1, 1)[0] == pytest.approx(2 * layer.macs)
        backward = 2 * layer.macs if layer is table[0] else 4 * layer.macs  # nothing reads an image's gradient
        assert kind.seconds(1, 1)[1] == pytest.approx(backward)
    assert profile.kinds["fc8"].parameters == table[-1].parameters + 24 * 4097
    assert profile.flops_per_sample == pytest.approx(2 * (3 * sum(x.macs for x in table) - table[0].macs))
    assert profile.sample == "an image of 224 x 224" and profile.sample_tokens is None


def test_one_program_has_one_stage_and_general_plans_any():
    task = prepare("vgg16-cifar", cluster="v100x1x4-10gbe", batch=256, micro_batches=1)
    assert task.request.max_stages == 1 and set(task.request.compression) == {None}
    plan = jhpt.plan("vgg16-cifar", cluster="v100x1x4-10gbe", batch=256, micro_batches=1)
    headline = str(plan).splitlines()[0]
    assert "samples/s per GPU, MFU" in headline and "causal" not in headline and "8 of 10" not in headline
    assert len(plan.stages) == 1 and plan.mfu is not None and plan.tokens_per_second is None
    general = jhpt.plan("vgg16-cifar", cluster="v100x1x4-10gbe", batch=512, micro_batches=8, space="general")
    sizes = [stage.devices for stage in general.stages]
    assert len(sizes) > 1 and len(set(sizes)) > 1
