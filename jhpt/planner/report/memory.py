"""What is offloaded to the host, what is stored in low precision, and why."""

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
    """Which state is offloaded, why, and what it costs."""
    plan, offload = answer.plan, answer.plan.offload
    if offload is None:
        return ()
    stage, step = answer.estimate.stages[0], offloaded_step(plan, answer.model)
    layers, every = streamed_layers(plan), 1 + offload.resident
    which = spans_text([(layers[0], layers[-1])])
    if every > 1 and len(layers) > 1:
        which = f"{layers[0]}, {layers[1]}" + (f" ... {layers[-1]}" if len(layers) > 2 else "")
    resident = "embedding, head and the blocks between" if every > 1 else "embedding and head"
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    forward, backward = map(duration, step.passes)
    return (
        f"CPU offload: {OFFLOADED[offload.kind]} of layers {which}, {room}; on the devices: {resident}",
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
        f"with all state on the devices no plan fits; this plan would take {gib(stage.total_bytes)} per device, "
        f"where {gib(stage.capacity)} are usable"
    )


def saved_tensors_lines(answer: Answer) -> tuple[str, ...]:
    """Which saved activations are offloaded, and what that costs."""
    plan, saved = answer.plan, waiting(answer.plan)
    if not saved.host or plan.offload is not None:
        return ()
    stage = max(answer.estimate.stages, key=lambda stage: stage.total_host_bytes)
    means = mean_causes(plan, answer.estimate, answer.model)
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    return (
        f"offloaded activations: {' and '.join(saved.host)} of every block, {room}; "
        f"{duration(means['copies'])} of a step wait for copies, {duration(means['recomputation'])} are recomputation",
    )


def state_lines(profile: ModelProfile) -> tuple[str, ...]:
    """Bytes of a parameter's weight and optimizer state, if they are stored in low precision."""
    if not profile.state.low_precision:
        return ()
    total, parts = profile.state.bytes, (f"{cause} {size:.2f}" for cause, size in profile.state.causes.items())
    instead = "as many as" if total == State().bytes else f"instead of {State().bytes:.0f}"
    return (f"state: {total:.2f} bytes per parameter, {instead} in float32: {', '.join(parts)}",)
