"""What a GPU's compiler makes of documents that are kept apart, for an H100 that is not here."""

import re

import pytest

from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.compile import lower_step
from jhpt.training.setup import design_step, fitting_tokenizer
from tests.covers import quick_and_exhaustive

pytestmark = pytest.mark.deviceless

LENGTH, ROWS = 256, 8
"""Positions; sequences of a device.  On a single device blocks are in no loop."""
SMALL = {
    "model.num_layers": 3,
    "model.d_model": 128,
    "model.num_heads": 2,
    "model.d_ff": 256,
    "model.vocab_size": 512,
    "model.max_length": LENGTH,
    "data.sequence_length": LENGTH,
    "data.batch_size": 2 * ROWS,
    "parallel.data": 2,
    "data.tokenizer": "bytes",
    "parallel.micro_batches": 1,
}


def program(preset, packing):
    cluster = find_cluster("h100x2x1")
    config = load_config(preset, SMALL | {"data.packing": packing})
    where = compile_only_devices(cluster), compile_only_info(cluster)
    designed = design_step(config, plan_by_hand(config, 2), fitting_tokenizer(config), *where)
    assert designed.attention.implementation == "cudnn"
    return compiled_for(lower_step(designed), compiler_options("gpu", designed.plan))


@pytest.mark.parametrize("preset", quick_and_exhaustive(["gpt2-124m", "bert-base"], ["gpt2-124m"]))
def test_cudnn_reads_a_mask_that_is_never_stacked(preset):
    """One kernel in the loop over blocks for each pass, with a bias; memory grows by a few masks at most, where scores
    would take as many for every head and block."""
    stream, apart = (program(preset, packing) for packing in ("stream", "documents"))
    text = apart.as_text()
    kernels = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert sorted(kernels) == ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
    assert f"bf16[{ROWS},1,{LENGTH},{LENGTH}]" in text
    more = apart.memory_analysis().temp_size_in_bytes - stream.memory_analysis().temp_size_in_bytes
    assert more <= 4 * 2 * ROWS * LENGTH**2
