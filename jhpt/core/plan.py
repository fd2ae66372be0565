"""How to train: the one bridge between planning and running.  Plain data, JSON in and out, readable by a person."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jhpt.core.cluster import parse, read_tree, write_json
from jhpt.core.config import Count, NonNegative, Section

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
    space: Literal["spmd", "general"] = "spmd"
    batch: Count = Field(description="samples per step")
    micro_batches: Count
    schedule: Schedule = "1f1b"
    zero: Zero = 0
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
