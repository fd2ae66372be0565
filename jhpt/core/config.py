"""What a user can choose: frozen, closed, validated before any device is touched.

A `Config` has one section per concern (`model`, `data`, `optimizer`, `train`, `parallel`, `memory`, `evaluation`,
`checkpoint`, `log`).  Impossible combinations are refused here, so later code never checks them again.
`jhpt.core.load` reads files, presets and overrides into a `Config`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import PydanticCustomError

from jhpt.core.divisors import common_divisors, one_of
from jhpt.core.errors import did_you_mean
from jhpt.core.families.family import BLOCK_INPUT, ModelConfig, families, known_tensors
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.section import Bytes, Count, Fraction, NonNegative, Positive, Section

WeightStorage = Literal["float32", "bfloat16", "bfloat16_kahan", "bfloat16_stochastic"]
"""How parameters are kept between steps."""

MomentStorage = Literal["float32", "int8"]
"""How Adam's moments are."""


class DataConfig(Section):
    """Where tokens come from and how they are cut into batches."""

    path: str | tuple[str, ...] = Field(
        "stdlib", description="text or .jsonl files, globs or folders; stdlib: the source text of this Python"
    )
    validation_path: str | tuple[str, ...] | None = Field(
        None, description="held-out files; null: a share of the files of data.path"
    )
    validation_fraction: Fraction = Field(0.05, description="share of files held out where validation_path is null")
    text_key: str = Field("text", description="the field of a JSONL line that holds the text")
    tokenizer: str = Field("bytes", description="bytes, or the path of a tokenizers JSON file")
    sequence_length: Count = Field(128, description="tokens in a sequence")
    batch_size: Count = Field(32, description="sequences in a step, over all devices and micro-batches")
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.15, description="share of tokens that BERT has to predict"
    )
    cache_dir: str | None = Field(None, description="token caches; null: the user's cache folder")


class OptimizerConfig(Section):
    """The update rule and its learning-rate schedule; everything that decides an update."""

    name: str = Field("adamw", description="update rule")
    learning_rate: Positive = Field(2e-3, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="decay after the warm-up")
    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = Field(100, description="steps of linear warm-up from zero")
    final_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="learning rate at the last step, as a share of the peak"
    )
    b1: Fraction = Field(0.9, description="decay of the first moment")
    b2: Fraction = Field(0.95, description="decay of the second moment")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.1, description="decoupled decay of matrices and tables (not norms, biases)")
    clip_norm: Positive | None = Field(1.0, description="largest gradient norm; null: no clipping")
    clip: Literal["global", "previous", "layer"] = Field(
        "global",
        description="which norm: of all gradients; of those of the step before; or of each layer, with its part of "
        "clip_norm. The last two let blocks on the host take their steps at once, with a quarter less there",
    )
    weights: WeightStorage = Field(
        "float32",
        description="how parameters are kept; bfloat16_kahan: with what rounding took away, in bfloat16 too; "
        "bfloat16_stochastic: rounded at random; bfloat16: rounded to nearest, which stalls",
    )
    moments: MomentStorage = Field(
        "float32", description="how Adam's moments of matrices and tables are kept; int8: in codes with a scale a block"
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
        """Whether parameters or moments are kept in less than float32."""
        return self.weights != "float32" or self.moments != "float32"

    @property
    def update_in_backward(self) -> bool:
        """Whether a layer's step needs no gradient but its own."""
        return self.clip_norm is None or self.clip != "global"


class TrainConfig(Section):
    """How long to train, and when to give up."""

    steps: Count = Field(800, description="optimizer steps")
    max_bad_steps: Count = Field(
        10, description="stop after this many steps in a row whose loss or gradient is not finite (each is skipped)"
    )


class Compression(Section):
    """How sums of blocks over the tensor axis travel: important tokens at `bits`, the others at `rest_bits`."""

    bits: Literal[4, 8, 16] = Field(
        16, description="of a number of an important token; 16: bfloat16, and with all tokens nothing is compressed"
    )
    tokens: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="share of a sample's tokens that is important")
    rest_bits: Literal[0, 4] = Field(4, description="of a number of any other; 0: it does not travel and is not added")
    steps: Literal["auto", 1, 2] = Field(
        "auto", description="of a sum: 1 rounds once, 2 move 2 / tensor of its bytes; auto: 1 where that beats 16 bits"
    )
    importance: Literal["auto", "attention", "own"] = Field(
        "auto",
        description="of a token: the attention it receives, which in a causal model looks ahead, or the size of its "
        "own row, chosen as tokens come; auto: own in a causal model, else attention",
    )
    forward: bool = Field(True, description="compress activations")
    backward: bool = Field(True, description="compress errors")

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return (self.bits < 16 or self.tokens < 1) and (self.forward or self.backward)


