"""What sample chunks and compression save of the tensor all-reduces, or why the plan does without them."""

from dataclasses import dataclass

from jhpt.core.amounts import gib
from jhpt.core.axes import TENSOR
from jhpt.core.config import Compression
from jhpt.core.plan import Chunk, Plan, runs_of
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.report.words import compression_text, duration
from jhpt.planner.search.request import COMPRESSIONS
from jhpt.planner.search.solve import Answer


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a way to reduce tensor communication is worth.

    seconds: that it saves per step; negative where it would cost time.  sent, plain: bytes that a device sends over the
    tensor axis per step, with it and without it.
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
    """Bytes that a device sends over the tensor axis, of the stage that sends most."""
    stages = traffic(plan, answer.model.profile, overlap=answer.model.cluster.overlap)
    return max(sum(sent.bytes for (_, axis), sent in stage.items() if axis.startswith(TENSOR)) for stage in stages)
