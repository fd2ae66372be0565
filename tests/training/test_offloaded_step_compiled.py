"""Models larger than the GPU, compiled for one H100 that is not here: blocks on the host, and the device holds few.

GPT-1.5B at three depths and GPT-6.7B; five seconds each.
"""

import re
from functools import cache

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

BATCH = 8


def one_h100():
    cluster = find_cluster("h100x8x1")
    return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"devices": 1}),)})


@cache
def compiled(preset, layers, clip, micro_batches):
    """(configuration, the step)."""
    options = {"data.batch_size": BATCH, "memory.recompute": "full", "memory.offload": "both"}
    options |= {"parallel.micro_batches": micro_batches, "parallel.zero": 0, "optimizer.clip": clip}
    config, cluster = load_config(preset, options | {"model.num_layers": layers}), one_h100()
    plan = plan_by_hand(config, 1)
    design = design_step(
        config, plan, fitting_tokenizer(config), compile_only_devices(cluster), compile_only_info(cluster)
    )
    return config, compiled_for(lower_step(design), compiler_options("gpu", plan))


def memory(preset, layers, clip="global"):
    """(configuration, what the compiler says of the step's memory)."""
    config, step = compiled(preset, layers, clip, 1)
    return config, step.memory_analysis()


@pytest.mark.parametrize(("clip", "numbers"), [("global", 4), ("previous", 3)])
def test_the_host_holds_every_number_of_a_parameter_once(clip, numbers):
    """Weights, two moments, and a gradient that waits for the next step: in place, and what fills up rows."""
    config, analysis = memory("gpt2-1.5b", 48, clip)
    count = config.model.parameter_count()
    assert analysis.host_argument_size_in_bytes == analysis.host_alias_size_in_bytes
    assert analysis.host_argument_size_in_bytes == pytest.approx(
        4 * numbers * count.per_layer * count.num_layers, rel=1e-3
    )
    assert analysis.host_temp_size_in_bytes == 0


def products_beside(step, copies):
    """Of every loop with such copies: whether products are computed, here or in loops within, beside each of them."""
    beside = []
    for loop in re.split(r"\n(?=%|ENTRY)", step.as_text()):
        names = [match[1] for line in loop.splitlines() if (match := re.match(r"\s*(?:ROOT )?%([\w.-]+) = ", line))]
        work = [at for at, name in enumerate(names) if "gemm" in name or name.startswith("while")]
        starts = [at for at, name in enumerate(names) if name.startswith(f"{copies}-start")]
        embedding_and_head = [names.index(names[at].replace("-start", "-done")) for at in starts]
        if starts and work and not loop.startswith("ENTRY"):
            beside.append(all(any(a < at < b for at in work) for a, b in zip(starts, embedding_and_head, strict=True)))
    return beside


COPIES = [(clip, passes, count) for clip, passes in (("global", (2, 4)), ("previous", (3, 2))) for count in (1, 4)]


@pytest.mark.parametrize(("clip", "passes", "micro_batches"), quick_and_exhaustive(COPIES, [COPIES[1], COPIES[2]]))
def test_products_run_beside_every_copy(clip, passes, micro_batches):
    """In both directions and passes; blocks that step at once write nothing in the forward pass.

    The last block of a pass is in a loop of its own, which fetches only what blocks that step at once read late.

    Of blocks whose products take less, as of gpt2-1.5b with one micro-batch, XLA puts all of them beside the fetch.
    """
    _, step = compiled("gpt-6.7b", 8, clip, micro_batches)
    fetched, written = (products_beside(step, copies) for copies in ("dynamic-slice", "dynamic-update-slice"))
    assert (len(fetched), len(written)) == passes and all(fetched) and all(written)


def test_the_device_does_not_grow_with_the_blocks():
    """But for the input of each, which its backward pass starts from."""
    sizes = [memory("gpt2-1.5b", layers)[1].temp_size_in_bytes for layers in (12, 24, 48)]
    config, _ = memory("gpt2-1.5b", 48)
    saved = BATCH * config.data.sequence_length * config.model.d_model * 2
    assert sizes[1] - sizes[0] == 12 * saved and sizes[2] - sizes[1] == 24 * saved


def test_six_billion_parameters_fit_sixteen_gigabytes():
    """107 GB of state; with 16 bytes a parameter on the device, the rest of it would be 13 times too small."""
    config, analysis = memory("gpt-6.7b", 32)
    device = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    assert config.model.parameter_count().total > 6.6e9
    assert device < 16 * 2**30 < analysis.host_argument_size_in_bytes
