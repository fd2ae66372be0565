"""What a GPU's compiler makes of products in 8 bits: whole steps, for H100 that are not here."""

import re
from collections import Counter

import pytest

from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.compile import lower_step
from jhpt.training.setup import design_step, fitting_tokenizer
from tests.covers import quick_and_exhaustive

pytestmark = pytest.mark.deviceless

SMALL = {
    "model.num_layers": 2,
    "model.max_length": 256,
    "data.sequence_length": 256,
    "data.batch_size": 8,
    "parallel.micro_batches": 1,
}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Where there is a GPU the compiler times both; without one it takes Triton's kernels unless told not to."""

CASES = {
    "gpt": ("gpt2-124m", 2, {"parallel.data": 2}),
    "gated": ("llama-8b", 2, {"parallel.data": 2, "model.d_model": 512, "model.num_heads": 4, "model.num_kv_heads": 2}),
    "bert": ("bert-base", 2, {"parallel.data": 2}),
    "sequence": ("gpt2-124m", 2, {"parallel.tensor": 2, "parallel.sequence": True}),
    "offloaded": ("gpt2-124m", 1, {"memory.offload": "both", "memory.recompute": "full"}),
}


def design(cluster, preset, devices, changes):
    whole = find_cluster(cluster)
    node = whole.model_copy(update={"nodes": (whole.nodes[0].model_copy(update={"devices": devices}),)})
    config = load_config(preset, SMALL | {"model.matmul_dtype": "float8"} | changes)
    where = compile_only_devices(node), compile_only_info(node)
    return design_step(config, plan_by_hand(config, devices), fitting_tokenizer(config), *where)


def products(designed, **options):
    """How many there are in the step, by operands' types or library call."""
    text = compiled_for(lower_step(designed), compiler_options("gpu", designed.plan) | options).as_text()
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    inside = (" x ".join(types[name] for name in dot) for dot in re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", text))
    return Counter(inside) + Counter(re.findall(r'custom_call_target="(__cublas[^"]*)"', text))


@pytest.mark.parametrize("name", quick_and_exhaustive(CASES, ["gated", "offloaded"]))
def test_products_and_gradients_of_blocks_are_in_8_bits(name):
    """In the loop over blocks; what is computed again for a backward pass comes on top.  Offloaded, the last block of a
    pass is in another loop."""
    counts = products(design("h100x8x1", *CASES[name]))
    loops, again = (2, 3) if name == "offloaded" else (1, 0)
    assert counts["f8e4m3fn x f8e4m3fn"] == loops * (4 + again)
    assert counts["f8e5m2 x f8e4m3fn"] == counts["f8e4m3fn x f8e5m2"] == loops * 4
    assert set(counts) == {"f8e4m3fn x f8e4m3fn", "f8e5m2 x f8e4m3fn", "f8e4m3fn x f8e5m2", "bf16 x bf16"}


@pytest.mark.parametrize("name", quick_and_exhaustive(["gpt", "sequence"], ["sequence"]))
def test_the_library_takes_them_with_their_scales(name):
    counts = products(design("h100x8x1", *CASES[name]), **CUBLAS)
    assert counts == {"__cublas$lt$matmul$f8": 12, "__cublas$lt$matmul": 3}


def test_an_a100_is_refused():
    with pytest.raises(InputError, match=r"compute capability 8.0 is below 8.9"):
        design("a100x8x1", *CASES["gpt"])


def test_gelu_is_a_part_of_the_product_before_it():
    """Of a model alone on a GPU: cuBLAS adds the bias, and writes what is saved and the activation of it."""
    designed = design("h100x8x1", "gpt2-124m", 1, {"model.matmul_dtype": "same", "model.vocab_size": 512})
    text = compiled_for(lower_step(designed), compiler_options("gpu", designed.plan)).as_text()
    kinds = Counter(re.findall(r'epilogue":"(\w+)"', text))
    assert kinds["BIAS_GELU_AUX"] == designed.config.model.num_layers and "BIAS_GELU" not in kinds
    assert text.count('custom_call_target="mosaic_gpu_v2"') == designed.config.model.num_layers
