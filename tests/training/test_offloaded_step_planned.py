"""What the planner says of plans with blocks on the host, against the step that is compiled for them (one H100)."""

import pytest

from jhpt.bench.memory.largest_model import largest_trainable
from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.core.load import load_config
from jhpt.planner.api import capped, prepare
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.compile import lower_step
from jhpt.training.setup import design_step, fitting_tokenizer
from tests.covers import quick_and_exhaustive

pytestmark = pytest.mark.deviceless

DEVICE, HOST = 24 * 2**30, 110 * 2**30


def compiled(config, plan):
    """Bytes of the step: (on the device, on the host)."""
    cluster = find_cluster("h100x1x1")
    devices, info = compile_only_devices(cluster), compile_only_info(cluster)
    design = design_step(config, plan, fitting_tokenizer(config), devices, info)
    analysis = compiled_for(lower_step(design), compiler_options("gpu", plan)).memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes, analysis.host_argument_size_in_bytes


def test_the_plan_for_a_model_larger_than_the_device():
    """gpt-6.7b on 24 GiB: the plan fits, and what it takes is what was said, within 5 %."""
    task = prepare("gpt-6.7b", cluster="h100x1x1", budget=DEVICE, batch=16)
    answer = task.solve()
    config = load_config("gpt-6.7b", {"data.batch_size": 16})
    device, host = compiled(config, answer.plan)
    (stage,) = answer.estimate.stages
    assert device < DEVICE and device == pytest.approx(stage.total_bytes, rel=0.05)
    assert host == pytest.approx(stage.total_host_bytes, rel=1e-3)


LARGEST = {
    "without": ((None,), {}),
    "without, rounded where used": ((None,), {"zero": 3}),
    "with moments alone": (("optimizer",), {}),
    "with": (("both",), {}),
    "with, updated in backward": (("both",), {"update_in_backward": True}),
}


@pytest.mark.parametrize("name", quick_and_exhaustive(LARGEST, ["without", "with, updated in backward"]))
def test_the_largest_models(name):
    """As large as said, within 5 %: billions of parameters on 24 and 110 GiB."""
    kinds, settings = LARGEST[name]
    largest = largest_trainable(capped(find_cluster("h100x1x1"), DEVICE, HOST), kinds, **settings)
    device, host = compiled(largest.config, largest.plan)
    (stage,) = largest.estimate.stages
    assert device == pytest.approx(stage.total_bytes, rel=0.05)
    assert host == pytest.approx(stage.total_host_bytes, rel=1e-3) and host <= HOST
    assert kinds == (None,) or device < DEVICE


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["float32", "bfloat16_stochastic"])
def test_the_largest_models_of_low_precision_state(weights):
    """They fit; XLA needs less than said, by 11 % at most."""
    settings = {"zero": 3, "optimizer": {"weights": weights, "moments": "int8"}}
    largest = largest_trainable(capped(find_cluster("h100x1x1"), DEVICE, HOST), (None,), **settings)
    device, _ = compiled(largest.config, largest.plan)
    (stage,) = largest.estimate.stages
    assert 0.89 * stage.total_bytes < device <= stage.total_bytes
