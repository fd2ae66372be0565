"""Alternatives: plans that were not chosen, and why; what sample chunks and compression save, or why the plan does
without them.

The alternatives of an answer are the best plans of other shapes that the search priced.  They all fit.  Shapes whose
lower bound was too high were not priced and are missing.  `changed` adds the winner with one decision changed.  Some of
these plans are faster but do not fit, which shows why the planner decided otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from jhpt.core.amounts import gib
from jhpt.core.axes import TENSOR
from jhpt.core.calibration import order_error
from jhpt.core.config import PLAIN_GRADIENTS, Compression
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import Chunk, OffloadKind, Plan, SavedTensors, runs_of
from jhpt.planner.cost.activations import saved_tensors_of
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloads
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.report.causes import mean_causes
from jhpt.planner.report.words import compression_text, duration, offload_text, percent, shape_text
from jhpt.planner.search.request import COMPRESSIONS, ZERO
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
        """`+12.0 %: gradients exposed +80 ms, waiting +35 ms; compute -20 ms`, or how many bytes are missing.

        A difference below the error of such comparisons (`calibration.order_error`) is said to be not clear.
        """
        faster = f"; it would take {percent(self.ratio)}" if self.ratio < 1 else ""
        if self.missing > 0:
            return f"does not fit by {gib(self.missing)}{faster}"
        largest = max(map(abs, self.causes.values()), default=0.0)
        reported = [(value, cause) for cause, value in self.causes.items() if abs(value) > max(MINOR * largest, 1e-9)]
        signs = (sorted((v, c) for v, c in reported if v > 0)[::-1], sorted((v, c) for v, c in reported if v < 0))
        parts = [", ".join(f"{cause} {duration(value, sign=True)}" for value, cause in part) for part in signs if part]
        unclear = ", not clearly slower" if 1 < self.ratio <= 1 + order_error() else ""
        return ": ".join(filter(None, (percent(self.ratio) + unclear, "; ".join(parts))))


def alternative(name: str, plan: Plan, answer: Answer) -> Alternative:
    """The plan compared with the winner."""
    model = answer.model
    if plan.gradient_compression != model.gradient_compression:
        model = CostModel(model.profile, model.cluster, plan.gradient_compression, others=model.others)
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


def alternatives(answer: Answer) -> tuple[Alternative, ...]:
    """The fastest plans of other shapes."""
    return tuple(alternative(shape_text(plan), plan, answer) for plan in answer.alternatives[:ALTERNATIVES])


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
    levels = model.levels(ZERO, plan.replicas, plan.space, plan.micro_batches)
    for zero in levels if plan.offload is None else ():
        if zero != plan.zero:
            yield (
                (f"ZeRO-{zero}" if zero else "no ZeRO"),
                {"zero": zero, "zero_ranks": plan.zero_ranks if zero else None},
            )
    if plan.zero_ranks is not None:
        yield "sharded over all data ranks", {"zero_ranks": None}
    alike: dict[str, Any] = {"saved": None, "other_blocks": None}
    yield ("no recomputation" if plan.recompute else "recomputation"), alike | {"recompute": not plan.recompute}
    if plan.saved is not None:
        yield "full recomputation", alike
    if plan.other_blocks is not None:
        yield "recomputation in all blocks alike", {"other_blocks": None}
    if (saved := saved_tensors_of(plan)).host and plan.offload is None:
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
        elif plan.sequence:
            yield "no sequence parallelism", {"sequence": False}
        elif all(map(model.cuts_sequences, plan.degrees)):
            yield "sequence parallelism", {"sequence": True}
    if plan.gradient_compression.on and plan.replicas > 1:
        yield "no gradient compression", {"gradient_compression": PLAIN_GRADIENTS}
    for count in (plan.micro_batches // 2, plan.micro_batches * 2):
        if count and plan.batch % count == 0:
            yield f"{count} micro-batch{'es' if count > 1 else ''}", {"micro_batches": count}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a way to reduce tensor communication is worth.

    taken: whether the plan uses it.  seconds: that it saves per step; negative if it would cost time.  sent, plain:
    bytes that a device sends over the tensor axis per step, with it and without it.
    """

    name: str
    taken: bool
    seconds: float
    sent: float
    plain: float
    why: str


