"""How to train: the one bridge between planning and running.  Plain data, JSON in and out, readable by a person.

`jhpt.core.plan_check` checks what every plan has to satisfy; `jhpt.core.plan_by_hand` makes the plan that a
configuration lays out.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from jhpt.core.cluster import parse, read_tree, write_json
from jhpt.core.compression_config import Compression, GradientCompression
from jhpt.core.renamed import with_plan_keys_of_today
from jhpt.core.section import Count, NonNegative, NonNegativeInt, Section

OneChunk = Literal["1f1b", "eager-1f1b", "gpipe", "zb-h1"]
Schedule = Literal[OneChunk, "interleaved"]

SEARCHED: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "gpipe", "interleaved")
"""The schedules among which the planner chooses, in order of preference.  zb-h1 is laid out by hand."""

ONE_CHUNK: tuple[Schedule, ...] = tuple(name for name in SEARCHED if name != "interleaved")
"""Those of one chunk per device.  Interleaving needs several."""

Space = Literal["spmd", "general"]
"""One program for all devices, or one for each stage."""

Zero = Literal[0, 1, 2, 3]
Origin = Literal["hand", "auto", "given"]
OffloadKind = Literal["parameters", "optimizer", "both"]


class Run(Section):
    """Neighbouring layers of one stage with the same strategy."""

    layers: Count
    tensor: Count = Field(1, description="tensor degree; the other devices of the stage are data parallel")
    sample_chunks: Count = Field(
        1,
        description="chunks that a device cuts its samples into: the all-reduce of one runs while another is computed",
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
        """The number of sample chunks of every layer."""
        return tuple(run.sample_chunks for run in self.runs for _ in range(run.layers))


class Stage(Section):
    """Devices and the layers they hold: one chunk, or several when interleaved.

    The devices are `[device, device + devices)`, or those in `apart`.
    """

    device: NonNegativeInt = Field(description="the first device, by its number in the cluster")
    devices: Count = Field(description="how many")
    apart: tuple[NonNegativeInt, ...] | None = Field(
        None, description="all devices in the order of their ranks, where they are not neighbours; null: they are"
    )
    samples: tuple[Count, ...] | None = Field(
        None,
        description="space=general, one stage: samples of a micro-batch by data rank, more where devices are faster; "
        "null: the same number on all",
    )
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _counted(self) -> "Stage":
        if self.apart is not None and (
            self.apart[:1] != (self.device,)
            or len(set(self.apart)) != len(self.apart)
            or len(self.apart) != self.devices
        ):
            raise ValueError(
                f"apart={list(self.apart)} must hold devices={self.devices} different ones, device={self.device} first"
            )
        return self

    @property
    def members(self) -> Sequence[int]:
        """The devices in the order of their ranks."""
        return self.apart or range(self.device, self.device + self.devices)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees in use, ascending."""
        return tuple(sorted({run.tensor for chunk in self.chunks for run in chunk.runs}))


class PlacedRun(NamedTuple):
    """A run of layers, the first of which is `layer`, on the devices of its stage."""

    stage: Stage
    layer: int
    run: Run


class Offload(Section):
    """CPU offload: what of the blocks is stored on the host and is on the device only while it is used."""

    kind: OffloadKind = Field("both", description="weights and gradients, the optimizer's state, or both")
    resident: NonNegativeInt = Field(
        0, description="of a group of blocks the first is offloaded, and this many stay on the device"
    )
    ahead: NonNegativeInt = Field(1, description="how many groups of blocks ahead of their use they are fetched")
    update_in_backward: bool = Field(
        False,
        description="whether the optimizer updates a block in the backward pass, not when it is fetched the next time",
    )


class SavedTensors(Section):
    """Names of a block's activations that are saved for its backward pass, which recomputes the others.

    The input of a block (`residual_in`) is always saved, on the device unless `host` names it.
    """

    device: tuple[str, ...] = Field((), description="saved on the device")
    host: tuple[str, ...] = Field((), description="offloaded to pinned host memory between the passes")

    def text(self) -> str:
        """`qkv and mlp_hidden, on the host residual_in`."""
        parts = [" and ".join(self.device), f"on the host {' and '.join(self.host)}" if self.host else ""]
        return ", ".join(filter(None, parts)) or "nothing"


