"""What a plan costs whose blocks live on the host: `estimate` for plans with `offload`.

Blocks fall into equal groups, of one that comes and goes and `resident` that stay.  A step is the embedding, a forward
pass over the groups, the head, a backward pass, the embedding's, and the update of the ends; the passes take what
`stream` says.  All micro-batches go through a block before the next one's turn, so a block is copied once in a pass,
however many they are.  Of a block, on one of d data ranks with M micro-batches:

    forward     the optimizer's step on its share; all_gather of its weights in float32; M forward passes
    backward    all_gather of its weights; M backward passes, with recomputation M forward ones before; reduce_scatter;
                the optimizer's step here, where blocks take it at once

Collectives are in line with the products.  Gradients of the ends are summed when all is computed.  ZeRO-1 changes
nothing: rows are shared out anyway, and the ends are whole on every rank.  Where a cluster overlaps nothing copies are
in line too.

Left out: that hosts' memory is shared by their devices' links, and a first fetch that runs beside the embedding.
"""

from dataclasses import dataclass

from jhpt.core.errors import InputError
from jhpt.core.plan import Offload, Plan
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

    copies: of a group.
    block: a block, all micro-batches.  home: of a group's first block, the other size - 1 stay.  passes: forward and
    backward, over all groups.  entry, exit: forward and backward, all micro-batches.  finish: sums of the ends'
    gradients, and their update.  causes: they sum to `seconds`.
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
        """Of the step."""
        return sum(self.passes) + sum(self.entry) + sum(self.exit) + self.finish


def offloaded_step(plan: Plan, model: CostModel) -> OffloadedStep:
    """The step of a plan with `offload`.

    Raises:
      InputError: the blocks of the model differ, so one is not as another.
    """
    check_blocks(model)
    assert plan.offload is not None, "asked for"
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
    beside = model.cluster.overlap and plan.offload.ahead > 0
    passes = (
        periodic(bucket, copies, groups, size, update_in_backward) if beside else in_line(bucket, copies, groups, size)
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


def check_blocks(model: CostModel) -> None:
    """Refuses models whose layers between the ends differ, or of which there are none."""
    between = sorted(set(model.profile.layers[1:-1]))
    if len(between) != 1:
        raise InputError(
            f"layers live on the host where all between the ends are alike; {model.profile.name} has "
            f"{' and '.join(between) or 'none'}; leave out offload"
        )


def offloads(blocks: int, kinds: tuple[str, ...], update_in_backward: bool = False) -> list[Offload]:
    """All there are of these kinds: of each group of a size that divides the blocks, all but one stay."""
    sizes = [size for size in range(1, blocks + 1) if blocks % size == 0]
    return [
        Offload(kind=kind, resident=size - 1, update_in_backward=update_in_backward) for kind in kinds for size in sizes
    ]
