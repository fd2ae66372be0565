"""Alternatives: plans that were not chosen, and why.

The alternatives of an answer are the best plans of other shapes that the search priced.  They all fit.  Shapes whose
lower bound was too high were not priced and are missing.  `changed` adds the winner with one decision changed.  Some of
these plans are faster but do not fit, which shows why the planner decided otherwise.
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
"""Differences below this share of the largest difference are not reported."""

ALTERNATIVES = 5
"""Most alternatives that are reported."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was not chosen.

    ratio: seconds of its step over those of the winner.  missing: bytes per device that it lacks; at most 0 if it fits.
    causes: by cause, how many seconds more than the winner it spends; they sum to the difference of the steps.
    """

    name: str
    plan: Plan
    seconds: float
    ratio: float
    missing: float
    causes: dict[str, float]

    @property
    def why(self) -> str:
        """`+12.0 %: gradients exposed +80 ms, waiting +35 ms; compute -20 ms`, or how many bytes are missing."""
        faster = f"; it would take {percent(self.ratio)}" if self.ratio < 1 else ""
        if self.missing > 0:
            return f"does not fit by {gib(self.missing)}{faster}"
        largest = max(map(abs, self.causes.values()), default=0.0)
        reported = [(value, cause) for cause, value in self.causes.items() if abs(value) > max(MINOR * largest, 1e-9)]
        signs = (sorted((v, c) for v, c in reported if v > 0)[::-1], sorted((v, c) for v, c in reported if v < 0))
        parts = [", ".join(f"{cause} {duration(value, sign=True)}" for value, cause in part) for part in signs if part]
        return ": ".join(filter(None, (percent(self.ratio), "; ".join(parts))))


def alternative(name: str, plan: Plan, answer: Answer) -> Alternative:
    """The plan compared with the winner."""
    model = answer.model
    if plan.gradient_compression != model.gradient_compression:
        model = CostModel(model.profile, model.cluster, plan.gradient_compression)
    estimate = price(plan, model)
    causes, winner = mean_causes(plan, estimate, model), mean_causes(answer.plan, answer.estimate, answer.model)
    return Alternative(
        name=name,
        plan=plan,
        seconds=estimate.seconds,
        ratio=estimate.seconds / answer.estimate.seconds,
        missing=max(stage.missing for stage in estimate.stages),
        causes={cause: causes.get(cause, 0.0) - winner.get(cause, 0.0) for cause in {**causes, **winner}},
    )


def alternatives(answer: Answer, count: int = ALTERNATIVES) -> tuple[Alternative, ...]:
    """The fastest plans of other shapes."""
    return tuple(alternative(shape_text(plan), plan, answer) for plan in answer.alternatives[:count])


def changed(answer: Answer) -> tuple[Alternative, ...]:
    """The winner with one decision changed, for every change that gives a valid plan."""
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
        yield "full recomputation", {"saved": None}
    if (saved := waiting(plan)).host and plan.offload is None:
        named = tuple(name for name in (*saved.device, *saved.host) if name != BLOCK_INPUT)
        yield "no offloaded activations", {"saved": SavedTensors(device=named)}
    if plan.offload is not None:
        yield "no CPU offload", {"offload": None}
        for offload in offloads(
            plan.stages[0].chunks[0].stop - 2, get_args(OffloadKind), plan.offload.update_in_backward
        ):
            if (offload.kind == plan.offload.kind) != (offload.resident == plan.offload.resident):
                yield offload_text(plan.model_copy(update={"offload": offload})), {"offload": offload}
    if plan.degrees[-1] > 1 and plan.space == "spmd":
        if plan.sample_chunks != (1,):
            yield "no sample chunks", {"stages": cut_samples(plan, 1).stages}
        if plan.compression.on:
            yield "no compression", {"compression": Compression()}
    if plan.gradient_compression.on and plan.replicas > 1:
        yield "no gradient compression", {"gradient_compression": PLAIN_GRADIENTS}
    for count in (plan.micro_batches // 2, plan.micro_batches * 2):
        if count and plan.batch % count == 0:
            yield f"{count} micro-batch{'es' if count > 1 else ''}", {"micro_batches": count}
