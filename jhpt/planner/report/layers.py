"""Which layers are on which devices, and which are streamed from the host."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from jhpt.core.plan import Plan, Stage
from jhpt.core.profile import ModelProfile


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers `[first, stop)` of one chunk at one degree."""

    chunk: int
    first: int
    stop: int
    names: tuple[str, ...]
    data: int
    tensor: int
    sample_chunks: int


def layer_runs(stage: Stage, profile: ModelProfile) -> tuple[LayerRun, ...]:
    """The layers of a stage, chunk by chunk.  Neighbours with equal degrees are joined."""
    runs = []
    for number, chunk in enumerate(stage.chunks):
        first = chunk.first
        for run in chunk.runs:
            stop = first + run.layers
            names = compressed(profile.layers[first:stop])
            data = stage.devices // run.tensor
            runs.append(LayerRun(number, first, stop, names, data, run.tensor, run.sample_chunks))
            first = stop
    return tuple(runs)


def compressed(names: Iterable[str]) -> tuple[str, ...]:
    """Equal neighbours joined: `("embedding", "block x 12")`."""
    groups = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return tuple(name if count == 1 else f"{name} x {count}" for name, count in groups)


def streamed_layers(plan: Plan) -> tuple[int, ...]:
    """The layers whose state is offloaded to the host."""
    if plan.offload is None:
        return ()
    return tuple(range(1, plan.stages[0].chunks[0].stop - 1, 1 + plan.offload.resident))


def idle_devices(plan: Plan, available: int) -> tuple[int, ...]:
    """Numbers of the devices that the plan does not use."""
    working = {device for stage in plan.stages for device in range(stage.device, stage.device + stage.devices)}
    return tuple(device for device in range(available) if device not in working)
