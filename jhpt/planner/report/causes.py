"""Where the seconds of a step go.

The causes of a stage, waiting included, add up to the seconds of the step.  A plan as a whole is described by the mean
over its working devices, so the differences between the causes of two plans add up to the difference of their steps.
Uneven stages and the ramps of the pipeline both show as waiting.  Compute and update are split further than in
`estimate`:

    recomputation       forward passes that are repeated in the backward pass
    copies              exposed transfers of saved activations to the host and back
    weights gathered    exposed all-gathers of ZeRO-3, and of weights that are gathered once per step

Tensor communication is the exposed part of the all-reduces, and the overhead of sample chunks and of compression.
"""

from dataclasses import replace

from jhpt.core.plan import Plan, SavedTensors
from jhpt.planner.cost.activation_offload import waiting
from jhpt.planner.cost.estimate import Estimate, slot_of, stage_layers
from jhpt.planner.cost.layers import LayerStrategy, strategy_of
from jhpt.planner.cost.model import CostModel


def stage_causes(plan: Plan, position: int, estimate: Estimate, model: CostModel) -> dict[str, float]:
    """Seconds of one stage by cause; they sum to the step."""
    seconds, strategy = dict(estimate.stages[position].seconds), strategy_of(plan)
    if plan.offload is not None:
        return seconds
    # One data rank gathers nothing; rounding the weights is computation.
    ungathered = strategy if plan.replicas == 1 else replace(strategy, zero=0)
    unsharded = plan.micro_batches * _passes(plan, position, ungathered, model)
    bare = plan.micro_batches * _passes(plan, position, replace(ungathered, recompute=False, saved=None), model)
    once = _gathered(plan, position, model)
    seconds["update"] -= once
    gathered = seconds["compute"] - unsharded + once
    copies = _copied(plan, position, model)
    split = {"compute": bare, "recomputation": unsharded - bare - copies, "weights gathered": gathered}
    split |= {"copies": copies} if waiting(plan).host else {}
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
    saved = waiting(plan)
    if not saved.host:
        return 0.0
    strategy = replace(strategy_of(plan), zero=0)
    resident = replace(strategy, saved=SavedTensors(device=(*saved.device, *saved.host)))
    return plan.micro_batches * (_passes(plan, position, strategy, model) - _passes(plan, position, resident, model))


def _gathered(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds of the weights that are gathered once per step."""
    parts = stage_layers(plan, position, strategy_of(plan), model)
    return sum(float(part.gathered.sum()) for part in parts) + slot_of(plan, position, model).gathered
