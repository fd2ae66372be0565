"""What every plan has to satisfy, whatever the model and the devices; the planner and the runtime check it.

This module checks that stages, chunks and numbers form a plan.  `jhpt.core.rules` says which choices exclude each
other.
"""

import itertools
from dataclasses import replace

from jhpt.core.config import OptimizerConfig
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.memory_config import check_names
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.plan import Offload, Plan, SavedTensors
from jhpt.core.rules import Choices, check


def choices_of(plan: Plan) -> Choices:
    """What the plan chooses, as the rules see it."""
    return Choices(
        space=plan.space,
        batch=plan.batch,
        stages=len(plan.stages),
        chunks=plan.chunks,
        sample_chunks=plan.sample_chunks,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        tensor=plan.degrees,
        zero=plan.zero,
        zero_ranks=plan.zero_ranks,
        sequence=plan.sequence,
        compression=plan.compression.on,
        gradient_compression=plan.gradient_compression.on,
        offload=plan.offload.kind if plan.offload else None,
        recompute=plan.recompute,
        saved=plan.saved is not None,
        saved_in_host_memory=_on_host(plan),
        other_blocks=plan.other_blocks is not None,
    )


def _on_host(plan: Plan) -> tuple[str, ...]:
    """The names of activations that any blocks offload."""
    first, others = plan.saved, plan.other_blocks.saved if plan.other_blocks else None
    return (*(first.host if first else ()), *(others.host if others else ()))


def with_optimizer(choices: Choices, offload: Offload, optimizer: OptimizerConfig) -> Choices:
    """The choices of an offloaded plan with those of the optimizer that updates its blocks."""
    return replace(
        choices,
        optimizer=optimizer.name,
        optimizer_offloads=optimizer_numbers(optimizer.name).offloaded,
        update_in_backward=offload.update_in_backward,
        clip=optimizer.clip,
        clip_allows_update_in_backward=None if optimizer.clip_norm is None else optimizer.update_in_backward,
    )


def check_plan(plan: Plan, num_layers: int) -> None:
    """Refuses what is no plan for so many layers, whatever the model and the devices.

    Args:
      num_layers: with embedding and head.

    Raises:
      InputError: the first fault, with the values that cause it and a remedy.
    """
    _check_cover(plan, num_layers)
    if plan.prefetch > num_layers:
        raise InputError(
            f"prefetch={plan.prefetch} is further ahead than there are layers; use {num_layers} or less, 1 as a rule"
        )
    check(choices_of(plan))
    _check_devices(plan)
    _check_samples(plan)
    for saved in (plan.saved, plan.other_blocks.saved if plan.other_blocks else None):
        if saved is not None:
            _check_saved(saved)
    if plan.other_blocks is not None and plan.other_blocks.after >= num_layers - 2:
        raise InputError(
            f"other_blocks begin after {plan.other_blocks.after} blocks, and there are {num_layers - 2}; use a smaller "
            "number, or leave other_blocks out"
        )
    if plan.space == "spmd":
        _check_program(plan)


def check_program(plan: Plan) -> None:
    """Refuses stages that one SPMD program cannot run.

    Raises:
      InputError: a broken rule, stages that differ where they must not, or a batch that does not divide.
    """
    check(choices_of(plan))
    _check_program(plan)


def check_stages_run(plan: Plan) -> None:
    """Refuses what programs of stages (space=general) cannot run.

    Raises:
      InputError: a broken rule.
    """
    check(replace(choices_of(plan), runs=True))
    for stage in plan.stages:
        check(Choices(tensor=stage.degrees))


def stages_run(plan: Plan) -> bool:
    """Whether `check_stages_run` lets the plan pass."""
    try:
        check_stages_run(plan)
    except InputError:
        return False
    return True


