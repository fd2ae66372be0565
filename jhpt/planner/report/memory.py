"""What lives on the host and in few bits, and why."""

import math

from jhpt.core.amounts import gib
from jhpt.core.profile import ModelProfile
from jhpt.core.state import State
from jhpt.planner.cost.activation_offload import waiting
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.offload import offloaded_step
from jhpt.planner.report.causes import mean_causes
from jhpt.planner.report.layers import streamed_layers
from jhpt.planner.report.words import OFFLOADED, duration, spans_text
from jhpt.planner.search.solve import Answer


def offload_lines(answer: Answer) -> tuple[str, ...]:
    """Which blocks live where, and why."""
    plan, offload = answer.plan, answer.plan.offload
    if offload is None:
        return ()
    stage, step = answer.estimate.stages[0], offloaded_step(plan, answer.model)
    layers, every = streamed_layers(plan), 1 + offload.resident
    which = spans_text([(layers[0], layers[-1])])
    if every > 1 and len(layers) > 1:
        which = f"{layers[0]}, {layers[1]}" + (f" ... {layers[-1]}" if len(layers) > 2 else "")
    stay = "the blocks between and both ends" if every > 1 else "both ends"
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    forward, backward = map(duration, step.passes)
    return (
        f"on the host: {OFFLOADED[offload.kind]} of layers {which}, {room}; on the devices: {stay}",
        f"why: {_why_on_host(answer)}",
        f"passes: forward {forward}, backward {backward}, of which {duration(stage.seconds['copies'])} wait for copies",
    )


def _why_on_host(answer: Answer) -> str:
    if answer.on_devices is None:
        return "memory.offload asks for it"
    if answer.on_devices < math.inf:
        return f"with all state on the devices a step would take {duration(answer.on_devices)}"
    stage = price(answer.plan.model_copy(update={"offload": None}), answer.model).stages[0]
    return (
        f"with all state on the devices nothing fits; this plan would take {gib(stage.total_bytes)} of each, where "
        f"{gib(stage.capacity)} may be filled"
    )


def saved_tensors_lines(answer: Answer) -> tuple[str, ...]:
    """What blocks keep on the host, and why."""
    plan, saved = answer.plan, waiting(answer.plan)
    if not saved.host or plan.offload is not None:
        return ()
    stage = max(answer.estimate.stages, key=lambda stage: stage.total_host_bytes)
    means = mean_causes(plan, answer.estimate, answer.model)
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    return (
        f"on the host: {' and '.join(saved.host)} of every block, {room}; {duration(means['copies'])} of a step wait "
        f"for copies, {duration(means['recomputation'])} compute again",
    )


def state_lines(profile: ModelProfile) -> tuple[str, ...]:
    """What is kept of a parameter from step to step, where that is not float32."""
    if not profile.state.low_precision:
        return ()
    total, parts = profile.state.bytes, (f"{cause} {size:.2f}" for cause, size in profile.state.causes.items())
    instead = "as many as" if total == State().bytes else f"instead of {State().bytes:.0f}"
    return (f"state: {total:.2f} bytes of a parameter, {instead} in float32: {', '.join(parts)}",)