def savings(answer: Answer) -> tuple[Saving, ...]:
    """What sample chunks and compression save; empty if no block has all-reduces over tensor ranks."""
    plan, last = answer.plan, answer.model.num_layers - 1
    degrees = (pair for stage in plan.stages for chunk in stage.chunks for pair in enumerate(chunk.tensor, chunk.first))
    if plan.space == "general" or not any(0 < layer < last and tensor > 1 for layer, tensor in degrees):
        return ()
    return (_chunks_saving(answer), *([_compression_saving(answer)] if answer.model.tensor_all_reduce.stream else []))


def _chunks_saving(answer: Answer) -> Saving:
    plan, taken = answer.plan, answer.plan.sample_chunks != (1,)
    other = cut_samples(plan, 1 if taken else 2)
    seconds = price(other, answer.model).seconds - answer.estimate.seconds
    samples = max(plan.batch // plan.micro_batches * t // stage.devices for stage in plan.stages for t in plan.degrees)
    if taken:
        why = f"hide {duration(seconds)} of a step's all-reduces behind other chunks"
    elif not answer.model.cluster.overlap:
        why = "none: communication does not overlap computation on this cluster"
    elif samples == 1:
        why = "none: a device has only one sample of a micro-batch"
    elif not answer.model.profile.sample_tokens:
        why = "none: only sequences of tokens are cut into chunks"
    elif seconds <= 0:
        why = "none: 2 chunks would not fit"
    else:
        why = f"none: 2 chunks would make the step {duration(seconds)} longer"
    saved = seconds if taken else -seconds
    sent, plain = (_tensor_bytes(one, answer) for one in ((plan, other) if taken else (other, plan)))
    return Saving(name="sample chunks", taken=taken, seconds=saved, sent=sent, plain=plain, why=why)


def _compression_saving(answer: Answer) -> Saving:
    plan, taken = answer.plan, answer.plan.compression.on
    if plan.sequence:
        sent, why = _tensor_bytes(plan, answer), "off: it needs whole sequences, and sequence parallelism cuts them"
        return Saving(name="compression", taken=False, seconds=0.0, sent=sent, plain=sent, why=why)
    other = plan.model_copy(update={"compression": Compression() if taken else COMPRESSIONS[0]})
    difference = price(other, answer.model).seconds - answer.estimate.seconds
    seconds = difference if taken else -difference
    sent, plain = (_tensor_bytes(one, answer) for one in ((plan, other) if taken else (other, plan)))
    wire = f"{gib(sent)} instead of {gib(plain)} over the tensor axis"
    off = f"off: in {COMPRESSIONS[0].bits} bits a device would send {wire}"
    if taken:
        why = f"{compression_text(plan.compression)}: a device sends {wire}, a step takes {duration(seconds)} less"
    elif seconds > 0:
        choose = "parallel.compression=auto lets the planner choose"
        why = f"{off}, and a step would take {duration(seconds)} less; {choose}"
    else:
        why = f"{off}, but a step would take {duration(-seconds)} more"
    return Saving(name="compression", taken=taken, seconds=seconds, sent=sent, plain=plain, why=why)


def cut_samples(plan: Plan, chunks: int) -> Plan:
    """The plan with this number of sample chunks in all layers."""

    def cut(chunk: Chunk) -> Chunk:
        return chunk.model_copy(update={"runs": runs_of(chunk.tensor, (chunks,) * len(chunk.tensor))})

    stages = tuple(
        stage.model_copy(update={"chunks": tuple(cut(chunk) for chunk in stage.chunks)}) for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def _tensor_bytes(plan: Plan, answer: Answer) -> float:
    """Bytes that a device sends over the tensor axis, in the stage that sends the most."""
    stages = traffic(plan, answer.model.profile, overlap=answer.model.cluster.overlap)
    return max(sum(sent.bytes for (_, axis), sent in stage.items() if axis.startswith(TENSOR)) for stage in stages)