class CompressionConfig(Compression):
    """The same by hand, or left to the planner."""

    auto: bool = Field(
        False, description="let the planner decide whether and how; what else stands in this section is left aside"
    )

    @property
    def how(self) -> Compression:
        """As it is written down; of `auto`: nothing is compressed."""
        named = {} if self.auto else {name: getattr(self, name) for name in Compression.model_fields}
        return Compression(**named)


GRADIENT_SETTINGS: dict[str, tuple[str, ...]] = {
    "off": (),
    "quantize": ("bits", "bucket"),
    "topk": ("share", "block", "momentum", "bucket"),
}
"""What each kind of gradient compression reads."""


class GradientCompression(Section):
    """How gradients of matrices and tables are summed over the data axes; what is not sent now is sent later."""

    kind: Literal["off", "quantize", "topk"] = Field(
        "off", description="quantize: all in few bits; topk: the largest of every block"
    )
    bits: Literal[4, 8] = Field(8, description="quantize: of a number")
    share: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="topk: of a block's numbers, sent in a step")
    block: Annotated[int, Field(ge=1, le=1 << 16, strict=True)] = Field(
        1024, description="topk: neighbours of which the largest are sent"
    )
    momentum: Fraction = Field(0.0, description="topk: accumulated before selection instead of after; 0: none")
    bucket: Count = Field(
        1 << 22,
        description="numbers that travel together, at least: their bytes should take the link ten times as long as a "
        "collective takes to begin",
    )

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.kind != "off"

    @model_validator(mode="after")
    def _settings_are_read(self) -> "GradientCompression":
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "kind" and name not in GRADIENT_SETTINGS[self.kind] and value != info.default:
                readers = [kind for kind, settings in GRADIENT_SETTINGS.items() if name in settings]
                raise ValueError(
                    f"parallel.gradient_compression.{name}={value} is not read with kind={self.kind}; leave it out, or "
                    f"set parallel.gradient_compression.kind to {one_of(readers)}"
                )
        return self


PLAIN_GRADIENTS = GradientCompression()
"""Summed as they are."""


