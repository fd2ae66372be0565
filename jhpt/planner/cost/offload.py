"""Seconds of a plan whose blocks are offloaded to the host: `estimate` for plans with `offload`.

Blocks form equal groups, of which one block is copied and `resident` others stay on the device.  A step is the
embedding, a forward pass over the groups, the head, a backward pass over the groups, the embedding's backward pass, and
the update of embedding and head.  The passes over groups take what `streaming` states.  All micro-batches pass through
a block before the next block begins, so a block is copied once per pass, however many micro-batches there are.  For a
block on one of d data ranks with M micro-batches:

    forward     the optimizer's step on the rank's share; all-gather of the weights in float32; M forward passes
    backward    all-gather of the weights; M backward passes, with recomputation each after a forward pass;
                reduce-scatter; the optimizer's step, if blocks are updated in the backward pass

Collectives run in line with the computation.  Gradients of embedding and head are reduced after everything is
computed. ZeRO-1 changes nothing: the blocks' state is sharded anyway, and embedding and head are whole on every rank.
On a cluster without overlap copies run in line too.

Left out: that the links of a host's devices share its memory, and a first fetch that runs beside the embedding.
"""

from dataclasses import dataclass

from jhpt.core.plan import Offload, Plan
from jhpt.core.rules import SETTINGS, Choices, check
from jhpt.planner.cost.communication import all_gather, all_reduce, reduce_scatter
from jhpt.planner.cost.memory import FLOAT32
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload_memory import moment_bytes
from jhpt.planner.cost.recompute import NOTHING
from jhpt.planner.cost.streaming import Bucket, Copies, Home, group_copies, in_line, periodic

HOMES = {"parameters": Home.PARAMETERS, "optimizer": Home.OPTIMIZER, "both": Home.BOTH}


@dataclass(frozen=True, kw_only=True)
class OffloadedStep:
    """Seconds of a step on a device.

    block: one block, all micro-batches.  home: of a group's first block; the other size - 1 are resident.  copies: of a
    group.  passes: forward and backward over all groups.  entry, exit: embedding and head, forward and backward, all
    micro-batches.  finish: reduction of the gradients of embedding and head, and their update.  causes: seconds by
    cause, whose sum is `seconds`.
    """

    block: Bucket
    home: Home
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
    ranks, place = stage.devices, model.places.at(stage.device, stage.devices)
    group, blocks, size = place.data_group(1), model.num_layers - 2, 1 + plan.offload.resident
    forward, backward = model.compute_seconds(-(-plan.batch // count // ranks), 1)
    first, block, last = (model.index[at] for at in (0, 1, -1))
    works = [
        (count * place.slowdown * forward[at], count * place.slowdown * backward[at]) for at in (first, block, last)
    ]
    entry, work, exit_ = ((float(one), float(other)) for one, other in works)
    again = work[0] * float(model.activations.repeated(plan.saved or NOTHING)[0][block]) if plan.recompute else 0.0
    numbers, rate = model.kinds[block].parameters, profile.update_seconds * place.slowdown
    gathered, scattered = all_gather(group, numbers * FLOAT32), reduce_scatter(group, numbers * FLOAT32)
    update, update_in_backward = numbers * rate / ranks, plan.offload.update_in_backward
    bucket = Bucket(
        forward=gathered + work[0] + (0.0 if update_in_backward else update),
        backward=gathered + again + work[1] + scattered + (update if update_in_backward else 0.0),
        weights=numbers * FLOAT32 / ranks,
        state=numbers * moment_bytes(model) / ranks,
    )
    home, groups = HOMES[plan.offload.kind], blocks // size
    copies = group_copies(bucket, model.cluster.nodes[0].host, home, update_in_backward)
    overlap = model.cluster.overlap and plan.offload.ahead > 0
    passes = (
        periodic(bucket, copies, groups, size, update_in_backward) if overlap else in_line(bucket, copies, groups, size)
    )
    embedding_and_head = model.kinds[first].parameters + model.kinds[last].parameters
    summed = all_reduce(group, embedding_and_head * profile.bytes_per_weight)
    return OffloadedStep(
        block=bucket,
        home=home,
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
