"""Bytes of a step whose blocks live on the host: on a device by cause, and on a host by cause.

A row has a float32 number for each parameter of a block, or a data rank's share of them; a block has one of weights,
the optimizer's state, and one of its gradient unless it steps at once.  What XLA makes of the step was read off
programs compiled for an H100 (jax 0.10.2): what is there throughout, and the largest of three moments.

    throughout    12 bytes a parameter of the ends; rows that stay; what blocks keep, of the whole batch; the table in
                  the compute dtype; what goes into a pass and comes out of it, of the whole batch
    forward       7 rows, at work and on their way, or 6.4 beside the working set; where blocks stay 7 beside it, for
                  one of them takes its step before what the streamed one has written is gone; at once 5
    head          a micro-batch's logits in float32, their gradient, and what led to them; of weights that come for the
                  first block half a row, for they come late where logits are many; where blocks step at once 3 rows
    backward      a row of weights on its way; the working set, or the gradient of a block, as it is computed and as one
                  row, and the row before it.  At once 6.5 rows, for those of the block before leave and the moments
                  come; a single rank's gradient is used as it is computed

What lives where changes what stays, not the rows at work: those on the device are read and written as the others are.
Several data ranks gather a row of weights for use.  Several micro-batches use one copy of the weights in the compute
dtype and add up gradients in float32, of the block and of the ends; where blocks stay, which makes a loop in a loop,
there is a row more in the forward pass if not all of a block's rows come and go.  What is fetched further ahead than
one group is there in addition.

The working set is in terms of what a block keeps without recomputation.  `FORWARD_WORK`, `BACKWARD_WORK` and the
numbers of rows are counted in those programs.  Left out: fragmentation.
"""

from dataclasses import dataclass

from jhpt.core.plan import Offload, Plan
from jhpt.planner.cost.memory import FLOAT32
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.named_tensors import size_of

FORWARD_WORK = 0.8
"""Of what a block keeps: its hidden layer, and five tensors as wide as the residual stream."""

BACKWARD_WORK = {True: 2.2, False: 2.7}
"""Causal or not: the tensors of a block with their gradients; beside them dropout, and what an exact GELU leaves."""

WIDEST = 1 / 3
"""Of a block's parameters, in its largest matrix, that of the MLP: 4 D^2 of 12."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on a device.

    row: a number in float32 for each of a block's parameters, this rank's share; whole: all of them.  moments: of the
    optimizer's state of a block, this rank's share.  stream: the residual stream of the whole batch.  kept: by a block,
    of the whole batch.  work: by a block without recomputation, of a micro-batch.  logits: of a micro-batch, float32.
    ends: parameters.  entry, exit: what the ends keep, of a micro-batch.  element: of a number of the compute dtype.
    """

    row: float
    whole: float
    moments: float
    stream: float
    saved: float
    work: float
    logits: float
    embedding_and_head: float
    table: float
    entry: float
    exit: float
    element: float
    blocks: int
    ranks: int
    micro_batches: int
    causal: bool


