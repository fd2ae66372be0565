"""Where the seconds of a step go.

What a device of a stage does and how long it waits add up to the step.  A plan as a whole is described by the mean over
its working devices, so the differences between two plans' causes add up to the difference of their steps; uneven stages
and the pipeline's ramps both show as waiting.  Compute and update are split further than in `estimate`: the forward
pass done again is recomputation; what no work hides of activations on their way to the host and back is copies, and of
ZeRO-3's traffic, and of the weights that are gathered once a step, is weights gathered.

Tensor communication is what sums cost: what nothing hides of them, and what chunks and codes cost on top.
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
    # Over one rank nothing is gathered; what rounding takes is computation.
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
    """Seconds that wait for what blocks keep on the host: beyond those of a plan that keeps it on the devices."""
    saved = waiting(plan)
    if not saved.host:
        return 0.0
    strategy = replace(strategy_of(plan), zero=0)
    there = replace(strategy, saved=SavedTensors(device=(*saved.device, *saved.host)))
    return plan.micro_batches * (_passes(plan, position, strategy, model) - _passes(plan, position, there, model))


def _gathered(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds in which weights are gathered once a step."""
    parts = stage_layers(plan, position, strategy_of(plan), model)
    return sum(float(part.gathered.sum()) for part in parts) + slot_of(plan, position, model).gathered
