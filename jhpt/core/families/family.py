"""What a model family is to configurations, the planner and the console: its settings and its numbers, without jax.

A family is a subclass of `ModelConfig`, or of `text.TextConfig` if it reads tokens, registered under the name that
`model.family` has:

    register_family(MixerConfig)        # class MixerConfig(TextConfig): family: Literal["mixer"] = "mixer"; ...

Whatever depends on the family is a property of its settings; no other code asks which family it is.  The functions,
with jax, are registered with `jhpt.models.family.register_model`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from jhpt.core.errors import InputError
from jhpt.core.section import Section
from jhpt.core.work import NamedTensor, Work

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


LOGIT_BYTES = 4
"""Logits are float32, unless a family says otherwise (`ModelConfig.bytes_per_logit`)."""


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
class LayerKindCost:
    """A kind of layer.  parameters: allocated ones.  tied: how many of them are the first layer's, too."""

    parameters: int
    cost: LayerCost
    tied: int = 0


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


class ModelConfig(Section):
    """The settings that all families have, and the numbers that each family has to provide.

    Class variables of a family:
      reads: text or images.  Models of text are `TextConfig`s.
      alike: blocks have parameters of the same shapes, so they can be stacked; otherwise every block has its own.
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

    reads: ClassVar[Literal["text", "images"]] = "text"
    alike: ClassVar[bool] = True
    causal: ClassVar[bool]
    masked: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    keeps_documents_apart: ClassVar[bool] = False
    post_norm: ClassVar[bool] = False
    named_tensors: ClassVar[tuple[str, ...]] = (BLOCK_INPUT,)
    coded_sizes: ClassVar[tuple[str, ...]] = ()

    family: str
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="compute dtype; auto: bfloat16 on GPU, float32 on CPU (parameters: optimizer.weights)",
    )

    if TYPE_CHECKING:  # settings of some families, and properties of others

        @property
        def num_layers(self) -> int:
            """Blocks between embedding and head."""

        @property
        def dropout(self) -> float:
            """Dropout after embedding, attention and MLP."""

        @property
        def matmul_dtype(self) -> Literal["same", "float8"]:
            """Operands of the matrix products of blocks."""

    def bytes_per_logit(self, element: int) -> int:
        """Of a number of the head's result.  element: bytes of a number in the compute dtype."""
        return LOGIT_BYTES

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
        """Whether it predicts the class of a row, so that rows have labels (of text: `LABEL_COLUMNS`), and not
        tokens."""
        return False

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of pieces of text, with a label that says whether the second one follows the first; it
        predicts that too."""
        return False

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """What the tensor axis cuts into equal parts, beside rows of tables: sizes by the name of their setting."""
        raise NotImplementedError

    @property
    def cut_sizes(self) -> dict[str, int]:
        """All that the tensor axis cuts into equal parts, by what it is called."""
        return self.tensor_sizes

    @property
    def choices(self) -> dict[str, Any]:
        """What rules have to know about the family: fields of `jhpt.core.rules.Choices`."""
        return {}

    @property
    def summary(self) -> str:
        """The shape in a few words, for the console."""
        raise NotImplementedError

    def parameter_count(self) -> ParameterCount:
        """The exact number of scalar parameters, by place."""
        raise NotImplementedError

    def matrices(self) -> tuple[Matrices, ...]:
        """All matrices and tables in memory."""
        raise NotImplementedError

    def float32_parameters(self) -> int:
        """Parameters that the model uses in float32 whatever it computes in, such as those of norms."""
        raise NotImplementedError

    def layer_kinds(self, sizes: Sizes) -> dict[str, LayerKindCost]:
        """What each kind of layer costs, by its name."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer, in the order of the forward pass."""
        raise NotImplementedError

    def rank_share(self, tensor: int) -> "ModelConfig":
        """What one rank of a tensor degree that divides `tensor_sizes` computes, as a model of its own: for measuring
        the layers of a large tensor degree on one device."""
        raise NotImplementedError

    def row_length(self, sequence_length: int) -> int:
        """Numbers in a row of a batch."""
        raise NotImplementedError

    @property
    def unit(self) -> str:
        """What `units` counts, as it is written before `_per_s`."""
        return "images" if self.reads == "images" else "tokens"

    def units(self, sequence_length: int) -> int:
        """Units of work in a row, whose number a second is what a run reports: tokens of a sequence, or one image."""
        return sequence_length

    def sample(self, sequence_length: int) -> str:
        """What a row is, in words that `jhpt.core.profile.ModelProfile` knows."""
        return f"a sequence of {sequence_length} tokens"

    def predicted_tokens(self, sequence_length: int, mask_fraction: float) -> int:
        """Positions of a row on which the head runs."""
        raise NotImplementedError

    def flops_per_token(
        self,
        sequence_length: int,
        *,
        causal: bool | None = None,
        predicted_share: float = 1.0,
        keys: float | None = None,
    ) -> FlopsPerToken:
        """FLOPs of a unit of work (`units`): a token of a sequence of `sequence_length`, averaged over it, or an image.

        FLOPs are those of matrix multiplications and convolutions, 2mnk each; element-wise work is left out.

        Args:
          causal: whether only visible keys count; None: as the family is.
          predicted_share: share of positions on which the output head runs.
          keys: those that an average token sees, as they were counted; None: the above.
        """
        raise NotImplementedError


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
