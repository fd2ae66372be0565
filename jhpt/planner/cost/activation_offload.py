"""Bytes of offloaded activations on the hosts of a plan, from a block's forward pass to its backward pass.

As on the devices, every micro-batch in flight holds the tensors of the largest chunk, in a ring that is equally long on
all stages.
"""

from collections.abc import Sequence

import numpy as np

from jhpt.core.plan import Chunk, Plan, SavedTensors
from jhpt.core.profile import ModelProfile
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.recompute import NOTHING
from jhpt.planner.profiles.named_tensors import size_of


def waiting(plan: Plan) -> SavedTensors:
    """What the plan saves.  Without recomputation nothing is offloaded."""
    return (plan.saved or NOTHING) if plan.recompute else NOTHING


def waiting_bytes(plan: Plan, profile: ModelProfile, saved: SavedTensors) -> list[float]:
    """Bytes that each device of the plan, in order, has on its host."""
    slots = in_flight(plan.schedule, len(plan.stages), 0, plan.chunks, plan.micro_batches)
    names, samples = saved.host, plan.batch // plan.micro_batches

    def of_chunk(chunk: Chunk, devices: int) -> float:
        total = 0.0
        for layer, tensor in zip(range(chunk.first, chunk.stop), chunk.tensor, strict=True):
            size = size_of(profile.kinds[profile.layers[layer]].tensors, names)
            total += size.on(tensor, tensor if plan.sequence else 1) * -(-samples * tensor // devices)
        return total

    return [
        slots * max(of_chunk(chunk, stage.devices) for chunk in stage.chunks)
        for stage in plan.stages
        for _ in range(stage.devices)
    ]


def fullest_host(by_device: Sequence[float], each: int) -> float:
    """Bytes on the fullest host, where `each` neighbouring devices share a host."""
    return max(float(np.sum(by_device[first : first + each])) for first in range(0, len(by_device), each))
