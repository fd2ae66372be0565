"""BERT in numbers: a bidirectional encoder with a masked-LM head (Devlin et al. 2018, arXiv 1810.04805)."""

from typing import ClassVar, Literal

from pydantic import Field

from jhpt.core.families.family import Matrices, ParameterCount, register_family, table
from jhpt.core.families.transformer import TransformerConfig
from jhpt.core.section import Count, Positive


@register_family
class BERTConfig(TransformerConfig):
    """A bidirectional encoder with token types, pooler and masked-LM head (Devlin et al. 2018, arXiv 1810.04805)."""

    causal: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    post_norm: ClassVar[bool] = True
    head_transform: ClassVar[bool] = True

    family: Literal["bert"] = "bert"
    type_vocab_size: Count = Field(2, description="token types (segments)")
    norm_eps: Positive = Field(1e-12, description="added to the variance")

    @property
    def mlp_activation(self) -> str:
        """The exact form of gelu."""
        return "gelu_exact"

    @property
    def norm_parameters(self) -> int:
        """A scale and a bias."""
        return 2 * self.d_model

    @property
    def tied_table(self) -> bool:
        """The masked-LM head always shares the embedding table."""
        return True

    def parameter_count(self) -> ParameterCount:
        """By place; the head's count holds the pooler, which masked-LM training leaves as it is initialised."""
        d, norm = self.d_model, self.norm_parameters
        return ParameterCount(
            embedding=self.vocab * d + self.max_length * d + self.type_vocab_size * d + norm,
            per_layer=self.block_parameters(),
            num_layers=self.num_layers,
            head=(d * d + d) + (d * d + d + norm + self.vocab),
            padding=(self.padded_vocab - self.vocab) * (d + 1),
        )

    def matrices(self) -> tuple[Matrices, ...]:
        """Tables of tokens, positions and types, matrices of pooler and head, and the matrices of blocks."""
        rows = (self.padded_vocab, self.max_length, self.type_vocab_size, self.d_model, self.d_model)
        return (*(table(each, self.d_model) for each in rows), *self.block_matrices())

    def float32_parameters(self) -> int:
        """Those of norms (two in a block, the embedding's and the head's) and the head's bias."""
        return (2 * self.num_layers + 2) * self.norm_parameters + self.padded_vocab

    def head_products(self) -> int:
        """The logits, after a transform of [d, d]."""
        return self.vocab * self.d_model + self.d_model * self.d_model
