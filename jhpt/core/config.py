"""What a user can choose: frozen, closed, validated before any device is touched.

A `Config` has one section per concern (`model`, `data`, `optimizer`, `train`, `parallel`, `memory`, `evaluation`,
`checkpoint`, `log`, `guards`, `peers`).  Impossible combinations are refused here, so later code never checks them
again.
`jhpt.core.load` reads files, presets and overrides into a `Config`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import PydanticCustomError

from jhpt.core.compression_config import (
    GRADIENT_SETTINGS,
    PLAIN_GRADIENTS,
    Compression,
    CompressionConfig,
    GradientCompression,
)
from jhpt.core.divisors import common_divisors, one_of
from jhpt.core.families.family import SHORTEST_PAIR, ModelConfig, families
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.text import TextConfig
from jhpt.core.guards_config import GuardsConfig, rewind_conflict
from jhpt.core.memory_config import MemoryConfig, check_names
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.parallel_config import ParallelConfig
from jhpt.core.peers_config import PeersConfig
from jhpt.core.rules import SETTINGS, Choices, conflict
from jhpt.core.section import Count, Float32, Fraction, NonNegative, Positive, Section

__all__ = [
    "GRADIENT_SETTINGS",
    "PLAIN_GRADIENTS",
    "CheckpointConfig",
    "Compression",
    "CompressionConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GradientCompression",
    "GuardsConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "MomentStorage",
    "OptimizerConfig",
    "ParallelConfig",
    "PeersConfig",
    "SourceConfig",
    "TrainConfig",
    "WeightStorage",
]

WeightStorage = Literal["float32", "bfloat16", "bfloat16_kahan", "bfloat16_stochastic"]
"""How parameters are stored between steps."""

MomentStorage = Literal["float32", "int8"]
"""How Adam's moments are stored between steps."""


class SourceConfig(Section):
    """One of several texts that are mixed."""

    path: str | tuple[str, ...] = Field(description="files, globs or folders, as data.path")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="share of the sequences that come from this source, relative to the other weights"
    )


class DataConfig(Section):
    """Where tokens, or images, come from and how they are cut into batches."""

    path: str | tuple[str, ...] = Field(
        "stdlib",
        description="files, globs or folders of text, .jsonl (either also .gz or .zst) or .parquet, or a data set of "
        "Hugging Face saved to disk; stdlib: the source text of this Python",
    )
    sources: tuple[SourceConfig, ...] = Field(
        (), description="instead of path: a list of {path: ..., weight: 2.0}, whose sequences are mixed by weight"
    )
    validation_path: str | tuple[str, ...] | None = Field(
        None, description="held-out files; null: a share of the files of data.path"
    )
    validation_fraction: Fraction = Field(0.05, description="share of files held out where validation_path is null")
    text_key: str = Field("text", description="the field of a JSONL line, or the column, that holds the text")
    pair_key: str = Field(
        "text_pair", description="the field or CSV column that holds a second text, with model.task=classify"
    )
    label_key: str = Field(
        "label", description="the field or CSV column that holds the label, with model.task=classify"
    )
    tokenizer: str = Field(
        "bytes",
        description="bytes, a tokenizers JSON file (as jhpt tokenizer train writes), a Hugging Face folder, a run "
        "directory, or a name on the Hugging Face hub, such as gpt2",
    )
    packing: Literal["stream", "documents", "pad"] = Field(
        "stream",
        description="stream: sequences are cut from the text end to end, and a token sees what comes before it, of "
        "other documents too; documents: cut alike, but a token sees its own document only, and positions begin anew "
        "with each; pad: a sequence is one document, or a piece of a longer one, and padding",
    )
    sequence_length: Count = Field(128, description="tokens in a sequence")
    batch_size: Count = Field(32, description="sequences in a step, over all devices and micro-batches")
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.15, description="share of tokens that BERT has to predict"
    )
    whole_words: bool = Field(
        False, description="mask all pieces of a word or none, with a WordPiece tokenizer, for BERT"
    )
    images: Count = Field(50_000, description="synthetic images of an epoch, those held out included, for VGG")
    noise: NonNegative = Field(
        1.0, description="deviation of the noise in synthetic images, relative to that of the picture of their class"
    )
    cache_dir: str | None = Field(None, description="token caches; null: the user's cache folder")
    workers: Count | None = Field(None, description="processes that tokenise; null: one for each core")

    @model_validator(mode="after")
    def _one_place(self) -> "DataConfig":
        if not self.sources:
            return self
        if self.path != DataConfig.model_fields["path"].default:
            raise ValueError(f"data.path={self.path} and data.sources are both set; leave one of them out")
        if self.validation_path is not None:
            raise ValueError(
                f"data.validation_path={self.validation_path} is not available with data.sources, of which each holds "
                "out data.validation_fraction of its own text; leave out the one or the other"
            )
        return self


