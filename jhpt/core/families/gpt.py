"""GPT in numbers: a causal decoder; GPT-2 and Llama shapes are settings of this one family."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from jhpt.core.divisors import divisors, one_of
from jhpt.core.families.family import Matrices, ParameterCount, register_family, table
from jhpt.core.families.transformer import TransformerConfig
from jhpt.core.layers import ACTIVATIONS, NORMS, check_registered
from jhpt.core.section import Count, Positive


@register_family
class GPTConfig(TransformerConfig):
    """A causal decoder: GPT-2 and Llama shapes are settings of this one model."""

    causal: ClassVar[bool] = True
    generates: ClassVar[bool] = True

    family: Literal["gpt"] = "gpt"
    num_kv_heads: Count | None = Field(None, description="key/value heads (grouped-query attention); null: num_heads")
    positions: Literal["learned", "rotary"] = Field("learned", description="position information")
    rope_theta: Positive = Field(10_000.0, description="base wavelength of rotary positions")
    rope_factor: Annotated[float, Field(ge=1)] = Field(
        1.0, description="by which long wavelengths of rotary positions are stretched, as in Llama 3.1; 1: none"
    )
    rope_stretched: Positive = Field(1.0, description="stretched: wavelengths over rope_length / this")
    rope_kept: Positive = Field(4.0, description="not stretched: wavelengths under rope_length / this")
    rope_length: Count = Field(8192, description="longest sequence before the stretching")
    window: Count | None = Field(
        None, description="positions that a token attends to, the last ones and itself; null: all before it"
    )
    norm: str = Field("layernorm", description="norm before each half block: layernorm or rmsnorm")
    norm_eps: Positive = Field(1e-5, description="added to the variance")
    activation: str = Field("gelu", description="MLP non-linearity: gelu, gelu_exact or swiglu")
    bias: bool = Field(True, description="biases in the linear layers")
    qkv_bias: bool = Field(False, description="biases of queries, keys and values even where bias is false (Qwen2)")
    tied: bool = Field(True, description="output head shares the embedding table")
    logits_dtype: Literal["float32", "same"] = Field(
        "float32",
        description="how training stores logits; same: model.dtype, in bfloat16 half the memory.  Their product is "
        "summed, and the loss is computed, in float32 either way",
    )

    @field_validator("norm")
    @classmethod
    def _norm_is_registered(cls, norm: str) -> str:
        return check_registered("model.norm", norm, NORMS)

    @field_validator("activation")
    @classmethod
    def _activation_is_registered(cls, activation: str) -> str:
        return check_registered("model.activation", activation, ACTIVATIONS)

    @model_validator(mode="after")
    def _groups_divide_heads(self) -> "GPTConfig":
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.kv_heads}; "
                f"use {one_of(divisors(self.num_heads))}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions rotate pairs, but d_model / num_heads = {self.head_dim} is odd; "
                "choose an even head width or model.positions=learned"
            )
        return self

    @model_validator(mode="after")
    def _stretching_is_rotary(self) -> "GPTConfig":
        if self.rope_factor > 1 and self.positions != "rotary":
            raise ValueError(
                f"model.rope_factor={self.rope_factor} stretches rotary positions, and model.positions="
                f"{self.positions}; set model.positions=rotary, or leave it out"
            )
        if self.rope_stretched >= self.rope_kept:
            raise ValueError(
                f"model.rope_stretched={self.rope_stretched} is not below model.rope_kept={self.rope_kept}; "
                "wavelengths between the two limits are stretched in part"
            )
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def ffn_width(self) -> int:
        """MLP width; 2/3 of 4 d_model for gated activations, whose MLP has three matrices (Shazeer 2020, arXiv
        2002.05202)."""
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.gates == 1 else -(-8 * self.d_model // 3 // 256) * 256

    @property
    def mlp_activation(self) -> str:
        """As configured; gelu is the tanh form, as in GPT-2."""
        return self.activation

    @property
    def biased(self) -> bool:
        """As configured."""
        return self.bias

    @property
    def qkv_biased(self) -> bool:
        """With all other linear layers, or alone."""
        return self.bias or self.qkv_bias

    @property
    def attention_window(self) -> int | None:
        """As configured."""
        return self.window

    def visible_keys(self, tokens: int, *, causal: bool) -> float:
        """With a window w < s: w - w (w - 1) / 2s, because the first queries see fewer than w keys."""
        if self.window is None or self.window >= tokens or not causal:
            return super().visible_keys(tokens, causal=causal)
        return self.window - self.window * (self.window - 1) / (2 * tokens)

    @property
    def rotates(self) -> bool:
        """Whether positions are rotary."""
        return self.positions == "rotary"

    @property
    def norm_parameters(self) -> int:
        """A scale, and for layernorm a bias."""
        return NORMS[self.norm] * self.d_model

    def bytes_per_logit(self, element: int) -> int:
        """As configured."""
        return element if self.logits_dtype == "same" else super().bytes_per_logit(element)

    @property
    def tied_table(self) -> bool:
        """As configured."""
        return self.tied

    def parameter_count(self) -> ParameterCount:
        """By place; an untied head has a padded table of its own."""
        d, padding_rows = self.d_model, self.padded_vocab - self.vocab
        tokens = self.vocab * d
        positions = self.max_length * d if self.positions == "learned" else 0
        return ParameterCount(
            embedding=tokens + positions,
            per_layer=self.block_parameters(),
            num_layers=self.num_layers,
            head=self.norm_parameters + (0 if self.tied else tokens),
            padding=padding_rows * d * (1 if self.tied else 2),
        )

    def matrices(self) -> tuple[Matrices, ...]:
        """Tables of tokens and positions, and the matrices of blocks."""
        tokens, positions = (table(rows, self.d_model) for rows in (self.padded_vocab, self.max_length))
        tables = [tokens, *([positions] * (self.positions == "learned")), *([tokens] * (not self.tied))]
        return (*tables, *self.block_matrices())

    def float32_parameters(self) -> int:
        """Those of norms: two in a block and the head's."""
        return (2 * self.num_layers + 1) * self.norm_parameters

    def head_products(self) -> int:
        """The logits."""
        return self.vocab * self.d_model
