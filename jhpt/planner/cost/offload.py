"""What a plan costs whose blocks are offloaded to the host: the seconds of a step, and its bytes on a device and on a
host.

Seconds.  Blocks form equal groups, of which one block is copied and `resident` others stay on the device.  A step is
the embedding, a forward pass over the groups, the head, a backward pass over the groups, the embedding's backward pass,
and the update of embedding and head.  `streaming` states what the passes over groups take.  All micro-batches pass
through a block before the next block begins, so a block is copied once per pass, however many micro-batches there are.
For a block on one of d data ranks with M micro-batches:

    forward     the optimizer's step on the rank's share; all-gather of the weights in float32; M forward passes
    backward    all-gather of the weights; M backward passes, with recomputation each after a forward pass;
                reduce-scatter; the optimizer's step, if blocks are updated in the backward pass

Collectives run in line with the computation.  Gradients of embedding and head are reduced after everything is computed.
ZeRO-1 changes nothing: the blocks' state is sharded anyway, and embedding and head are whole on every rank.  On a
cluster without overlap copies run in line, too.

Bytes.  A row holds a float32 number for each parameter of a block, or for a data rank's share of them.  A block has one
row of weights, the optimizer's state and, unless it is updated in the backward pass, one row for its gradient.  How XLA
allocates the step was read off programs compiled for an H100 (jax 0.10.2): what exists throughout, plus the largest of
three moments.

    throughout    12 bytes per parameter of embedding and head; resident rows; what blocks save, for the whole batch;
                  the table in the compute dtype; input and output of a pass, for the whole batch
    forward       7 rows in use or being copied, or 6.4 beside the working set; with resident blocks 7 beside it, since
                  one of these is updated before the streamed block's written rows are freed; 5 with updates in the
                  backward pass
    head          a micro-batch's logits, their gradient, and what led to them; half a row of weights, since
                  those of the first block arrive late if there are many logits; 3 rows with updates in the backward
                  pass
    backward      a row of weights being copied; the larger of the working set and a block's gradient, as computed and
                  as one row, with the row before it.  6.5 rows with updates in the backward pass, because those of the
                  previous block are written while moments arrive; a single rank uses its gradient as it is computed

What is offloaded changes what stays on the device, not the rows in use: rows on the device are read and written in the
same way.  Several data ranks gather a row of weights to use it.  Several micro-batches share one copy of the weights
in the compute dtype and accumulate gradients in float32, of the block and of embedding and head; with resident blocks,
which make a loop inside a loop, there is one more row in the forward pass unless all of a block's rows are copied.
What is fetched more than one group ahead comes on top.

The working set is a multiple of what a block saves without recomputation.  `FORWARD_WORK`, `BACKWARD_WORK` and the
numbers of rows were counted in those programs.

Left out: that the links of a host's devices share its memory, a first fetch that runs beside the embedding, and
fragmentation.
"""

from dataclasses import dataclass

from jhpt.core.plan import Offload, Plan
from jhpt.core.rules import SETTINGS, Choices, check
from jhpt.core.work import size_of
from jhpt.planner.cost.activations import NOTHING
from jhpt.planner.cost.communication import all_gather, all_reduce, reduce_scatter
from jhpt.planner.cost.memory import FLOAT32
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.streaming import Bucket, Copies, Home, group_copies, in_line, periodic

HOMES = {"parameters": Home.PARAMETERS, "optimizer": Home.OPTIMIZER, "both": Home.BOTH}

FORWARD_WORK = 0.8
"""Relative to what a block saves: its hidden layer, and five tensors as wide as the residual stream."""

BACKWARD_WORK = {True: 2.2, False: 2.7}
"""By causality: a block's tensors with their gradients; in BERT also dropout masks and the derivative of GELU."""

WIDEST = 1 / 3
"""Share of a block's parameters in its largest matrix, one of the MLP: 4 D^2 of 12 D^2."""


@dataclass(frozen=True, kw_only=True)
class OffloadedStep:
    """Seconds of a step on a device.

    block: one block, all micro-batches.  size: number of blocks in a group, of which one is copied and the others are
    resident.  copies: of a group.  passes: forward and backward over all groups.  entry, exit: embedding and head,
    forward and backward, all micro-batches.  finish: reduction of the gradients of embedding and head, and their
    update.  causes: seconds by cause, whose sum is `seconds`.
    """

    block: Bucket
    groups: int
    size: int
    copies: Copies
    update_in_backward: bool
    passes: tuple[float, float]
    entry: tuple[float, float]
    exit: tuple[float, float]
    finish: float
    causes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.passes) + sum(self.entry) + sum(self.exit) + self.finish