class OptimizerConfig(Section):
    """The update rule and its learning-rate schedule; everything that decides an update."""

    name: str = Field("adamw", description="update rule")
    learning_rate: Float32 = Field(2e-3, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="decay after the warm-up; wsd: constant, and linear over the last steps"
    )
    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = Field(100, description="steps of linear warm-up from zero")
    final_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="learning rate at the last step, as a share of the peak"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="share of all steps in which wsd decays, the last ones"
    )
    b1: Fraction = Field(0.9, description="decay of the first moment")
    b2: Fraction = Field(0.95, description="decay of the second moment")
    eps: Float32 = Field(1e-8, description="added to the root of the second moment")
    momentum: Fraction | None = Field(
        None, description="decay of the momentum of sgd and muon; null: 0.9 of sgd, 0.95 of muon"
    )
    nesterov: bool | None = Field(
        None, description="Nesterov's momentum, of sgd and muon; null: not of sgd, but of muon"
    )
    weight_decay: NonNegative = Field(0.1, description="decoupled decay of matrices and tables (not norms, biases)")
    clip_norm: Positive | None = Field(1.0, description="largest gradient norm; null: no clipping")
    clip: Literal["global", "previous", "layer"] = Field(
        "global",
        description="global: by the norm of all gradients of this step; previous: by that of the step before; layer: "
        "every layer by its own norm, against its share of clip_norm. With the last two, offloaded blocks can be "
        "updated in the backward pass, with a quarter less host memory",
    )
    weights: WeightStorage = Field(
        "float32",
        description="how parameters are stored; bfloat16_kahan: with a remainder in bfloat16 for what rounding "
        "removes; bfloat16_stochastic: rounded at random; bfloat16: rounded to nearest, which stalls training",
    )
    moments: MomentStorage = Field(
        "float32",
        description="how Adam's moments of matrices and tables are stored; int8: in codes, with a scale for each block",
    )
    z_loss: NonNegative = Field(0.0, description="weight of log(Z)^2, which keeps logits from drifting")

    @model_validator(mode="after")
    def _rule_can_code(self) -> "OptimizerConfig":
        if not optimizer_numbers(self.name).coded and self.moments != "float32":
            raise ValueError(
                f"optimizer.moments={self.moments} is not available with optimizer.name={self.name}; use float32"
            )
        return self

    @property
    def low_precision(self) -> bool:
        """Whether parameters or moments are stored in less than float32."""
        return self.weights != "float32" or self.moments != "float32"

    @property
    def update_in_backward(self) -> bool:
        """Whether a layer can be updated as soon as its gradient is known, before those of other layers are."""
        return self.clip_norm is None or self.clip != "global"


class TrainConfig(Section):
    """How long to train, and when to give up."""

    steps: Count = Field(800, description="optimizer steps")
    max_bad_steps: Count = Field(
        10, description="stop after this many steps in a row whose loss or gradient is not finite (each is skipped)"
    )


class EvaluationConfig(Section):
    """Held-out loss, and the sample at the end."""

    every: Count = Field(250, description="steps between evaluations; one more follows the last step")
    batches: Count = Field(20, description="held-out batches in an evaluation, at most")
    sample_tokens: Annotated[int, Field(ge=0, strict=True)] = Field(
        200, description="tokens GPT writes at the end; 0: none"
    )
    prompt: str = Field("def ", description="what the sample continues")

    @field_validator("prompt")
    @classmethod
    def _prompt_is_text(cls, prompt: str) -> str:
        """Half a surrogate pair would only fail when the sample is written, after the training."""
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"evaluation.prompt={prompt!r} is not text ({error.reason}); remove it") from None
        return prompt


class CheckpointConfig(Section):
    """Which checkpoints are written and kept."""

    every: Count = Field(500, description="steps between checkpoints; the last step is always saved")
    keep: Count = Field(2, description="newest checkpoints to keep")
    keep_every: Count | None = Field(None, description="keep these for good: every so many steps")
    max_failed: Count = Field(3, description="stop when so many checkpoints in a row could not be written")
    mirror: str | None = Field(None, description="another folder, of another disk, that checkpoints are copied to")
    mirror_every: Count = Field(1, description="1: copy every checkpoint; 3: every third")


class LogConfig(Section):
    """How often metrics are reported, and where."""

    every: Count = Field(10, description="steps between metric lines")
    tensorboard: bool = Field(True, description="write TensorBoard events beside metrics.jsonl")