class OtherBlocks(Section):
    """The last blocks of a stage, where they save more than the first ones."""

    after: Count = Field(description="how many first blocks recompute as `recompute` and `saved` say")
    saved: SavedTensors | None = Field(
        None, description="what of the blocks after these is saved beside its input; null: everything"
    )


class Plan(Section):
    """A complete decision.  `stages` are in pipeline order; devices of the cluster that none of them has stay idle."""

    model: str
    cluster: str
    device: str | None = Field(None, description="what its devices are called; null: any device")
    space: Space = "spmd"
    batch: Count = Field(description="samples per step")
    micro_batches: Count
    schedule: Schedule = "1f1b"
    zero: Zero = 0
    zero_ranks: Count | None = Field(
        None,
        description="hybrid sharding (HSDP): ZeRO shards over so many neighbouring data ranks and replicates over the "
        "others; null: over all",
    )
    prefetch: NonNegativeInt = Field(
        1, description="ZeRO-3 (FSDP): how many layers ahead of their use weights are all-gathered"
    )
    sequence: bool = Field(False, description="sequence parallelism between tensor-parallel products")
    recompute: bool = Field(
        False, description="activation checkpointing: save only the input of every layer, compute the rest again"
    )
    saved: SavedTensors | None = Field(None, description="with recompute: what of a block is saved beside its input")
    other_blocks: OtherBlocks | None = Field(
        None, description="with recompute, on one stage: the blocks that save more; null: all save the same"
    )
    offload: Offload | None = Field(None, description="null: no CPU offload of blocks")
    compression: Compression = Compression()
    gradient_compression: GradientCompression = GradientCompression()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    origin: Origin | None = Field(None, description="how a run got the plan; null: no run has used it yet")
    seconds: NonNegative | None = Field(None, description="predicted time of a step")
    lower_bound: NonNegative | None = Field(None, description="no plan of the space is faster")

    @property
    def devices(self) -> int:
        """Number of devices that work."""
        return sum(stage.devices for stage in self.stages)

    @property
    def chunks(self) -> int:
        """Number of chunks per stage."""
        return len(self.stages[0].chunks)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees in use, ascending."""
        return tuple(sorted({run.tensor for stage in self.stages for chunk in stage.chunks for run in chunk.runs}))

    @property
    def replicas(self) -> int:
        """Number of data ranks of the layers that have most."""
        return max(stage.devices // run.tensor for stage in self.stages for chunk in stage.chunks for run in chunk.runs)

    @property
    def shards(self) -> int:
        """Number of data ranks over which ZeRO shards."""
        return self.zero_ranks or self.replicas

    @property
    def by_speed(self) -> bool:
        """Whether data ranks have samples by the speed of their devices."""
        return any(stage.samples is not None for stage in self.stages)

    @property
    def placed(self) -> Iterator[PlacedRun]:
        """Every run of layers with its stage and first layer."""
        for stage in self.stages:
            for chunk in stage.chunks:
                layer = chunk.first
                for run in chunk.runs:
                    yield PlacedRun(stage, layer, run)
                    layer += run.layers

    @property
    def sample_chunks(self) -> tuple[int, ...]:
        """The numbers of sample chunks in use, ascending."""
        return tuple(
            sorted({run.sample_chunks for stage in self.stages for chunk in stage.chunks for run in chunk.runs})
        )

    @property
    def of_first_blocks(self) -> "Plan":
        """The plan if all blocks saved what the first ones save."""
        return self if self.other_blocks is None else self.model_copy(update={"other_blocks": None})

    @property
    def of_other_blocks(self) -> "Plan":
        """The plan if all blocks saved what the last ones save."""
        if self.other_blocks is None:
            return self
        saved = self.other_blocks.saved
        return self.model_copy(update={"recompute": saved is not None, "saved": saved, "other_blocks": None})

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Reads JSON, of earlier versions too; InputError names the file and every fault."""
        return parse(Plan, with_plan_keys_of_today(read_tree(path), path), path)


def runs_of(tensor: Sequence[int], sample_chunks: Sequence[int] | None = None) -> tuple[Run, ...]:
    """Equal neighbours joined, by the tensor degree of every layer and the number of its sample chunks (None: one)."""
    layers = zip(tensor, sample_chunks or [1] * len(tensor), strict=True)
    return tuple(
        Run(layers=len(list(alike)), tensor=degree, sample_chunks=chunks)
        for (degree, chunks), alike in itertools.groupby(layers)
    )
