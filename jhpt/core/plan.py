"""How to train: the one bridge between planning and running.  Plain data, JSON in and out, readable by a person."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jhpt.core.cluster import parse, read_tree, write_json
from jhpt.core.config import Config, Count, NonNegative, Section, divisors, one_of
from jhpt.core.errors import InputError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Zero = Literal[0, 1, 3]
Whole = Annotated[int, Field(ge=0)]


class Run(Section):
    """Neighbouring layers of one stage that are treated alike."""

    layers: Count
    tensor: Count = Field(1, description="tensor degree; the other devices of the stage are data parallel")


class Chunk(Section):
    """A contiguous range of layers `[first, first + sum(layers))` that a stage holds."""

    first: Whole
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.first + sum(run.layers for run in self.runs)

    @property
    def tensor(self) -> tuple[int, ...]:
        """The tensor degree of every layer."""
        return tuple(run.tensor for run in self.runs for _ in range(run.layers))


class Stage(Section):
    """Devices `[device, device + devices)` and the layers they hold: one chunk, or several when interleaved."""

    device: Whole
    devices: Count
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]


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
    prefetch: Whole = Field(1, description="ZeRO: how many layers ahead of their use weights are gathered")
    sequence: bool = Field(False, description="cut activations between tensor-parallel products along the sequence")
    recompute: bool = Field(False, description="keep only the input of every layer, compute the rest again")
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
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

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Reads JSON; InputError names the file and every fault."""
        return parse(Plan, read_tree(path), path)


def runs_of(tensor: list[int]) -> tuple[Run, ...]:
    """Equal neighbours joined."""
    runs: list[Run] = []
    for degree in tensor:
        if runs and runs[-1].tensor == degree:
            runs[-1] = Run(layers=runs[-1].layers + 1, tensor=degree)
        else:
            runs.append(Run(layers=1, tensor=degree))
    return tuple(runs)


def plan_by_hand(config: Config, devices: int) -> Plan:
    """The plan that the section `parallel` describes, on so many devices.

    Blocks are divided evenly, the first chunks taking one more where they do not divide; embedding and head go with
    the first and the last block.

    Raises:
      InputError: more devices asked for than there are, or a batch that does not divide.
    """
    parallel, batch = config.parallel, config.data.batch_size
    pipe, tensor, pieces = parallel.pipe, parallel.tensor, parallel.micro_batches
    data = parallel.data or max(devices // (pipe * tensor), 1)
    used = pipe * data * tensor
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
        recompute=parallel.recompute,
        sequence=parallel.sequence,
        stages=_even_stages(config.model.num_layers, pipe, parallel.chunks, data * tensor, tensor),
    )


def _even_stages(blocks: int, pipe: int, chunks: int, devices: int, tensor: int) -> tuple[Stage, ...]:
    parts = pipe * chunks
    counts = [blocks // parts + (part < blocks % parts) for part in range(parts)]
    edges = [0, *(1 + sum(counts[: part + 1]) for part in range(parts - 1)), blocks + 2]
    return tuple(
        Stage(
            device=stage * devices,
            devices=devices,
            chunks=tuple(
                Chunk(first=edges[part], runs=(Run(layers=edges[part + 1] - edges[part], tensor=tensor),))
                for part in range(stage, parts, pipe)
            ),
        )
        for stage in range(pipe)
    )
