"""Models larger than the GPU, compiled for one H100 that is not here: blocks on the host, and the device holds few.

GPT-1.5B at three depths and GPT-6.7B; five seconds each.
"""

from functools import cache

import pytest

from jhpt.core.catalogue import find_cluster
from jhpt.core.load import load_config
from jhpt.core.plan import plan_by_hand
from jhpt.core.shapes import parameter_count
from jhpt.measure.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.sharding.options import compiler_options
from jhpt.training.programs import train_program
from jhpt.training.setup import design_step, fitting_tokenizer

pytestmark = pytest.mark.deviceless

BATCH = 8


def one_h100():
    cluster = find_cluster("h100x8x1")
    return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"devices": 1}),)})


@cache
def memory(preset, layers):
    """(configuration, what the compiler says of the step's memory)."""
    options = {"data.batch_size": BATCH, "memory.recompute": "full", "memory.offload": "both"}
    options |= {"parallel.micro_batches": 1, "parallel.zero": 0}
    config, cluster = load_config(preset, options | {"model.num_layers": layers}), one_h100()
    plan = plan_by_hand(config, 1)
    design = design_step(
        config, plan, fitting_tokenizer(config), compile_only_devices(cluster), compile_only_info(cluster)
    )
    return config, compiled_for(train_program(design), compiler_options("gpu", plan)).memory_analysis()


def test_the_host_holds_four_numbers_of_a_parameter_once():
    """Weights, gradient and two moments, in place: 16 bytes, and what fills up rows."""
    config, found = memory("gpt2-1.5b", 48)
    count = parameter_count(config.model)
    assert found.host_argument_size_in_bytes == found.host_alias_size_in_bytes
    assert found.host_argument_size_in_bytes == pytest.approx(16 * count.per_layer * count.num_layers, rel=1e-3)
    assert found.host_temp_size_in_bytes == 0


def test_the_device_does_not_grow_with_the_blocks():
    """But for the input of each, which its backward pass starts from."""
    sizes = [memory("gpt2-1.5b", layers)[1].temp_size_in_bytes for layers in (12, 24, 48)]
    config, _ = memory("gpt2-1.5b", 48)
    kept = BATCH * config.data.sequence_length * config.model.d_model * 2
    assert sizes[1] - sizes[0] == 12 * kept and sizes[2] - sizes[1] == 24 * kept


def test_six_billion_parameters_fit_sixteen_gigabytes():
    """107 GB of state; with 16 bytes a parameter on the device, the rest of it would be 13 times too small."""
    config, found = memory("gpt-6.7b", 32)
    device = found.argument_size_in_bytes + found.temp_size_in_bytes
    assert parameter_count(config.model).total > 6.6e9
    assert device < 16 * 2**30 < found.host_argument_size_in_bytes
