"""Plans that were not chosen, and why.

An answer's alternatives are the best plans of other shapes, as far as the search had to price them, and all fit; shapes
whose bound was too high are not among them.  `changed` adds plans of the winner's own shape with one decision changed;
of those some are faster and do not fit, which says why the planner had to decide as it did.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from jhpt.core.amounts import gib
from jhpt.core.config import PLAIN_GRADIENTS, Compression
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import OffloadKind, Plan, SavedTensors
from jhpt.planner.cost.activation_offload import waiting
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloads
from jhpt.planner.report.causes import mean_causes
from jhpt.planner.report.savings import cut_samples
from jhpt.planner.report.words import duration, offload_text, percent, shape_text
from jhpt.planner.search.solve import Answer

MINOR = 0.05
"""Differences below this share of the largest one are not told."""

ALTERNATIVES = 5


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was not chosen.

    ratio: its step over the winner's.  missing: bytes per device that it lacks, at most 0 where it fits.
    causes: seconds that it spends more than the winner, by cause; they sum to the difference of the steps.
    """

    name: str
    plan: Plan
    seconds: float
    ratio: float
    missing: float
    causes: dict[str, float]

    @property
    def why(self) -> str:
        """`+12.0 %: gradients exposed +80 ms, waiting +35 ms; compute -20 ms`, or by how much it does not fit."""
        faster = f"; it would take {percent(self.ratio)}" if self.ratio < 1 else ""
        if self.missing > 0:
            return f"does not fit by {gib(self.missing)}{faster}"
        largest = max(map(abs, self.causes.values()), default=0.0)
        told = [(value, cause) for cause, value in self.causes.items() if abs(value) > max(MINOR * largest, 1e-9)]
        signs = (sorted((v, c) for v, c in told if v > 0)[::-1], sorted((v, c) for v, c in told if v < 0))
        parts = [", ".join(f"{cause} {duration(value, sign=True)}" for value, cause in part) for part in signs if part]
        return ": ".join(filter(None, (percent(self.ratio), "; ".join(parts))))


def alternative(name: str, plan: Plan, answer: Answer) -> Alternative:
    """`plan` against the winner."""
    model = answer.model
    if plan.gradient_compression != model.gradient_compression:
        model = CostModel(model.profile, model.cluster, plan.gradient_compression)
    estimate = price(plan, model)
    own, winner = mean_causes(plan, estimate, model), mean_causes(answer.plan, answer.estimate, answer.model)
    return Alternative(
        name=name,
        plan=plan,
        seconds=estimate.seconds,
        ratio=estimate.seconds / answer.estimate.seconds,
        missing=max(stage.missing for stage in estimate.stages),
        causes={cause: own.get(cause, 0.0) - winner.get(cause, 0.0) for cause in {**own, **winner}},
    )


def alternatives(answer: Answer, count: int = ALTERNATIVES) -> tuple[Alternative, ...]:
    """The fastest plans of other shapes."""
    return tuple(alternative(shape_text(plan), plan, answer) for plan in answer.alternatives[:count])


def changed(answer: Answer) -> tuple[Alternative, ...]:
    """The winner with one decision changed, wherever that makes a plan."""
    others = []
    for name, update in _changes(answer.plan, answer.model):
        plan = answer.plan.model_copy(update=update | {"seconds": None, "lower_bound": None})
        try:
            others.append(alternative(name, plan, answer))
        except InputError:  # such as a micro-batch that the replicas cannot share
            continue
    return tuple(others)


def _changes(plan: Plan, model: CostModel) -> Iterator[tuple[str, dict[str, Any]]]:
    for zero in model.levels((0, 1, 3), plan.replicas, plan.space) if plan.offload is None else ():
        if zero != plan.zero:
            yield (f"ZeRO-{zero}" if zero else "no ZeRO"), {"zero": zero}
    yield ("no recomputation" if plan.recompute else "recomputation"), {"recompute": not plan.recompute, "saved": None}
    if plan.saved is not None:
        yield "recomputation of everything", {"saved": None}
    if (away := waiting(plan)).host and plan.offload is None:
        named = tuple(name for name in (*away.device, *away.host) if name != BLOCK_INPUT)
        yield "nothing on the host", {"saved": SavedTensors(device=named)}
    if plan.offload is not None:
        yield "everything on the devices", {"offload": None}
        for offload in offloads(
            plan.stages[0].chunks[0].stop - 2, get_args(OffloadKind), plan.offload.update_in_backward
        ):
            if (offload.kind == plan.offload.kind) != (offload.resident == plan.offload.resident):
                yield offload_text(plan.model_copy(update={"offload": offload})), {"offload": offload}
    if plan.degrees[-1] > 1 and plan.space == "spmd":
        if plan.sample_chunks != (1,):
            yield "samples in one piece", {"stages": cut_samples(plan, 1).stages}
        if plan.compression.on:
            yield "no compression", {"compression": Compression()}
    if plan.gradient_compression.on and plan.replicas > 1:
        yield "gradients as they are", {"gradient_compression": PLAIN_GRADIENTS}
    for count in (plan.micro_batches // 2, plan.micro_batches * 2):
        if count and plan.batch % count == 0:
            yield f"{count} micro-batch{'es' if count > 1 else ''}", {"micro_batches": count}