class ParallelConfig(Section):
    """How devices share the work: `auto`, or by hand `pipe x data x tensor` devices, stages of equally many blocks."""

    auto: bool = Field(
        False,
        description="let the planner decide; what else stands in this section is left aside, but for compression and "
        "gradient_compression",
    )
    cluster: str | None = Field(
        None, description="auto: the cluster this is, by name or file; null: this machine as `jhpt profile` measures it"
    )
    data: Count | None = Field(None, description="data-parallel degree; null: all devices / (pipe x tensor)")
    tensor: Count = Field(1, description="tensor-parallel degree, on neighbouring devices")
    sequence: bool = Field(
        False, description="cut activations between tensor-parallel products along the sequence: less memory"
    )
    pipe: Count = Field(1, description="pipeline stages")
    zero: Literal[0, 1, 3] = Field(
        0,
        description="shard over the data axis: 0 nothing, 1 optimizer state, 3 also parameters; over one rank 3 rounds "
        "weights to the compute dtype where they are used, without a copy of all",
    )
    micro_batches: Count = Field(1, description="pieces a step's batch is cut into")
    schedule: Literal["gpipe", "1f1b"] = Field("1f1b", description="order of forward and backward passes in a pipeline")
    chunks: Count = Field(1, description="chunks of blocks per stage; more than one: interleaved 1f1b")
    sample_chunks: Count = Field(
        1, description="parts of a device's samples: the tensor-parallel sums of one travel while another is computed"
    )
    compression: CompressionConfig = Field(
        CompressionConfig(), description="or a word: off, or auto, short for {auto: true}"
    )
    gradient_compression: GradientCompression = Field(
        GradientCompression(), description="or one of the words off, quantize and topk, short for {kind: ...}"
    )

    @field_validator("compression", mode="before")
    @classmethod
    def _compression_in_one_word(cls, compression: Any) -> Any:
        # YAML 1.1 reads off as false.
        words: dict[str | bool, Any] = {"auto": {"auto": True}, "off": {}, False: {}}
        return words.get(compression, compression) if isinstance(compression, str | bool) else compression

    @field_validator("gradient_compression", mode="before")
    @classmethod
    def _kind_in_one_word(cls, given: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return {"kind": "off" if given is False else given} if isinstance(given, (str, bool)) else given

    @model_validator(mode="after")
    def _gradients_are_summed_whole(self) -> "ParallelConfig":
        if self.gradient_compression.on and self.zero == 3 and not self.auto:
            raise ValueError(
                "parallel.gradient_compression sums a gradient once a step, and parallel.zero=3 in every micro-batch, "
                "layer by layer; use parallel.zero=1 or leave out parallel.gradient_compression"
            )
        return self

    @model_validator(mode="after")
    def _compression_needs_whole_sequences(self) -> "ParallelConfig":
        if self.compression.how.on and self.sequence:
            raise ValueError("parallel.compression sums whole sequences; leave out parallel.sequence")
        return self

    @model_validator(mode="after")
    def _chunks_fit_pipeline(self) -> "ParallelConfig":
        if self.chunks == 1:
            return self
        if self.pipe == 1:
            raise ValueError(f"parallel.chunks={self.chunks} needs several stages; raise parallel.pipe or use 1 chunk")
        if self.schedule == "gpipe":
            raise ValueError(f"parallel.chunks={self.chunks} interleaves 1f1b; drop parallel.schedule=gpipe")
        if self.micro_batches % self.pipe:
            raise ValueError(
                f"parallel.chunks={self.chunks} needs parallel.micro_batches divisible by parallel.pipe={self.pipe}, "
                f"found {self.micro_batches}"
            )
        return self


class MemoryConfig(Section):
    """What may be used, and what is done where a step needs more.

    `auto` is the planner's choice: where `parallel` is laid out by hand and a step fits, or the device is not known,
    nothing.
    """

    budget_bytes: Literal["auto"] | Bytes = Field(
        "auto",
        description="of each device, such as 24GiB, of which plans leave 3 % free; auto: all it has, on CPU no limit",
    )
    host_budget_bytes: Literal["auto"] | Bytes = Field(
        "auto",
        description="of each host, for what lives there instead of on devices; where it is given, what blocks keep may "
        "wait there, too; never more than it has; auto: nine tenths of that",
    )
    offload: Literal["auto", "off", "parameters", "optimizer", "both"] = Field(
        "auto",
        description="what of the blocks lives on the host: weights, the optimizer's state, or both; of as many blocks "
        "as is fastest where the plan is the planner's, of all where `parallel` is laid out by hand",
    )
    recompute: Literal["auto", "none", "full"] | tuple[str, ...] = Field(
        "auto",
        description="full: keep only the input of every block, compute the rest again; none: keep what is dear; or the "
        f"names of what is kept beside the input, of {', '.join(NAMED_TENSORS[1:])}",
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _names_with_commas(cls, recompute: Any) -> Any:
        """On a command line names are one word; yes and no are said of old."""
        if isinstance(recompute, bool):
            return "full" if recompute else "none"
        if not isinstance(recompute, str):
            return recompute
        names = tuple(name.strip() for name in recompute.split(",") if name.strip())
        return names[0] if names in (("auto",), ("none",), ("full",)) else names

    @field_validator("recompute")
    @classmethod
    def _names_are_known(cls, recompute: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(recompute, str):
            if not recompute:
                raise ValueError("memory.recompute names nothing; write full to keep only the input of every block")
            if BLOCK_INPUT in recompute:
                raise ValueError(f"memory.recompute: {BLOCK_INPUT} is the input, which is always kept; leave it out")
            known = [name for name in known_tensors() if name != BLOCK_INPUT]
            check_names(recompute, "memory.recompute", known, also=("auto", "none", "full"))
            if len(set(recompute)) < len(recompute):
                raise ValueError("memory.recompute has a name twice; leave one out")
        return recompute

    @field_validator("offload", mode="before")
    @classmethod
    def _off_is_a_word(cls, offload: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if offload is False else offload


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
    """What is kept on disk."""

    every: Count = Field(500, description="steps between checkpoints; the last step is always saved")
    keep: Count = Field(2, description="newest checkpoints to keep")
    keep_every: Count | None = Field(None, description="keep these for good: every so many steps")


class LogConfig(Section):
    """What a person and a dashboard see."""

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
        if self.data.sequence_length > self.model.max_length:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} is longer than model.max_length="
                f"{self.model.max_length}; shorten the sequences or raise model.max_length"
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
        if self.model.padded_vocab % tensor:
            raise ValueError(
                f"model.vocab_size, padded to {self.model.padded_vocab}, is not divisible by parallel.tensor={tensor}; "
                f"use {one_of(d for d in common_divisors(sizes.values()) if self.model.padded_vocab % d == 0)}"
            )
        return self

    @model_validator(mode="after")
    def _host_keeps_float32(self) -> "Config":
        if self.memory.offload in ("parameters", "optimizer", "both") and self.optimizer.low_precision:
            raise ValueError(
                f"memory.offload={self.memory.offload} keeps blocks in float32, not with optimizer.weights="
                f"{self.optimizer.weights} and optimizer.moments={self.optimizer.moments}; use float32 for both, or "
                "memory.offload=off"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_can_stream(self) -> "Config":
        streams = optimizer_numbers(self.optimizer.name).offloaded
        if self.memory.offload in ("parameters", "optimizer", "both") and not streams:
            raise ValueError(
                f"memory.offload={self.memory.offload} is not available with optimizer.name={self.optimizer.name}; use "
                "memory.offload=off"
            )
        return self

    @model_validator(mode="after")
    def _blocks_fill_pipeline(self) -> "Config":
        wanted = self.parallel.pipe * self.parallel.chunks
        if not self.parallel.auto and wanted > self.model.num_layers:
            raise ValueError(
                f"parallel.pipe={self.parallel.pipe} x parallel.chunks={self.parallel.chunks} needs as many blocks, "
                f"and model.num_layers={self.model.num_layers}; use fewer stages or chunks"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> "Config":
        pieces = (self.parallel.data or 1) * self.parallel.micro_batches
        if not self.parallel.auto and self.data.batch_size % pieces:
            raise ValueError(
                f"data.batch_size={self.data.batch_size} is not divisible by parallel.data x parallel.micro_batches = "
                f"{pieces}; use a multiple of {pieces}"
            )
        return self


def check_names(names: Sequence[str], where: str, known: Sequence[str] | None = None, also: Sequence[str] = ()) -> None:
    """ValueError where a block has no tensor of such a name.

    known: None: the named tensors of all families.  also: words that may stand there alone, in no list.
    """
    known = known_tensors() if known is None else known
    for name in names:
        if name in also and len(names) == 1:
            raise ValueError(f"{where}: {name} is a word, not a list; write {name} without brackets")
        if name in also:
            raise ValueError(f"{where}: {name!r} is no name beside others; leave out the others, or it")
        if name not in known:
            raise ValueError(
                f"{where}: a block has no tensor {name!r}{did_you_mean(name, [*known, *also])}; "
                f"it has {', '.join(known)}"
            )
