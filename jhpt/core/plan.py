"""How to train: the one bridge between planning and running.  Plain data, JSON in and out, readable by a person.

What is a plan at all, whatever the model and the devices are, `check_plan` says, to the planner and to the runtime.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from jhpt.core.cluster import parse, read_tree, write_json
from jhpt.core.config import (
    Compression,
    Config,
    Count,
    GradientCompression,
    MemoryConfig,
    NonNegative,
    Section,
    check_names,
)
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Zero = Literal[0, 1, 3]
Origin = Literal["hand", "auto", "given"]
OffloadKind = Literal["parameters", "optimizer", "both"]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Run(Section):
    """Neighbouring layers of one stage that are treated alike."""

    layers: Count
    tensor: Count = Field(1, description="tensor degree; the other devices of the stage are data parallel")
    sample_chunks: Count = Field(
        1, description="parts of a device's samples: the sums of one travel while another is computed"
    )


class Chunk(Section):
    """A contiguous range of layers `[first, first + sum(layers))` that a stage holds."""

    first: NonNegativeInt
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.first + sum(run.layers for run in self.runs)

    @property
    def tensor(self) -> tuple[int, ...]:
        """The tensor degree of every layer."""
        return tuple(run.tensor for run in self.runs for _ in range(run.layers))

    @property
    def sample_chunks(self) -> tuple[int, ...]:
        """Into how many parts every layer cuts its samples."""
        return tuple(run.sample_chunks for run in self.runs for _ in range(run.layers))


class Stage(Section):
    """Devices `[device, device + devices)` and the layers they hold: one chunk, or several when interleaved."""

    device: NonNegativeInt
    devices: Count
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]


class Offload(Section):
    """What of the blocks lives on the host, between its turns on the device."""

    kind: OffloadKind = Field("both", description="weights and gradients, the optimizer's state, or all of it")
    resident: NonNegativeInt = Field(0, description="after each block that comes and goes, so many stay on the device")
    ahead: NonNegativeInt = Field(1, description="how many groups of blocks ahead of their use they are fetched")
    update_in_backward: bool = Field(
        False, description="blocks take their steps in the backward pass, not when they are fetched the next time"
    )


class SavedTensors(Section):
    """Named tensors of a block that are there for its backward pass; the others it computes again.

    The input of a block (`residual_in`) is always there, on the device unless `host` names it.
    """

    device: tuple[str, ...] = Field((), description="where they were computed")
    host: tuple[str, ...] = Field((), description="in its pinned memory, from one pass to the other")

    def text(self) -> str:
        """`qkv and mlp_hidden, on the host residual_in`."""
        parts = [" and ".join(self.device), f"on the host {' and '.join(self.host)}" if self.host else ""]
        return ", ".join(filter(None, parts)) or "nothing"


class Plan(Section):
    """A complete decision.  `stages` are in pipeline order, on ascending devices; devices left over stay idle."""

    model: str
    cluster: str
    device: str | None = Field(None, description="what its devices are called; null: any")
    space: Literal["spmd", "general"] = "spmd"
    batch: Count = Field(description="samples per step")
    micro_batches: Count
    schedule: Schedule = "1f1b"
    zero: Zero = 0
    prefetch: NonNegativeInt = Field(1, description="ZeRO: how many layers ahead of their use weights are gathered")
    sequence: bool = Field(False, description="cut activations between tensor-parallel products along the sequence")
    recompute: bool = Field(False, description="keep only the input of every layer, compute the rest again")
    saved: SavedTensors | None = Field(None, description="with recompute: what of a block is kept beside that")
    offload: Offload | None = Field(None, description="null: everything lives on the devices")
    compression: Compression = Compression()
    gradient_compression: GradientCompression = GradientCompression()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    origin: Origin | None = Field(None, description="how a run came to it; null: no run has taken it yet")
    seconds: NonNegative | None = Field(None, description="predicted time of a step")
    lower_bound: NonNegative | None = Field(None, description="no plan of the space is faster than this")

    @property
    def devices(self) -> int:
        """Devices that work."""
        return sum(stage.devices for stage in self.stages)

    @property
    def chunks(self) -> int:
        """Chunks per stage."""
        return len(self.stages[0].chunks)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees in use, ascending."""
        return tuple(sorted({run.tensor for stage in self.stages for chunk in stage.chunks for run in chunk.runs}))

    @property
    def replicas(self) -> int:
        """Data ranks of the layers that have most."""
        return max(stage.devices // run.tensor for stage in self.stages for chunk in stage.chunks for run in chunk.runs)

    @property
    def sample_chunks(self) -> tuple[int, ...]:
        """The numbers of sample chunks in use, ascending."""
        return tuple(
            sorted({run.sample_chunks for stage in self.stages for chunk in stage.chunks for run in chunk.runs})
        )

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Reads JSON; InputError names the file and every fault."""
        return parse(Plan, read_tree(path), path)


def check_plan(plan: Plan, num_layers: int) -> None:
    """Refuses what is no plan for so many layers, whatever the model and the devices are.

    Args:
      num_layers: embedding and head included.

    Raises:
      InputError: the first fault that was found, with the values that make it one.
    """
    _check_numbers(plan, num_layers)
    _check_chunks(plan, num_layers)
    _check_devices(plan)
    if plan.saved is not None:
        _check_kept(plan, plan.saved)
    if plan.space == "spmd":
        check_program(plan)
    elif plan.compression.on or plan.sample_chunks != (1,) or plan.offload is not None or plan.saved is not None:
        raise InputError(
            f"sample chunks, compression, offload and names of what is kept are what one program does, and "
            f"space={plan.space} has many; leave them out, or take space=spmd"
        )


def check_program(plan: Plan) -> None:
    """Refuses stages that one SPMD program cannot run.

    Raises:
      InputError: stages or tensor degrees that differ where they must not, or a batch that does not divide.
    """
    sizes, degrees = [stage.devices for stage in plan.stages], list(plan.degrees)
    if len(set(sizes)) > 1:
        raise InputError(
            f"space=spmd needs the same number of devices in every stage, found {sizes}; make the stages equal, or "
            "price them with space=general"
        )
    starts = [stage.device for stage in plan.stages]
    if starts != [position * sizes[0] for position in range(len(sizes))]:
        raise InputError(
            f"space=spmd needs stages of {sizes[0]} devices on neighbouring devices, from device 0 on, found them to "
            f"begin at {starts}"
        )
    if plan.compression.on and plan.sequence:
        raise InputError("compression sums whole sequences; take sequence out of the plan, or compression")
    if plan.gradient_compression.on and plan.zero == 3:
        raise InputError(
            "gradient_compression sums a gradient once a step, and zero=3 in every micro-batch, layer by layer; "
            "use zero=1, or take gradient_compression out of the plan"
        )
    if plan.offload is not None:
        _check_offload(plan, plan.offload)
    if len(sizes) > 1 and len(degrees) > 1:
        raise InputError(
            f"a pipeline of space=spmd needs one tensor degree, found {degrees}; use one, or price them with "
            "space=general"
        )
    if len(sizes) > 1 and len(cuts := plan.sample_chunks) > 1:
        raise InputError(
            f"a pipeline of space=spmd needs one number of sample chunks, found {list(cuts)}; use one everywhere"
        )
    for low, high in itertools.pairwise(degrees):
        if high % low:
            raise InputError(f"tensor degrees {low} and {high} cannot share a mesh: {low} does not divide {high}")
    micro_batch = plan.batch // plan.micro_batches
    for stage, layer, tensor in _placed(plan):
        if micro_batch % (data := stage.devices // tensor):
            raise InputError(
                f"layer {layer}: a micro-batch of {micro_batch} is not divisible by data={data}; change the batch, "
                "micro_batches or the tensor degree"
            )


def _check_offload(plan: Plan, offload: Offload) -> None:
    unable = {
        "pipeline stages": len(plan.stages) > 1,
        "tensor parallelism": plan.degrees != (1,),
        "sequence": plan.sequence,
        "compressed gradients": plan.gradient_compression.on,
        "tensors kept on the host": plan.saved is not None and bool(plan.saved.host),
    }
    if found := [name for name, there in unable.items() if there]:
        raise InputError(
            f"blocks cannot live on the host under {' and '.join(found)}; leave that out, or memory.offload=off"
        )
    blocks, group = plan.stages[0].chunks[0].stop - 2, 1 + offload.resident
    if offload.ahead > max(blocks // group, 1):
        raise InputError(f"offload.ahead={offload.ahead} is further than there are groups of blocks; use 1 as a rule")
    if blocks < 1 or blocks % group:
        raise InputError(
            f"{blocks} blocks do not fall into groups of one that comes and goes and {offload.resident} that stay; "
            f"use resident={one_of(size - 1 for size in divisors(max(blocks, 1)))}"
        )


def _check_kept(plan: Plan, saved: SavedTensors) -> None:
    if not plan.recompute:
        raise InputError("kept says what recomputation leaves out, and recompute is false; set it, or leave kept out")
    names = [*saved.device, *saved.host]
    try:
        check_names(names, "saved")
    except ValueError as error:
        raise InputError(str(error)) from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"kept names {' and '.join(twice)} twice; a tensor is on the device or on the host")


def _check_numbers(plan: Plan, num_layers: int) -> None:
    if plan.batch % plan.micro_batches:
        raise InputError(
            f"batch={plan.batch} is not divisible by micro_batches={plan.micro_batches}; "
            f"use {one_of(divisors(plan.batch))}"
        )
    if plan.prefetch > num_layers:
        raise InputError(
            f"prefetch={plan.prefetch} is further ahead than there are layers; use {num_layers} or less, 1 as a rule"
        )


def _check_chunks(plan: Plan, num_layers: int) -> None:
    stages, counts = len(plan.stages), [len(stage.chunks) for stage in plan.stages]
    if len(set(counts)) > 1:
        raise InputError(f"all stages need the same number of chunks, found {counts}")
    order = [plan.stages[s].chunks[c] for c in range(plan.chunks) for s in range(stages)]
    edges = [0, *(chunk.stop for chunk in order)]
    if [chunk.first for chunk in order] != edges[:-1] or edges[-1] != num_layers:
        spans = ", ".join(f"{chunk.first} to {chunk.stop - 1}" for chunk in order)
        raise InputError(
            f"the chunks must cover layers 0 to {num_layers - 1} in order, the first one of every stage, then the "
            f"second ones and so on; found {spans}"
        )
    if plan.chunks > 1 and stages == 1:
        raise InputError(f"chunks need several stages, found {plan.chunks} in a single one; join them into one chunk")
    if (plan.schedule == "interleaved") != (plan.chunks > 1):
        raise InputError(
            f"schedule={plan.schedule} with {plan.chunks} chunk(s) per stage: interleaved needs several, "
            "1f1b and gpipe one"
        )
    if plan.chunks > 1 and plan.micro_batches % stages:
        raise InputError(
            f"interleaved over {stages} stages needs micro_batches={plan.micro_batches} divisible by {stages}"
        )


def _check_devices(plan: Plan) -> None:
    free = 0
    for stage in plan.stages:
        if stage.device < free:
            raise InputError(f"stages overlap on device {stage.device}, or are not on ascending devices")
        free = stage.device + stage.devices
    for stage, layer, tensor in _placed(plan):
        if stage.devices % tensor:
            raise InputError(
                f"layer {layer}: tensor={tensor} does not divide the {stage.devices} devices of its stage; "
                f"use {one_of(divisors(stage.devices))}"
            )


def _placed(plan: Plan) -> Iterator[tuple[Stage, int, int]]:
    """(stage, first layer, tensor degree) of every run."""
    for stage in plan.stages:
        for chunk in stage.chunks:
            layer = chunk.first
            for run in chunk.runs:
                yield stage, layer, run.tensor
                layer += run.layers


def runs_of(tensor: Sequence[int], sample_chunks: Sequence[int] | None = None) -> tuple[Run, ...]:
    """Equal neighbours joined, by the tensor degree of every layer and the number of its sample chunks (None: one)."""
    layers = zip(tensor, sample_chunks or [1] * len(tensor), strict=True)
    return tuple(
        Run(layers=len(list(alike)), tensor=degree, sample_chunks=chunks)
        for (degree, chunks), alike in itertools.groupby(layers)
    )


def plan_by_hand(config: Config, devices: int) -> Plan:
    """The plan that the section `parallel` describes, on so many devices.

    Blocks are divided evenly, the first chunks taking one more where they do not divide; embedding and head go with
    the first and the last block.

    Raises:
      InputError: more devices asked for than there are, a batch that does not divide, or something that is left to the
        planner.
    """
    parallel, batch = config.parallel, config.data.batch_size
    pipe, tensor, pieces = parallel.pipe, parallel.tensor, parallel.micro_batches
    data = parallel.data or max(devices // (pipe * tensor), 1)
    used = pipe * data * tensor
    if parallel.compression.auto:
        raise InputError(
            "parallel.compression=auto leaves compression to the planner, which parallel=auto asks; "
            "set that, or say how: parallel.compression.bits=8"
        )
    asked = f"parallel.pipe={pipe} x " * (pipe > 1) + f"parallel.data={data} x parallel.tensor={tensor}"
    if used > devices:
        raise InputError(
            f"{asked} needs {used} devices, and there {'is' if devices == 1 else 'are'} {devices}; "
            f"lower them, or on CPU set JAX_NUM_CPU_DEVICES={used}"
        )
    if batch % (data * pieces):
        fitting = [d for d in divisors(devices // (pipe * tensor)) if batch % (d * pieces) == 0]
        remedy = f"set parallel.data to {one_of(fitting)}" if fitting else "lower parallel.micro_batches"
        raise InputError(
            f"data.batch_size={batch} is not divisible by {data} data-parallel devices x {pieces} micro-batches; "
            f"{remedy}, or change the batch"
        )
    return Plan(
        model=config.name,
        cluster=f"{devices} devices",
        batch=batch,
        micro_batches=pieces,
        schedule="interleaved" if parallel.chunks > 1 else parallel.schedule,
        zero=parallel.zero,
        **recomputed(config.memory),
        offload=_offload_by_hand(config),
        compression=parallel.compression.how,
        gradient_compression=parallel.gradient_compression,
        sequence=parallel.sequence,
        origin="hand",
        stages=_even_stages(
            config.model.num_layers, pipe, parallel.chunks, data * tensor, tensor, parallel.sample_chunks
        ),
    )


def recomputed(memory: MemoryConfig) -> dict[str, Any]:
    """What the section `memory` says of recomputation, as a plan says it; of `auto`, nothing is computed again."""
    how = memory.recompute
    return {
        "recompute": how not in ("auto", "none"),
        "saved": None if isinstance(how, str) else SavedTensors(device=how),
    }


def _offload_by_hand(config: Config) -> Offload | None:
    """What the section `memory` says; of `auto`, nothing."""
    kind = config.memory.offload
    return (
        None if kind in ("auto", "off") else Offload(kind=kind, update_in_backward=config.optimizer.update_in_backward)
    )


def _even_stages(
    blocks: int, pipe: int, chunks: int, devices: int, tensor: int, sample_chunks: int
) -> tuple[Stage, ...]:
    parts = pipe * chunks
    counts = [blocks // parts + (part < blocks % parts) for part in range(parts)]
    edges = [0, *(1 + sum(counts[: part + 1]) for part in range(parts - 1)), blocks + 2]
    return tuple(
        Stage(
            device=stage * devices,
            devices=devices,
            chunks=tuple(
                Chunk(
                    first=edges[part],
                    runs=(Run(layers=edges[part + 1] - edges[part], tensor=tensor, sample_chunks=sample_chunks),),
                )
                for part in range(stage, parts, pipe)
            ),
        )
        for stage in range(pipe)
    )
