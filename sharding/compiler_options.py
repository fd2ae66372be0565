"""How the compiler is to schedule a step."""

from typing import Any

from jhpt.core.plan import Plan

COLLECTIVES_AT_ONCE = 8
"""Of a layer that is fetched ahead or given away late: XLA lets one collective be on its way at a time unless it is
told otherwise, and a layer has several.  The last of a loop's iteration then has nothing left to hide behind.  GPT-6.7B
on h100x8, compiled without a GPU: ZeRO-3 hides 57 % of the data axis with 1, 86 % with 4, 96 % with 8."""

ROWS_AT_ONCE = 4
"""Of a block that lives on the host: as many as it has.  One copy at a time, which is what XLA does unless it is told
otherwise, makes each wait for the one before, and products for all but the last."""

TENSORS_AT_ONCE = 8
"""Of a block whose tensors wait on the host: as many as have names.  GPT-6.7B with five of them there, compiled without
a GPU: with 4 the fifth fetch waits for the first."""


def compiler_options(platform: str, plan: Plan) -> dict[str, Any]:
    """XLA's options for a training step on "gpu", also called "cuda", or "cpu".

    Where tensor ranks alone communicate and their samples are cut into chunks, sums take turns as chunks do: with
    several on their way XLA puts off starting them, and h100x8 hides 78 % of GPT-6.7B's instead of 81 % (tensor 8, two
    chunks); with data ranks beside them, 93 % instead of 82 % (tensor 4, data 2, ZeRO-1).
    """
    if platform not in ("gpu", "cuda"):
        return {}
    copies = ROWS_AT_ONCE if plan.offload else TENSORS_AT_ONCE if plan.saved and plan.saved.host else None
    collectives = None if _tensor_alone(plan) and _chunked(plan) else COLLECTIVES_AT_ONCE
    limits = {
        "xla_gpu_experimental_parallel_async_compute_limit": copies,
        "xla_gpu_experimental_parallel_collective_overlap_limit": collectives,
    }
    return {name: limit for name, limit in limits.items() if limit}


def _tensor_alone(plan: Plan) -> bool:
    return plan.degrees == (plan.stages[0].devices,)


def _chunked(plan: Plan) -> bool:
    return any(number > 1 for stage in plan.stages for chunk in stage.chunks for number in chunk.sample_chunks)
