"""Where the seconds of a step go, and why state is offloaded to the host or stored in low precision.

The causes of a stage, waiting included, add up to the seconds of the step.  A plan as a whole is described by the mean
over its working devices, so the differences between the causes of two plans add up to the difference of their steps.
Uneven stages and the ramps of the pipeline both show as waiting.  Compute and update are split further than in
`estimate`:

    recomputation       forward passes that are repeated in the backward pass
    copies              exposed transfers of saved activations to the host and back
    weights gathered    exposed collectives of ZeRO-3, and all-gathers of weights once per step

Tensor communication is the exposed part of the all-reduces, and the overhead of sample chunks and of compression.
"""

import math
from dataclasses import replace

from jhpt.core.amounts import gib
from jhpt.core.plan import Plan, SavedTensors
from jhpt.core.profile import ModelProfile
from jhpt.core.state import State
from jhpt.planner.cost.activations import saved_tensors_of
from jhpt.planner.cost.estimate import Estimate, price, slot_of, stage_layers
from jhpt.planner.cost.layers import LayerStrategy, strategy_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloaded_step
from jhpt.planner.cost.paces import notes
from jhpt.planner.report.words import OFFLOADED, duration, spans_text, streamed_layers
from jhpt.planner.search.solve import Answer


def stage_causes(plan: Plan, position: int, estimate: Estimate, model: CostModel) -> dict[str, float]:
    """Seconds of one stage by cause; they sum to the step."""
    seconds, strategy = dict(estimate.stages[position].seconds), strategy_of(plan)
    if plan.offload is not None:
        return seconds
    # One data rank gathers nothing; rounding the weights is computation.
    unsharded = strategy if plan.replicas == 1 else replace(strategy, zero=0)

    def more(strategy: LayerStrategy, other: LayerStrategy) -> float:
        passes = (_passes(plan, position, each, model) for each in (strategy, other))
        return plan.micro_batches * (next(passes) - next(passes))

    # Adding up gradients is computation, too: of ZeRO-2 and ZeRO-3 that of a share.
    sharding = more(replace(strategy, accumulates=False), replace(unsharded, accumulates=False))
    again = more(unsharded, replace(unsharded, recompute=False, saved=None))
    once, copies = _gathered(plan, position, model), _copied(plan, position, model)
    seconds["update"] -= once
    seconds["gradients exposed"] += sharding if plan.zero == 2 else 0.0
    split = {
        "compute": seconds["compute"] - sharding - again,
        "recomputation": again - copies,
        "weights gathered": once + (0.0 if plan.zero == 2 else sharding),
    }
    split |= {"copies": copies} if saved_tensors_of(plan).host else {}
    return split | {cause: value for cause, value in seconds.items() if cause != "compute"}


def mean_causes(plan: Plan, estimate: Estimate, model: CostModel) -> dict[str, float]:
    """Seconds by cause, mean over the working devices; they sum to the step."""
    means: dict[str, float] = {}
    for position, stage in enumerate(plan.stages):
        for cause, seconds in stage_causes(plan, position, estimate, model).items():
            means[cause] = means.get(cause, 0.0) + seconds * stage.devices / plan.devices
    return means


def _passes(plan: Plan, position: int, strategy: LayerStrategy, model: CostModel) -> float:
    """Seconds of a micro-batch in both passes, without tensor communication."""
    parts = stage_layers(plan, position, strategy, model)
    return sum(float((part.forward + part.backward).sum()) for part in parts)


def _copied(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds that offloaded activations add, compared with the same activations saved on the device."""
    saved = saved_tensors_of(plan)
    if not saved.host:
        return 0.0
    strategy = replace(strategy_of(plan), zero=0)
    resident = replace(strategy, saved=SavedTensors(device=(*saved.device, *saved.host)))
    return plan.micro_batches * (_passes(plan, position, strategy, model) - _passes(plan, position, resident, model))


def _gathered(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds of the weights that are gathered once per step."""
    parts = stage_layers(plan, position, strategy_of(plan), model)
    return sum(float(part.gathered.sum()) for part in parts) + slot_of(plan, position, model).gathered


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
    plan, saved = answer.plan, saved_tensors_of(answer.plan)
    if not saved.host or plan.offload is not None:
        return ()
    stage = max(answer.estimate.stages, key=lambda stage: stage.total_host_bytes)
    means = mean_causes(plan, answer.estimate, answer.model)
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    return (
        f"offloaded activations: {' and '.join(saved.host)} of every block, {room}; "
        f"{duration(means['copies'])} of a step wait for copies, {duration(means['recomputation'])} are recomputation",
    )


def other_profiles(model: CostModel) -> list[ModelProfile]:
    """The profiles of the cluster's other kinds of devices, the fastest first."""
    return [pace.profile for pace in model.paces if pace.profile is not model.profile]


def profile_lines(model: CostModel) -> tuple[str, ...]:
    """On a cluster of several kinds of devices: the source of the others' seconds, and what is approximate in them."""
    sources = (f"{own.device}: {own.source}" for own in other_profiles(model))
    return (*sources, *notes(model.paces))


def state_lines(profile: ModelProfile) -> tuple[str, ...]:
    """Bytes of a parameter's weight and optimizer state, if they are stored in low precision."""
    if not profile.state.low_precision:
        return ()
    total, parts = profile.state.bytes, (f"{cause} {size:.2f}" for cause, size in profile.state.causes.items())
    instead = "as many as" if total == State().bytes else f"instead of {State().bytes:.0f}"
    return (f"state: {total:.2f} bytes per parameter, {instead} in float32: {', '.join(parts)}",)
