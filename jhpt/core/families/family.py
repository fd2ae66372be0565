"""What a model family is to configurations, the planner and the console: its settings and its numbers, without jax.

A family is a subclass of `ModelConfig`, registered under the name that `model.family` has:

    register_family(MixerConfig)        # class MixerConfig(ModelConfig): family: Literal["mixer"] = "mixer"; ...

Whatever depends on the family is a property of its settings; no other code asks which family it is.  The functions,
with jax, are registered with `jhpt.models.family.register_model`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from jhpt.core.errors import InputError
from jhpt.core.section import Count, Fraction, Section
from jhpt.core.work import NamedTensor, Work

VOCAB_MULTIPLE = 128
"""Embedding tables are padded to this multiple, so that a tensor axis divides them and GPU tiles are full."""

BLOCK_INPUT = "residual_in"
"""The name of a block's input, from which its backward pass can compute all its other named tensors again."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by place.  `padding` counts rows of the vocabulary that are allocated but never used."""

    embedding: int
    per_layer: int
    num_layers: int
    head: int
    padding: int

    @property
    def total(self) -> int:
        """Parameters of the model itself, as the literature counts them."""
        return self.embedding + self.per_layer * self.num_layers + self.head

    @property
    def allocated(self) -> int:
        """Parameters in memory."""
        return self.total + self.padding


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Matrix-multiplication FLOPs per token of a training step."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the cost of a layer depends on, beside the model.

    tokens: of a sample.  predicted: positions of a sample on which the head runs.  element: bytes of a number in the
    compute dtype.  flash: attention runs in one fused kernel.  keeps_scores: where it does not, its probabilities are
    saved for the backward pass.
    """

    tokens: int
    predicted: int
    element: int
    flash: bool
    keeps_scores: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What a layer costs, per sample and, unless said, on one device without tensor parallelism.

    work: (samples, tensor degree) -> the operations of one of that many devices.
    boundary_bytes: of the output, which the next layer reads.
    activation_bytes: saved for the backward pass and divided by the tensor degree; a block has `tensors` instead.
    replicated_bytes: saved for the backward pass on every tensor rank.
    tensor_forward_bytes, tensor_backward_bytes: all-reduced over the tensor axis in the forward and backward pass.
    """

    work: Callable[[int, int], Work]
    boundary_bytes: float = 0.0
    activation_bytes: float = 0.0
    replicated_bytes: float = 0.0
    tensor_forward_bytes: float = 0.0
    tensor_backward_bytes: float = 0.0
    tensors: tuple[NamedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Equal matrices or tables of a model.

    count: how many.  inputs, outputs: the dimensions of each.  row: its last dimension as the model lays it out, where
    outputs have several.  of_blocks: whether they are matrices of blocks.
    """

    count: int
    inputs: int
    outputs: int
    row: int
    of_blocks: bool

    @property
    def numbers(self) -> int:
        """The numbers in all of them."""
        return self.count * self.inputs * self.outputs

    @property
    def orthogonal_flops(self) -> int:
        """FLOP of a step of Newton and Schulz, X' = a X + (b A + c A A) X with A = X X^T: three products of each."""
        less, more = sorted((self.inputs, self.outputs))
        return self.count * (4 * less**2 * more + 2 * less**3)


def table(rows: int, width: int) -> Matrices:
    """A table, or another matrix outside the blocks."""
    return Matrices(count=1, inputs=rows, outputs=width, row=width, of_blocks=False)


LABEL_COLUMNS = 3
"""Numbers after the token ids of a row that has a label: its length, where its second text begins, and its class."""

SHORTEST_PAIR = 5
"""Tokens of the shortest row of two pieces of text: `[CLS] A [SEP] B [SEP]`."""


def masked_positions(length: int, fraction: float) -> int:
    """Predicted tokens of a sequence for masked-token prediction; `[CLS]` and `[SEP]` are never among them."""
    return max(1, round(fraction * (length - 2)))


MOST_LAYERS = 1024
"""Blocks up to which plans are found within seconds."""


class ModelConfig(Section):
    """The settings that all families have, and the numbers that each family has to provide.

    Class variables of a family:
      causal: tokens see only those before them.
      masked: it predicts masked tokens, so its sequences are `[CLS] ... [SEP]` and `data.mask_fraction` is read;
        otherwise every position predicts the next token.
      generates: it can continue a prompt.
      keeps_documents_apart: its functions read which document of a row a token is of (`data.packing`).
      post_norm: a norm follows each sum into the residual stream, so the backward pass reads that sum's parts.
      named_tensors: the names inside a block, in the order in which the forward pass produces them.
      coded_sizes: which of `tensor_sizes` are also the last dimension of a matrix, so that a tensor axis may only cut
        them between blocks of 8-bit codes (`jhpt.core.state`).
    """

    causal: ClassVar[bool]
    masked: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    keeps_documents_apart: ClassVar[bool] = False
    post_norm: ClassVar[bool] = False
    named_tensors: ClassVar[tuple[str, ...]] = (BLOCK_INPUT,)
    coded_sizes: ClassVar[tuple[str, ...]] = ()

    family: str
    vocab_size: Literal["auto"] | Count = Field(
        "auto", description="token ids the model knows; auto: as many as data.tokenizer has"
    )
    nominal_vocab: Count = Field(
        256,
        description="token ids that vocab_size=auto stands for where no tokenizer is read, as in jhpt plan: those that "
        "the preset is made for",
    )
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)] = Field(4, description="transformer blocks")
    d_model: Count = Field(128, description="width of the residual stream")
    max_length: Count = Field(128, description="longest sequence the model accepts")
    dropout: Fraction = Field(0.0, description="dropout after embedding, attention and MLP")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="compute dtype; auto: bfloat16 on GPU, float32 on CPU (parameters: optimizer.weights)",
    )
    matmul_dtype: Literal["same", "float8"] = Field(
        "same",
        description="operands of the matrix products of blocks; same: model.dtype; float8: with a scale each, on GPUs "
        "of compute capability 8.9 or more",
    )
    attention: Literal["auto", "cudnn", "xla"] = Field(
        "auto", description="attention kernel; auto: cuDNN flash attention where it applies, else XLA"
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _eight_bits_do_not_compute(cls, dtype: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith(("float8", "fp8")):
            raise ValueError(
                f"model.dtype={dtype} does not exist: only products of large matrices work in 8 bits; use "
                "model.matmul_dtype=float8 with model.dtype=bfloat16, and where memory is short "
                "optimizer.weights=bfloat16_kahan and optimizer.moments=int8"
            )
        return dtype

    @property
    def tied_table(self) -> bool | None:
        """Whether the output head shares the embedding table; None: it reads no such table."""
        raise NotImplementedError

    @property
    def classifies(self) -> bool:
        """Whether it predicts the class of a row, so that rows have labels (`LABEL_COLUMNS`), and not tokens."""
        return False

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of pieces of text, with a label that says whether the second one follows the first; it
        predicts that too."""
        return False

    @property
    def position_table(self) -> bool:
        """Whether parameters depend on `max_length`, such as a table of positions."""
        return True

    @property
    def head_dim(self) -> int | None:
        """Width of one attention head; None: the model has no attention."""
        return None

    @property
    def vocab(self) -> int:
        """Token ids the model knows, a number also before a tokenizer has decided `vocab_size: auto`.

        A preset says what it is made for (`nominal_vocab`), so that it can be planned, counted and compiled without a
        tokenizer.  Training sets `vocab_size` to the tokenizer's number (`jhpt.training.setup.with_vocabulary`) before
        it plans or builds anything.
        """
        return self.nominal_vocab if self.vocab_size == "auto" else self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: `vocab` rounded up to `VOCAB_MULTIPLE`."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """What the tensor axis cuts into equal parts, beside `padded_vocab`: sizes by the name of their setting."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The shape in a few words, for the console."""
        return f"{self.num_layers} layers, width {self.d_model}"

    def parameter_count(self) -> ParameterCount:
        """The exact number of scalar parameters, by place."""
        raise NotImplementedError

    def matrices(self) -> tuple[Matrices, ...]:
        """All matrices and tables in memory."""
        raise NotImplementedError

    def float32_parameters(self) -> int:
        """Parameters that the model uses in float32 whatever it computes in, such as those of norms."""
        raise NotImplementedError

    def visible_keys(self, tokens: int, *, causal: bool) -> float:
        """Keys that an average query of a sequence sees: (s + 1) / 2 causal, otherwise s."""
        return (tokens + 1) / 2 if causal else tokens

    def block_products(self, keys: float) -> float:
        """Multiplications per token of a block's matrix products; keys: that an average query is multiplied with."""
        raise NotImplementedError

    def head_products(self) -> int:
        """Multiplications per predicted token of the head's matrix products."""
        raise NotImplementedError

    def embedding_cost(self, sizes: Sizes) -> LayerCost:
        """The cost of the embedding."""
        raise NotImplementedError

    def block_cost(self, sizes: Sizes) -> LayerCost:
        """The cost of a block."""
        raise NotImplementedError

    def head_cost(self, sizes: Sizes) -> LayerCost:
        """The cost of the head, with its loss."""
        raise NotImplementedError

    def rank_share(self, tensor: int) -> "ModelConfig":
        """What one rank of a tensor degree that divides `tensor_sizes` computes, as a model of its own: for measuring
        the layers of a large tensor degree on one device."""
        raise NotImplementedError

    def row_length(self, sequence_length: int) -> int:
        """Numbers in a row of a batch: its token ids, one more than there are inputs where positions predict the next
        token, and `LABEL_COLUMNS` where rows have labels."""
        return sequence_length + (LABEL_COLUMNS if self.classifies or self.pairs else not self.masked)

    def predicted_tokens(self, sequence_length: int, mask_fraction: float) -> int:
        """Positions of a sequence on which the head runs.

        Masked-token prediction chooses a fixed number, never the first or the last position; a row has one class.
        """
        if self.classifies:
            return 1
        return masked_positions(sequence_length, mask_fraction) if self.masked else sequence_length

    def flops_per_token(
        self,
        sequence_length: int,
        *,
        causal: bool | None = None,
        predicted_share: float = 1.0,
        keys: float | None = None,
    ) -> FlopsPerToken:
        """FLOPs of one token of a sequence of `sequence_length`, averaged over the sequence.

        forward = 2 (num_layers block_products(visible_keys) + predicted_share head_products);   backward = 2 forward

        FLOPs are those of matrix multiplications, 2mnk each; element-wise work is left out (about 1 % at d_model 1024).
        Causal convention: query `i` of `s` sees `i + 1` keys, half of what a dense kernel executes; utilisation figures
        that count the full square are up to twice as high in the attention part.
        Whole sequences are an upper bound where their documents are kept apart (`data.packing`).

        Args:
          causal: whether only visible keys count; None: as the family is.
          predicted_share: share of positions on which the output head runs.
          keys: those that an average token sees, as they were counted; None: the above.
        """
        causal = self.causal if causal is None else causal
        if keys is None:
            keys = self.visible_keys(sequence_length, causal=causal)
        forward = 2.0 * (self.num_layers * self.block_products(keys) + predicted_share * self.head_products())
        return FlopsPerToken(forward=forward, backward=2 * forward)


_FAMILIES: dict[str, type[ModelConfig]] = {}


def register_family(settings: type[ModelConfig]) -> type[ModelConfig]:
    """Registers a family under the default of its field `family`; usable as a decorator.

    Raises:
      ValueError: another class has that name already.
    """
    name = str(settings.model_fields["family"].default)
    if _FAMILIES.setdefault(name, settings) is not settings:
        raise ValueError(f"the model family {name!r} is registered twice; give one of them another name")
    return settings


def families() -> Mapping[str, type[ModelConfig]]:
    """The settings class of every registered family, by name."""
    return _FAMILIES


def family_settings(name: str) -> type[ModelConfig]:
    """The settings class of a family; InputError where there is none of that name."""
    if name not in _FAMILIES:
        raise InputError(f"model.family={name!r}: expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def known_tensors() -> tuple[str, ...]:
    """The named tensors of all families, each once."""
    return tuple(dict.fromkeys(name for settings in _FAMILIES.values() for name in settings.named_tensors))