class Config(Section):
    """One training run, completely; the defaults are the preset gpt-tiny."""

    name: str = Field("gpt-tiny", description="names the run's folder", pattern=r"^[\w.-]+$")
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = Field(
        0, description="initialisation, data order, dropout, masking"
    )
    model: SerializeAsAny[ModelConfig] = GPTConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = Field(ParallelConfig(), description="or the word auto, short for {auto: true}")
    memory: MemoryConfig = Field(MemoryConfig(), description="or the word auto, short for all of it")
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    guards: GuardsConfig = GuardsConfig()
    peers: PeersConfig = PeersConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_family(cls, model: Any) -> Any:
        if not isinstance(model, Mapping):
            return model
        settings = families().get(str(model.get("family")))
        if settings is None:
            names = ", ".join(families())
            raise PydanticCustomError("unknown_family", "expected one of {families}", {"families": names})
        return settings.model_validate(model)

    @field_validator("parallel", mode="before")
    @classmethod
    def _auto_in_one_word(cls, parallel: Any) -> Any:
        return {"auto": True} if parallel == "auto" else parallel

    @field_validator("memory", mode="before")
    @classmethod
    def _memory_in_one_word(cls, memory: Any) -> Any:
        return {} if memory == "auto" else memory

    @model_validator(mode="after")
    def _sequence_fits_model(self) -> "Config":
        if isinstance(self.model, TextConfig) and self.data.sequence_length > self.model.max_length:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} is longer than model.max_length="
                f"{self.model.max_length}; shorten the sequences or raise model.max_length"
            )
        return self

    @model_validator(mode="after")
    def _model_keeps_documents_apart(self) -> "Config":
        if self.data.packing != "stream" and not self.model.keeps_documents_apart:
            raise ValueError(
                f"data.packing={self.data.packing} is not available with model.family={self.model.family}; use stream"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_cut_from_the_stream(self) -> "Config":
        if self.model.pairs and self.data.packing != "stream":
            raise ValueError(
                f"data.packing={self.data.packing} is not available with model.objective=mlm+nsp, whose rows are pairs "
                "of pieces of the stream; use data.packing=stream, or model.objective=mlm"
            )
        if self.model.pairs and self.data.sequence_length < SHORTEST_PAIR:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} leaves no room for two pieces of text, [CLS] and "
                f"twice [SEP]; use at least {SHORTEST_PAIR}, or model.objective=mlm"
            )
        return self

    @model_validator(mode="after")
    def _named_tensors_are_the_models(self) -> "Config":
        if not isinstance(self.memory.recompute, str):
            check_names(self.memory.recompute, "memory.recompute", self.model.named_tensors)
        return self

    @model_validator(mode="after")
    def _tensor_axis_divides_model(self) -> "Config":
        tensor = 1 if self.parallel.auto else self.parallel.tensor
        sizes = self.model.tensor_sizes
        for name, size in sizes.items():
            if size % tensor:
                raise ValueError(
                    f"model.{name}={size} is not divisible by parallel.tensor={tensor}; "
                    f"use {one_of(common_divisors(sizes.values()))}"
                )
        model = self.model
        if isinstance(model, TextConfig) and model.vocab_size != "auto" and model.padded_vocab % tensor:
            raise ValueError(
                f"model.vocab_size, padded to {model.padded_vocab}, is not divisible by parallel.tensor={tensor}; "
                f"use {one_of(common_divisors(model.cut_sizes.values()))}"
            )
        return self

    @model_validator(mode="after")
    def _choices_go_together(self) -> "Config":
        offload, optimizer, documents = self.memory.offload, self.optimizer, self.data.packing == "documents"
        choices = Choices(
            offload=None if offload in ("auto", "off") else offload,
            optimizer=optimizer.name,
            optimizer_offloads=optimizer_numbers(optimizer.name).offloaded,
            storage=(optimizer.weights, optimizer.moments) if optimizer.low_precision else None,
            documents=documents,
            compression=documents and self.parallel.compression.settings.on,  # rules of plans: `ParallelConfig`
            names=SETTINGS,
        )
        parallel, family = self.parallel, self.model.choices
        if family:
            compression = parallel.compression.auto or parallel.compression.settings.on
            choices = replace(choices, place=self.name, compression=compression, **family)
        if not parallel.auto:
            data, micro_batches = parallel.data or 1, parallel.micro_batches
            choices = replace(choices, batch=self.data.batch_size, data=data, micro_batches=micro_batches)
        if family and not parallel.auto:
            choices = replace(choices, stages=parallel.pipe, sequence=parallel.sequence)
            choices = replace(choices, sample_chunks=(parallel.sample_chunks,))
        if (message := conflict(choices)) is not None:
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _optimizer_knows_the_kernels(self) -> "Config":
        optimizer, plain = self.optimizer, ("adamw", "lion", "sgd")
        numbers = optimizer_numbers(optimizer.name)
        if not self.model.alike and (numbers.factored or numbers.orthogonal):
            raise ValueError(
                f"optimizer.name={optimizer.name} works on whole matrices, and kernels of convolutions are none; use "
                f"{one_of(plain)} with model.family={self.model.family}"
            )
        if not self.model.alike and optimizer.moments != "float32":
            raise ValueError(
                f"optimizer.moments={optimizer.moments} codes the rows of matrices, and kernels of convolutions are "
                f"none; use float32 with model.family={self.model.family}"
            )
        return self

    @model_validator(mode="after")
    def _rewinding_finds_a_checkpoint(self) -> "Config":
        checkpoint, log = self.checkpoint, self.log
        message = rewind_conflict(self.guards, every=checkpoint.every, keep=checkpoint.keep, log_every=log.every)
        if message is not None:
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _blocks_fill_pipeline(self) -> "Config":
        chunks = self.parallel.pipe * self.parallel.chunks
        if not self.parallel.auto and chunks > self.model.num_layers:
            raise ValueError(
                f"parallel.pipe={self.parallel.pipe} x parallel.chunks={self.parallel.chunks} needs as many blocks, "
                f"and model.num_layers={self.model.num_layers}; use fewer stages or chunks"
            )
        return self