def sizes_of(plan: Plan, model: CostModel) -> Sizes:
    """Of a plan with one stage and no tensor parallelism."""
    profile, ranks = model.profile, plan.stages[0].devices
    first, block, last = (model.kinds[model.index[at]] for at in (0, 1, -1))
    whole, micro = -(-plan.batch // ranks), -(-plan.batch // plan.micro_batches // ranks)
    work = block.activation_bytes + block.replicated_bytes
    named = size_of(block.tensors, plan.saved.device if plan.saved else ()).on(1, 1)
    return Sizes(
        row=FLOAT32 * block.parameters / ranks,
        whole=FLOAT32 * block.parameters,
        moments=moment_bytes(model) * block.parameters / ranks,
        stream=whole * first.boundary_bytes,
        saved=whole * (first.boundary_bytes + named if plan.recompute else work),
        work=micro * work,
        logits=micro * last.activation_bytes,
        embedding_and_head=float(first.parameters + last.parameters),
        table=profile.bytes_per_weight * max(first.parameters, last.parameters),
        entry=micro * first.replicated_bytes,
        exit=micro * last.replicated_bytes,
        element=profile.bytes_per_weight,
        blocks=model.num_layers - 2,
        ranks=ranks,
        micro_batches=plan.micro_batches,
        causal=profile.causal,
    )


def moment_bytes(model: CostModel) -> float:
    """Of the optimizer's state, per parameter: what the profile counts beside weight, gradient and a float32 weight."""
    wire = model.profile.bytes_per_weight
    return model.profile.state_bytes - 2 * wire - (FLOAT32 if wire < FLOAT32 else 0.0)


def host_bytes(plan: Plan, model: CostModel) -> dict[str, float]:
    """On the host of the stage's fullest node, by cause."""
    sizes, offload = sizes_of(plan, model), _offload(plan)
    stage = plan.stages[0]
    here = max(model.places.at(stage.device, stage.devices).crossing)
    parameters, optimizer = _on_host(offload, sizes)
    return {
        ("weights" if offload.update_in_backward else "weights and gradients"): here * parameters,
        "optimizer": here * optimizer,
    }


def device_bytes(plan: Plan, model: CostModel) -> dict[str, float]:
    """On a device by cause, when it holds most."""
    sizes, offload = sizes_of(plan, model), _offload(plan)
    stays = sizes.blocks * (_parameters(offload, sizes) + sizes.moments) - sum(_on_host(offload, sizes))
    throughout = {
        "embedding and head": (FLOAT32 + moment_bytes(model)) * sizes.embedding_and_head,
        "resident rows": stays,
        "activations": sizes.blocks * sizes.saved + 2 * sizes.stream + sizes.entry,
        "tables": sizes.table,
    }
    moments = [_forward(sizes, offload), _head(sizes, offload), _backward(sizes, offload)]
    most = max(moments, key=lambda causes: sum(causes.values()))
    return throughout | dict.fromkeys([cause for causes in moments for cause in causes], 0.0) | most


def _forward(sizes: Sizes, offload: Offload) -> dict[str, float]:
    work = FORWARD_WORK * sizes.work + _copy(sizes) + _gathered(sizes)
    further = max(offload.ahead - 1, 0) * sizes.row
    if offload.update_in_backward:
        return {"rows at work": 5 * sizes.row + further, "working set": work}
    if offload.resident:
        several = sizes.micro_batches > 1
        own = 7 + (several and offload.kind != "both")
        return {"rows at work": own * sizes.row + 4 * further, "working set": work}
    rows = 6.4 if sizes.ranks == 1 else 4.0
    return {"rows at work": rows * sizes.row + 4 * further, "working set": max(work, (7 - rows) * sizes.row)}


def _head(sizes: Sizes, offload: Offload) -> dict[str, float]:
    logits = sizes.logits * (1 + sizes.element / FLOAT32) + sizes.exit
    rows = 3 if offload.update_in_backward else 0.5
    return {"rows at work": rows * sizes.row, "logits": logits, "gradients of the ends": 2 * _summed_ends(sizes)}


def _backward(sizes: Sizes, offload: Offload) -> dict[str, float]:
    several, copy = sizes.micro_batches > 1, sizes.whole * sizes.element / FLOAT32
    work = BACKWARD_WORK[sizes.causal] * sizes.work + _gathered(sizes)
    packed = sizes.whole + copy + sizes.row
    # A gradient that is used at once, by one rank, is never packed.
    used = offload.update_in_backward and not several and sizes.ranks == 1
    rows = {"both": 6.5, "optimizer": 6.5, "parameters": 4.5}[offload.kind] if offload.update_in_backward else 1.0
    return {
        "rows at work": rows * sizes.row + max(offload.ahead - 1, 0) * sizes.row,
        "working set": max(work, sizes.row if used else packed) + (copy + sizes.whole if several else 0.0),
        "gradients of the ends": _summed_ends(sizes),
    }


def _gathered(sizes: Sizes) -> float:
    """A whole row of weights; several micro-batches need no more than the copy made of it."""
    return sizes.whole if sizes.ranks > 1 and sizes.micro_batches == 1 else 0.0


def _copy(sizes: Sizes) -> float:
    """Weights in the compute dtype: of a matrix where it is used, or of a block for all micro-batches."""
    return sizes.whole * sizes.element / FLOAT32 * (1.0 if sizes.micro_batches > 1 else WIDEST)


def _summed_ends(sizes: Sizes) -> float:
    return FLOAT32 * sizes.embedding_and_head if sizes.micro_batches > 1 else 0.0


def _on_host(offload: Offload, sizes: Sizes) -> tuple[float, float]:
    """(weights with what waits, optimizer's state) of a rank that are on the host."""
    streamed = sizes.blocks // (1 + offload.resident)
    parameters, optimizer = offload.kind in ("parameters", "both"), offload.kind in ("optimizer", "both")
    return streamed * _parameters(offload, sizes) * parameters, streamed * sizes.moments * optimizer


def _parameters(offload: Offload, sizes: Sizes) -> float:
    """Weights of a block, and its gradient where that waits for the next step."""
    return sizes.row * (1 if offload.update_in_backward else 2)


def _offload(plan: Plan) -> Offload:
    assert plan.offload is not None, "asked for"
    return plan.offload
