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
from jhpt.planner.collectives import all_gather, all_reduce, reduce_scatter
from jhpt.planner.costs import CostModel
from jhpt.planner.offload.memory import moment_bytes
from jhpt.planner.offload.stream import Bucket, Copies, Home, group_copies, in_line, periodic
from jhpt.planner.program import FLOAT32
from jhpt.planner.recompute.names import NOTHING

HOMES = {"parameters": Home.PARAMETERS, "optimizer": Home.OPTIMIZER, "both": Home.BOTH}


@dataclass(frozen=True, kw_only=True)
class HostedStep:
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
    at_once: bool
    passes: tuple[float, float]
    entry: tuple[float, float]
    exit: tuple[float, float]
    finish: float
    causes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.passes) + sum(self.entry) + sum(self.exit) + self.finish


def hosted_step(plan: Plan, model: CostModel) -> HostedStep:
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
    again = work[0] * float(model.activations.repeated(plan.kept or NOTHING)[0][block]) if plan.recompute else 0.0
    numbers, rate = model.kinds[block].parameters, profile.update_seconds * place.slowdown
    gathered, scattered = all_gather(group, numbers * FLOAT32), reduce_scatter(group, numbers * FLOAT32)
    update, at_once = numbers * rate / ranks, plan.offload.at_once
    bucket = Bucket(
        forward=gathered + work[0] + (0.0 if at_once else update),
        backward=gathered + again + work[1] + scattered + (update if at_once else 0.0),
        weights=numbers * FLOAT32 / ranks,
        state=numbers * moment_bytes(model) / ranks,
    )
    home, groups = HOMES[plan.offload.what], blocks // size
    copies = group_copies(bucket, model.cluster.nodes[0].host, home, at_once)
    beside = model.cluster.overlap and plan.offload.ahead > 0
    passes = periodic(bucket, copies, groups, size, at_once) if beside else in_line(bucket, copies, groups, size)
    ends = model.kinds[first].parameters + model.kinds[last].parameters
    summed = all_reduce(group, ends * profile.bytes_per_weight)
    return HostedStep(
        block=bucket,
        home=home,
        groups=groups,
        size=size,
        copies=copies,
        at_once=at_once,
        passes=passes,
        entry=entry,
        exit=exit_,
        finish=summed + ends * rate,
        causes={
            "compute": blocks * sum(work) + sum(entry) + sum(exit_),
            "recomputation": blocks * again,
            "weights gathered": 2 * blocks * gathered,
            "gradients exposed": blocks * scattered + summed,
            "update": blocks * update + ends * rate,
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


def offloads(blocks: int, kinds: tuple[str, ...], at_once: bool = False) -> list[Offload]:
    """All there are of these kinds: of each group of a size that divides the blocks, all but one stay."""
    sizes = [size for size in range(1, blocks + 1) if blocks % size == 0]
    return [Offload(what=what, resident=size - 1, at_once=at_once) for what in kinds for size in sizes]
