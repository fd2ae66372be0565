"""The section `parallel`: how the devices share a step."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jhpt.core.compression_config import CompressionConfig, GradientCompression
from jhpt.core.plan import OneChunk, Space, Zero
from jhpt.core.rules import SETTINGS, Choices, conflict
from jhpt.core.section import Count, NonNegativeInt, Section


class ParallelConfig(Section):
    """How devices share the work: `auto`, or by hand: `pipe x data x tensor` devices, stages of equally many blocks."""

    auto: bool = Field(
        False,
        description="let the planner decide; the other settings of this section are not read, except compression and "
        "gradient_compression",
    )
    cluster: str | None = Field(
        None,
        description="with auto: the cluster to plan for, by name or file; null: this machine as `jhpt profile` "
        "measures it",
    )
    space: Literal["spmd", "general", "both"] = Field(
        "spmd",
        description="with auto: spmd: one program, all stages of the same size; general: a program for each stage, of "
        "any size, on mixed clusters too; both: plans of either kind",
    )
    trials: NonNegativeInt = Field(
        0,
        description="with auto: how many plans take a few steps before training, of which the one measured to be the "
        "fastest trains: those predicted to be the fastest, of unlike kinds, and then the fastest of them and those "
        "close to it with half and with twice as many micro-batches; 0: the prediction decides",
    )
    data: Count | None = Field(None, description="data-parallel degree; null: all devices / (pipe x tensor)")
    tensor: Count = Field(1, description="tensor-parallel degree, on neighbouring devices")
    sequence: bool = Field(
        False,
        description="sequence parallelism: between tensor-parallel products, cut activations along the sequence; takes "
        "less memory",
    )
    pipe: Count = Field(1, description="pipeline stages")
    zero: Zero = Field(
        0,
        description="ZeRO, what is sharded over the data ranks: 0 nothing; 1 optimizer state; 2 gradients too, as they "
        "are added up; 3 parameters too (FSDP); on one data rank 3 shards nothing, but casts weights layer by layer, "
        "which saves a copy of all of them",
    )
    zero_ranks: Count | None = Field(
        None,
        description="hybrid sharding (HSDP): ZeRO shards over so many neighbouring data ranks, such as those of a "
        "node, and replicates over the others; null: over all",
    )
    micro_batches: Count = Field(
        1, description="micro-batches (gradient accumulation steps) that the batch of a step is cut into"
    )
    schedule: OneChunk = Field(
        "1f1b",
        description="pipeline schedule: the order of forward and backward passes; in zb-h1 gradients of weights wait",
    )
    chunks: Count = Field(1, description="chunks of blocks per stage (virtual stages); more than one: interleaved 1f1b")
    sample_chunks: Count = Field(
        1,
        description="chunks that a device cuts its samples into: the tensor-parallel all-reduce of one runs while "
        "another is computed",
    )
    compression: CompressionConfig = Field(
        CompressionConfig(), description="or a word: off, or auto, short for {auto: true}"
    )
    gradient_compression: GradientCompression = Field(
        GradientCompression(), description="or one of the words off, quantize and topk, short for {kind: ...}"
    )

    @field_validator("trials")
    @classmethod
    def _a_choice(cls, trials: int) -> int:
        if trials == 1:
            raise ValueError("one plan leaves nothing to choose; set 2 or more, or 0 to try none")
        return trials

    @field_validator("compression", mode="before")
    @classmethod
    def _compression_in_one_word(cls, compression: Any) -> Any:
        # YAML 1.1 reads off as false.
        words: dict[str | bool, Any] = {"auto": {"auto": True}, "off": {}, False: {}}
        return words.get(compression, compression) if isinstance(compression, str | bool) else compression

    @field_validator("gradient_compression", mode="before")
    @classmethod
    def _kind_in_one_word(cls, kind: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return {"kind": "off" if kind is False else kind} if isinstance(kind, (str, bool)) else kind

    @model_validator(mode="after")
    def _choices_go_together(self) -> "ParallelConfig":
        if not self.auto and (message := conflict(self.choices)) is not None:
            raise ValueError(message)
        return self

    @property
    def spaces(self) -> tuple[Space, ...]:
        """Where `auto` searches."""
        return ("spmd", "general") if self.space == "both" else (self.space,)

    @property
    def choices(self) -> Choices:
        """What the section chooses, where it lays out a step by hand."""
        return Choices(
            stages=self.pipe,
            chunks=self.chunks,
            sample_chunks=(self.sample_chunks,),
            schedule="interleaved" if self.chunks > 1 and self.schedule == "1f1b" else self.schedule,
            micro_batches=self.micro_batches,
            tensor=(self.tensor,),
            zero=self.zero,
            zero_ranks=self.zero_ranks,
            sequence=self.sequence,
            compression=self.compression.settings.on,
            gradient_compression=self.gradient_compression.on,
            names=SETTINGS,
        )