def _check_program(plan: Plan) -> None:
    sizes = [stage.devices for stage in plan.stages]
    if len(set(sizes)) > 1:
        raise InputError(
            f"space=spmd needs the same number of devices in every stage, found {sizes}; make the stages equal, or "
            "price them with space=general"
        )
    starts = [stage.device for stage in plan.stages]
    ordered = starts == [position * sizes[0] for position in range(len(sizes))]
    if not ordered or any(stage.apart for stage in plan.stages):
        raise InputError(
            f"space=spmd needs stages of {sizes[0]} devices on neighbouring devices, ascending from device 0 on, found "
            f"them to begin at {starts}; move them there"
        )
    if plan.offload is not None:
        _check_groups(plan, plan.offload)
    if plan.zero_ranks is not None:
        _check_hybrid(plan, plan.zero_ranks)
    micro_batch = plan.batch // plan.micro_batches
    for stage, layer, run in plan.placed:
        if micro_batch % (data := stage.devices // run.tensor):
            raise InputError(
                f"layer {layer}: a micro-batch of {micro_batch} is not divisible by data={data}; change the batch, "
                "micro_batches or the tensor degree"
            )


def _check_hybrid(plan: Plan, ranks: int) -> None:
    if len(plan.degrees) > 1:
        raise InputError(
            f"zero_ranks={ranks} needs one tensor degree, because layers of several have different data ranks, found "
            f"{list(plan.degrees)}; use one, or leave zero_ranks out"
        )
    if ranks == 1 or plan.replicas % ranks:
        use = f"use {one_of(divisors(plan.replicas)[1:])}, or leave it out" if plan.replicas > 1 else "leave it out"
        raise InputError(f"zero_ranks={ranks} does not cut {plan.replicas} data ranks into equal groups; {use}")


def _check_groups(plan: Plan, offload: Offload) -> None:
    """Blocks divide into groups of one block that is offloaded and `resident` blocks that are not."""
    blocks, group = plan.stages[0].chunks[0].stop - 2, 1 + offload.resident
    if offload.ahead > (groups := max(blocks // group, 1)):
        raise InputError(
            f"offload.ahead={offload.ahead} is further ahead than there are groups of blocks; use {groups} or less, 1 "
            "as a rule"
        )
    if blocks < 1 or blocks % group:
        raise InputError(
            f"{blocks} blocks do not fall into groups of one offloaded block and {offload.resident} resident ones; "
            f"use offload.resident={one_of(size - 1 for size in divisors(max(blocks, 1)))}"
        )


def _check_saved(saved: SavedTensors) -> None:
    names = [*saved.device, *saved.host]
    try:
        check_names(names, "saved")
    except ValueError as error:
        raise InputError(str(error)) from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"saved names {' and '.join(twice)} twice; an activation is saved on the device or on the host, so leave "
            "out the one or the other"
        )


def _check_cover(plan: Plan, num_layers: int) -> None:
    """Chunks hold all layers, in the order in which a sample passes them."""
    counts = [len(stage.chunks) for stage in plan.stages]
    if len(set(counts)) > 1:
        raise InputError(f"all stages need the same number of chunks, found {counts}; give them {min(counts)} each")
    order = [stage.chunks[chunk] for chunk in range(plan.chunks) for stage in plan.stages]
    edges = [0, *(chunk.stop for chunk in order)]
    if [chunk.first for chunk in order] != edges[:-1] or edges[-1] != num_layers:
        spans = ", ".join(f"{chunk.first} to {chunk.stop - 1}" for chunk in order)
        raise InputError(
            f"the chunks must cover layers 0 to {num_layers - 1} in order, the first chunk of every stage, then the "
            f"second ones and so on; found {spans}"
        )


def _check_devices(plan: Plan) -> None:
    runs = sorted(
        (first, first + count)
        for stage in plan.stages
        for first, count in ([(each, 1) for each in stage.apart] if stage.apart else [(stage.device, stage.devices)])
    )
    for (_, stop), (first, _) in itertools.pairwise(runs):
        if first < stop:
            raise InputError(f"stages overlap on device {first}; give each stage devices of its own")
    for stage, layer, run in plan.placed:
        if stage.devices % run.tensor:
            raise InputError(
                f"layer {layer}: tensor={run.tensor} does not divide the {stage.devices} devices of its stage; "
                f"use {one_of(divisors(stage.devices))}"
            )


def _check_samples(plan: Plan) -> None:
    """Samples by data rank are those of a micro-batch, on one stage of one tensor degree that has its own program."""
    for stage in plan.stages:
        if stage.samples is None:
            continue
        given = f"samples={list(stage.samples)}"
        if plan.space != "general" or len(plan.stages) > 1:
            raise InputError(
                f"{given} by data rank are for space=general with one stage, found space={plan.space} with "
                f"{len(plan.stages)}; leave samples out, so that all ranks have the same number"
            )
        if len(stage.degrees) > 1:
            raise InputError(
                f"{given} by data rank need one tensor degree, because layers of several have different data ranks, "
                f"found {list(stage.degrees)}; use one, or leave samples out"
            )
        ranks, micro_batch = stage.devices // stage.degrees[0], plan.batch // plan.micro_batches
        if len(stage.samples) != ranks or sum(stage.samples) != micro_batch:
            raise InputError(
                f"{given} must name the samples of each of {ranks} data ranks, together the {micro_batch} of a "
                f"micro-batch; they name {len(stage.samples)} ranks with {sum(stage.samples)} samples"
            )
