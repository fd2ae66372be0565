"""One tensor rank's share of a model, as a smaller model that a single device can time."""

from pydantic import Field

from jhpt.core.config import BERTConfig, Count, GPTConfig, ModelConfig, common_divisors, one_of
from jhpt.core.errors import InputError


class _GPTRank(GPTConfig):
    """A GPT whose head width and table are those of the whole model."""

    head_width: Count = Field(description="width of one head")
    rows: Count = Field(description="rows of this rank's embedding table")

    @property
    def head_dim(self) -> int:
        return self.head_width

    @property
    def padded_vocab(self) -> int:
        return self.rows


class _BERTRank(BERTConfig):
    """A BERT whose head width and table are those of the whole model."""

    head_width: Count = Field(description="width of one head")
    rows: Count = Field(description="rows of this rank's embedding table")

    @property
    def head_dim(self) -> int:
        return self.head_width

    @property
    def padded_vocab(self) -> int:
        return self.rows


def tensor_degrees(model: ModelConfig) -> list[int]:
    """Tensor degrees that divide everything the tensor axis cuts, ascending."""
    return common_divisors((model.num_heads, model.kv_heads, model.ffn_width, model.padded_vocab))


def rank_share(model: ModelConfig, tensor: int) -> ModelConfig:
    """The model with heads / t, MLP width / t and vocabulary / t; widths of the residual stream and of heads stay.

    Raises:
      InputError: `tensor` does not divide them.
    """
    if tensor == 1:
        return model
    if tensor not in (degrees := tensor_degrees(model)):
        raise InputError(f"tensor degree {tensor} does not divide this model; use {one_of(degrees)}")
    share = dict(
        num_heads=model.num_heads // tensor,
        d_ff=model.ffn_width // tensor,
        vocab_size=max(model.vocab_size // tensor, 1),
        head_width=model.head_dim,
        rows=model.padded_vocab // tensor,
    )
    if isinstance(model, GPTConfig):
        return _GPTRank.model_validate(model.model_dump() | share | {"num_kv_heads": model.kv_heads // tensor})
    return _BERTRank.model_validate(model.model_dump() | share)
