"""XLA's options for a training step: how many collectives and copies may be under way at a time, and whether beside
other work."""

from typing import Any

from jhpt.core.plan import Plan
from jhpt.sharding.layer_loop import unrolled_on_gpu

COLLECTIVES_AT_ONCE = 8
"""Collectives under way at a time.  XLA's default is one, but a layer that is fetched ahead or finished late needs
several, and the last ones of an iteration would have no computation left to run beside.  GPT-6.7B on h100x8, compiled
without a GPU: ZeRO-3 hides 57 % of the data axis' communication with 1, 86 % with 4, 96 % with 8."""

ROWS_AT_ONCE = 4
"""Copies under way at a time with offloaded blocks: as many as a block has rows.  With one at a time, XLA's default,
each copy waits for the one before, and matrix products wait for all but the last."""

TENSORS_AT_ONCE = 8
"""Copies under way at a time with offloaded activations: as many as a block has named tensors.  GPT-6.7B with five
of them offloaded, compiled without a GPU: with 4 the fifth fetch waits for the first."""


NO_GRAPHS = ""
"""Operations that are recorded as CUDA graphs: none, where copies should run beside computation.  In a graph, XLA runs
what it has scheduled side by side one after the other (openxla/xla, pull request 48900, open in September 2026).  A
step with every block's weights on the host took an H200 828 ms with graphs and 810 without (docs/reports/gpu.md)."""

COMBINED_BYTES = 0
"""Bytes up to which transfers between the same devices are combined into one.  In a ring of two stages activations and
errors travel between the same devices: XLA sends both after the forward pass and waits for both before the backward
pass (jax 0.11.2, compiled without a GPU), so that nothing runs beside them."""


ALONE: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""Of a plan whose layers are unrolled.  Products are cuBLAS's, which adds biases; XLA's own are chosen by their time
alone, and a bias is then added by another kernel.  And products of one input are not merged, because the result would
be cut again into queries, keys and values.  1.3 % of a step of gpt2-124m on an H200 (docs/reports/gpu.md).  In a loop
XLA would make some products twice, once into a stack of saved activations (jax 0.11.2, compiled without a GPU)."""


def compiler_options(platform: str, plan: Plan) -> dict[str, Any]:
    """XLA's options for a training step on "gpu", also called "cuda", or "cpu".

    If only tensor ranks communicate and their samples are cut into chunks, one all-reduce at a time is better: with
    several, XLA starts them later, and on h100x8 78 % of GPT-6.7B's communication is hidden instead of 81 % (tensor 8,
    two chunks).  If data ranks communicate too, several are better: 93 % instead of 82 % (tensor 4, data 2, ZeRO-1).
    """
    if platform not in ("gpu", "cuda"):
        return {}
    copies = ROWS_AT_ONCE if plan.offload else TENSORS_AT_ONCE if plan.saved and plan.saved.host else None
    collectives = None if _tensor_alone(plan) and _chunked(plan) else COLLECTIVES_AT_ONCE
    limits = {
        "xla_gpu_experimental_parallel_async_compute_limit": copies,
        "xla_gpu_experimental_parallel_collective_overlap_limit": collectives,
    }
    options: dict[str, Any] = {name: limit for name, limit in limits.items() if limit}
    if copies:
        options["xla_gpu_enable_command_buffer"] = NO_GRAPHS
    if unrolled_on_gpu(plan):
        options |= ALONE
    if len(plan.stages) == 2 and plan.chunks > 1:
        options["xla_gpu_collective_permute_combine_threshold_bytes"] = COMBINED_BYTES
    return options


def _tensor_alone(plan: Plan) -> bool:
    return plan.degrees == (plan.stages[0].devices,)


def _chunked(plan: Plan) -> bool:
    return any(number > 1 for stage in plan.stages for chunk in stage.chunks for number in chunk.sample_chunks)
