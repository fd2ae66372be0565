"""What model families that read tokens have in common: their vocabulary, and an embedding, equal blocks and a head."""

from typing import Annotated, Literal

from pydantic import Field

from jhpt.core.families.family import (
    LABEL_COLUMNS,
    FlopsPerToken,
    LayerCost,
    LayerKindCost,
    ModelConfig,
    Sizes,
    masked_positions,
)
from jhpt.core.section import Count, Fraction

VOCAB_MULTIPLE = 128
"""Embedding tables are padded to this multiple, so that a tensor axis divides them and GPU tiles are full."""

MOST_LAYERS = 1024
"""Blocks up to which plans are found within seconds."""


class TextConfig(ModelConfig):
    """The settings and numbers of families that read tokens: an embedding, L equal blocks, and a head over a
    vocabulary."""

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
    matmul_dtype: Literal["same", "float8"] = Field(
        "same",
        description="operands of the matrix products of blocks; same: model.dtype; float8: with a scale each, on GPUs "
        "of compute capability 8.9 or more",
    )
    attention: Literal["auto", "cudnn", "xla"] = Field(
        "auto", description="attention kernel; auto: cuDNN flash attention where it applies, else XLA"
    )

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
    def cut_sizes(self) -> dict[str, int]:
        """`tensor_sizes`, and the rows of the table."""
        return {**self.tensor_sizes, "rows of the padded vocabulary": self.padded_vocab}

    @property
    def summary(self) -> str:
        """The shape in a few words, for the console."""
        return f"{self.num_layers} layers, width {self.d_model}"

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

    @property
    def layers(self) -> tuple[str, ...]:
        """Embedding, blocks, head."""
        return ("embedding", *("block",) * self.num_layers, "head")

    def layer_kinds(self, sizes: Sizes) -> dict[str, LayerKindCost]:
        """Embedding, block and head; padding counts where the padded tables are."""
        count = self.parameter_count()
        padded = (self.padded_vocab - self.vocab) * self.d_model
        tied = self.padded_vocab * self.d_model if self.tied_table else 0
        return {
            "embedding": LayerKindCost(parameters=count.embedding + padded, cost=self.embedding_cost(sizes)),
            "block": LayerKindCost(parameters=count.per_layer, cost=self.block_cost(sizes)),
            "head": LayerKindCost(
                parameters=count.head + count.padding - padded, tied=tied, cost=self.head_cost(sizes)
            ),
        }

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