def offloaded_step(plan: Plan, model: CostModel) -> OffloadedStep:
    """The step of a plan with `offload`.

    Raises:
      InputError: the blocks of the model are not all equal.
    """
    check_blocks(model)
    assert plan.offload is not None, "the plan offloads"
    stage, count, profile = plan.stages[0], plan.micro_batches, model.profile
    ranks, place = stage.devices, model.places.of(stage.members)
    group, blocks, size = place.data_group(1), model.num_layers - 2, 1 + plan.offload.resident
    forward, backward = model.compute_seconds(place.kinds, -(-plan.batch // count // ranks), 1)
    first, block, last = (model.index[at] for at in (0, 1, -1))
    works = [(count * forward[at], count * backward[at]) for at in (first, block, last)]
    entry, work, exit_ = ((float(one), float(other)) for one, other in works)
    again = work[0] * float(model.activations.repeated(plan.saved or NOTHING)[0][block]) if plan.recompute else 0.0
    numbers, rate = model.kinds[block].parameters, model.update_seconds(0, 1, place)
    gathered, scattered = all_gather(group, numbers * FLOAT32), reduce_scatter(group, numbers * FLOAT32)
    update, update_in_backward = numbers * rate / ranks, plan.offload.update_in_backward
    bucket = Bucket(
        forward=gathered + work[0] + (0.0 if update_in_backward else update),
        backward=gathered + again + work[1] + scattered + (update if update_in_backward else 0.0),
        weights=numbers * FLOAT32 / ranks,
        state=numbers * moment_bytes(model) / ranks,
    )
    home, groups = HOMES[plan.offload.kind], blocks // size
    copies = group_copies(bucket, place.host, home, update_in_backward)
    overlap = model.cluster.overlap and plan.offload.ahead > 0
    passes = (
        periodic(bucket, copies, groups, size, update_in_backward) if overlap else in_line(bucket, copies, groups, size)
    )
    embedding_and_head = model.kinds[first].parameters + model.kinds[last].parameters
    summed = all_reduce(group, embedding_and_head * profile.bytes_per_weight)
    return OffloadedStep(
        block=bucket,
        groups=groups,
        size=size,
        copies=copies,
        update_in_backward=update_in_backward,
        passes=passes,
        entry=entry,
        exit=exit_,
        finish=summed + embedding_and_head * rate,
        causes={
            "compute": blocks * sum(work) + sum(entry) + sum(exit_),
            "recomputation": blocks * again,
            "weights gathered": 2 * blocks * gathered,
            "gradients exposed": blocks * scattered + summed,
            "update": blocks * update + embedding_and_head * rate,
            "copies": sum(passes) - blocks * (bucket.forward + bucket.backward),
        },
    )


def blocks_of(model: CostModel) -> Choices:
    """CPU offload of this model's blocks, as the rules see it."""
    return Choices(
        offload="both",
        block_kinds=tuple(sorted(set(model.profile.layers[1:-1]))),
        place=model.profile.name,
        names=SETTINGS,
    )


def check_blocks(model: CostModel) -> None:
    """Refuses models whose layers between embedding and head differ, or of which there are none."""
    check(blocks_of(model))


def offloads(blocks: int, kinds: tuple[str, ...], update_in_backward: bool = False) -> list[Offload]:
    """All offloads of these kinds: group sizes that divide the number of blocks, with all but one block resident."""
    sizes = [size for size in range(1, blocks + 1) if blocks % size == 0]
    return [
        Offload(kind=kind, resident=size - 1, update_in_backward=update_in_backward) for kind in kinds for size in sizes
    ]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on a device.

    row: a rank's share of a block's parameters in float32.  whole: all of them.  moments: a rank's share of a block's
    optimizer state.  stream: the residual stream of the whole batch.  saved: by a block, for the whole batch.  work:
    what a block saves without recomputation, of a micro-batch.  logits: of a micro-batch, with their gradient.
    embedding_and_head: number of their parameters.  table: the larger of their tables, in the compute dtype.  entry,
    exit: what embedding and head save, of a micro-batch.  element: bytes of a number in the compute dtype.
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
    """Sizes of a plan with one stage and without tensor parallelism."""
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
        logits=micro * last.activation_bytes * (1 + profile.bytes_per_weight / profile.bytes_per_logit),
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
    """Bytes per parameter of the optimizer's moments: the profile's state without weight, gradient and float32
    weight."""
    wire = model.profile.bytes_per_weight
    return model.profile.state_bytes - 2 * wire - (FLOAT32 if wire < FLOAT32 else 0.0)


def host_bytes(plan: Plan, model: CostModel) -> dict[str, float]:
    """Bytes by cause on the host of the stage's fullest node."""
    sizes, offload = sizes_of(plan, model), _offload(plan)
    stage = plan.stages[0]
    here = max(model.places.of(stage.members).crossing)
    parameters, optimizer = _on_host(offload, sizes)
    return {
        ("weights" if offload.update_in_backward else "weights and gradients"): here * parameters,
        "optimizer": here * optimizer,
    }


def device_bytes(plan: Plan, model: CostModel) -> dict[str, float]:
    """Bytes by cause on a device, at the peak of a step."""
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
        resident_rows = 7 + (several and offload.kind != "both")
        return {"rows at work": resident_rows * sizes.row + 4 * further, "working set": work}
    rows = 6.4 if sizes.ranks == 1 else 4.0
    return {"rows at work": rows * sizes.row + 4 * further, "working set": max(work, (7 - rows) * sizes.row)}


def _head(sizes: Sizes, offload: Offload) -> dict[str, float]:
    rows = 3 if offload.update_in_backward else 0.5
    return {
        "rows at work": rows * sizes.row,
        "logits": sizes.logits + sizes.exit,
        "gradients of embedding and head": 2 * _accumulated_embedding_and_head(sizes),
    }


def _backward(sizes: Sizes, offload: Offload) -> dict[str, float]:
    several, copy = sizes.micro_batches > 1, sizes.whole * sizes.element / FLOAT32
    work = BACKWARD_WORK[sizes.causal] * sizes.work + _gathered(sizes)
    packed = sizes.whole + copy + sizes.row
    # A gradient that a single rank uses immediately is never packed into a row.
    used = offload.update_in_backward and not several and sizes.ranks == 1
    rows = {"both": 6.5, "optimizer": 6.5, "parameters": 4.5}[offload.kind] if offload.update_in_backward else 1.0
    return {
        "rows at work": rows * sizes.row + max(offload.ahead - 1, 0) * sizes.row,
        "working set": max(work, sizes.row if used else packed) + (copy + sizes.whole if several else 0.0),
        "gradients of embedding and head": _accumulated_embedding_and_head(sizes),
    }


def _gathered(sizes: Sizes) -> float:
    """Bytes of a gathered row of weights.  Several micro-batches need only the copy in the compute dtype."""
    return sizes.whole if sizes.ranks > 1 and sizes.micro_batches == 1 else 0.0


def _copy(sizes: Sizes) -> float:
    """Bytes of weights in the compute dtype: of the matrix in use, or with several micro-batches of the whole block."""
    return sizes.whole * sizes.element / FLOAT32 * (1.0 if sizes.micro_batches > 1 else WIDEST)


def _accumulated_embedding_and_head(sizes: Sizes) -> float:
    return FLOAT32 * sizes.embedding_and_head if sizes.micro_batches > 1 else 0.0


def _on_host(offload: Offload, sizes: Sizes) -> tuple[float, float]:
    """Bytes of a rank on the host: (weights with waiting gradients, optimizer state)."""
    streamed = sizes.blocks // (1 + offload.resident)
    parameters, optimizer = offload.kind in ("parameters", "both"), offload.kind in ("optimizer", "both")
    return streamed * _parameters(offload, sizes) * parameters, streamed * sizes.moments * optimizer


def _parameters(offload: Offload, sizes: Sizes) -> float:
    """Bytes of a block's weights, and of its gradient if that waits for the next step."""
    return sizes.row * (1 if offload.update_in_backward else 2)


def _offload(plan: Plan) -> Offload:
    assert plan.offload is not None, "the plan offloads"
    return plan.offload
