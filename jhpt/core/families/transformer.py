"""The numbers of a transformer, which GPT and BERT share: settings, parameters, FLOPs, and the work of its layers.

    block      qkv [bs, d] [d, (d + 2 kv) / t], attention, projection [bs, d / t] [d / t, d],
               up [bs, d] [d, g f / t], down [bs, f / t] [f / t, d]; norms, residual sums, activation
    embedding  rows of the table; backward a gradient of the whole table
    head       x[bs, d] E^T[d, V / t], softmax over float32 logits, on the predicted positions

with b samples of s tokens, tensor degree t, key/value width kv, MLP width f and g input matrices of the activation (2
for swiglu).  The division over the tensor axis is Megatron's (Shoeybi et al. 2019, arXiv 1909.08053, section 3), that
of `jhpt.sharding.partition`.  Saved for the backward pass are the named tensors of a block that it reads; norms,
activations and attention scores are computed again.
"""

from functools import cache
from typing import Any, ClassVar

from pydantic import Field, model_validator

from jhpt.core.divisors import divisors, one_of
from jhpt.core.families.family import BLOCK_INPUT, LayerCost, Matrices, Sizes
from jhpt.core.families.text import TextConfig
from jhpt.core.layers import ACTIVATIONS
from jhpt.core.section import Count
from jhpt.core.work import NamedTensor, Operation, Work, matmul, stream, table, transposed

NAMED_TENSORS = (BLOCK_INPUT, "qkv", "attention_out", "projection_out", "mlp_hidden", "mlp_out")
"""Names inside a block, in the order in which the forward pass produces them."""

FUSED_BACKWARD = 0.85
"""The rate of fused attention's backward pass relative to the forward pass.  Dao 2023 (arXiv 2307.08691), figures 5 and
6, A100, head width 128: 0.8 to 0.9."""

HALF_FILLED = 300
"""Tokens at which fused attention reaches half of its rate: it works off blocks of 64 to 128 queries and keys, the
first and last of which do not overlap.  It fits the same figures from 512 to 16,384 tokens within a tenth."""

NARROW = 0.85
"""The rate of fused attention with heads of up to 64 relative to wider ones, by the same figures: the softmax takes as
long for half as many products."""


def fused_attention_rate(tokens: int, head_dim: int) -> float:
    """Share of its best rate that fused attention reaches: tokens / (tokens + `HALF_FILLED`), less for narrow heads."""
    return tokens / (tokens + HALF_FILLED) * (NARROW if head_dim <= 64 else 1.0)


def plain_attention(
    sizes: Sizes, heads: float, head_dim: int, *, drops: bool
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Both passes of attention that is not one kernel.

    A fused softmax reads the scores and writes the probabilities, and dropout reads and writes these; the gradient
    takes half as much again.  Unless the probabilities are saved, the backward pass makes them again.
    """
    tokens, element = sizes.tokens, sizes.element
    scores = matmul(tokens, tokens, head_dim, element, heads)
    mixed = matmul(tokens, head_dim, tokens, element, heads)
    numbers = heads * tokens * tokens
    softmax = stream((4 if drops else 2) * element * numbers, drawn=numbers * drops)
    again = () if sizes.keeps_scores else (scores, softmax)
    # The masks are drawn again, once: with the probabilities, or for the gradient alone.
    gradient = stream((6 if drops else 3) * element * numbers, drawn=numbers * drops * (not again))
    return (scores, softmax, mixed), (*again, *transposed((scores, mixed)), gradient)


class TransformerConfig(TextConfig):
    """The settings and numbers that GPT and BERT share."""

    named_tensors: ClassVar[tuple[str, ...]] = NAMED_TENSORS
    coded_sizes: ClassVar[tuple[str, ...]] = ("d_ff",)
    keeps_documents_apart: ClassVar[bool] = True
    head_transform: ClassVar[bool] = False
    """Whether the head multiplies its input with a matrix [d, d] before the table."""

    num_heads: Count = Field(4, description="query heads")
    d_ff: Count | None = Field(
        None, description="MLP width; null: 4 d_model (8/3 d_model up to a multiple of 256 for swiglu)"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "TransformerConfig":
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}; "
                f"use {one_of(divisors(self.d_model, up_to=2 * self.num_heads))} heads"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: all of them."""
        return self.num_heads

    @property
    def ffn_width(self) -> int:
        """MLP width."""
        return self.d_ff or 4 * self.d_model

    @property
    def mlp_activation(self) -> str:
        """The MLP's activation by its registered name."""
        raise NotImplementedError

    @property
    def gates(self) -> int:
        """Input matrices of the MLP: two for swiglu."""
        return ACTIVATIONS[self.mlp_activation]

    @property
    def biased(self) -> bool:
        """Whether linear layers have biases."""
        return True

    @property
    def qkv_biased(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.biased

    @property
    def attention_window(self) -> int | None:
        """The number of positions that a query sees, itself included; None: all that causality leaves."""
        return None

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return False

    @property
    def position_table(self) -> bool:
        """Where positions are not rotary."""
        return not self.rotates

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        raise NotImplementedError

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Heads and hidden units."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads, "d_ff": self.ffn_width}

    @property
    def summary(self) -> str:
        """The shape in a few words, for the console."""
        return f"{super().summary}, {self.num_heads} heads"

    def block_parameters(self) -> int:
        """Parameters of a block."""
        d, width, kv_width = self.d_model, self.ffn_width, 2 * self.kv_heads * self.head_dim
        attention = d * (d + kv_width) + d * d + self.qkv_biased * (d + kv_width) + self.biased * d
        mlp = (self.gates + 1) * d * width + self.biased * (self.gates * width + d)
        return attention + mlp + 2 * self.norm_parameters

    def block_matrices(self) -> tuple[Matrices, ...]:
        """The matrices of all blocks; those of a gated activation count apart."""
        d, width = self.d_model, self.ffn_width

        def each(inputs: int, outputs: int, row: int, count: int = 1) -> Matrices:
            return Matrices(count=count * self.num_layers, inputs=inputs, outputs=outputs, row=row, of_blocks=True)

        return (
            each(d, d + 2 * self.kv_heads * self.head_dim, self.head_dim),
            each(d, d, d),
            each(d, width, width, self.gates),
            each(width, d, d),
        )

    def block_products(self, keys: float) -> float:
        """d (d + 2 kv) + d^2 + (gates + 1) d f + 2 d keys."""
        d = self.d_model
        projections = d * (d + 2 * self.kv_heads * self.head_dim) + d * d
        mlp = (self.gates + 1) * d * self.ffn_width
        return projections + mlp + 2 * d * keys

    def embedding_cost(self, sizes: Sizes) -> LayerCost:
        """The table is split by rows: each rank looks up all tokens, and the rows, zero elsewhere, are all-reduced."""
        residual, has_norm = self._residual(sizes), self.post_norm

        def work(batch: int, tensor: int) -> Work:
            stream_bytes = batch * residual
            # Reads rows and writes the stream; a norm reads and writes it once more.
            forward = table((4 if has_norm else 2) * stream_bytes)
            # The table's gradient is as large as the table: zeroed, then rows are added (read and write).
            gradient = self.padded_vocab * self.d_model * sizes.element / tensor
            return Work((forward,), (table((6 if has_norm else 3) * stream_bytes + gradient),))

        token_ids = 4.0 * sizes.tokens
        return LayerCost(
            work=work,
            boundary_bytes=residual,
            replicated_bytes=token_ids + (residual if has_norm else 0.0),
            tensor_forward_bytes=residual,
        )

    def block_cost(self, sizes: Sizes) -> LayerCost:
        """Attention and MLP each end in an all-reduce over the tensor axis, and in the backward pass begin with one."""
        residual = self._residual(sizes)
        return LayerCost(
            work=lambda batch, tensor: self._block_work(sizes, batch, tensor),
            boundary_bytes=residual,
            tensor_forward_bytes=2.0 * residual,
            tensor_backward_bytes=2.0 * residual,
            tensors=self._tensors(sizes),
        )

    def head_cost(self, sizes: Sizes) -> LayerCost:
        """Logits are split by columns; the softmax exchanges three numbers per token, which are left out.

        Saved: the logits, or what became of them in the softmax, and the product's input with what led to it.
        """
        transform, stored = self.head_transform, self.bytes_per_logit(sizes.element)
        stream_bytes = sizes.predicted * self.d_model * sizes.element

        def work(batch: int, tensor: int) -> Work:
            rows = batch * sizes.predicted
            logits = rows * self.padded_vocab / tensor
            products = [matmul(rows, self.padded_vocab / tensor, self.d_model, sizes.element)]
            if transform:
                products.append(matmul(rows, self.d_model, self.d_model, sizes.element))
            norm = batch * stream_bytes * (6 if transform else 2)
            # Written as stored, read for the maximum, the sum and the target.  Backward: read, gradient written.
            forward = norm + logits * (stored - sizes.element + 2 * stored)
            backward = 2 * norm + logits * (stored + sizes.element)
            return Work((*products, table(forward)), (*transposed(products), table(backward)))

        return LayerCost(
            work=work,
            activation_bytes=float(sizes.predicted * self.padded_vocab * stored),
            replicated_bytes=float((4 if transform else 2) * stream_bytes),
            tensor_backward_bytes=float(stream_bytes),
        )

    def rank_share(self, tensor: int) -> "TransformerConfig":
        """heads / t, MLP width / t and vocabulary / t; the widths of the residual stream and of heads stay."""
        share = dict(
            num_heads=self.num_heads // tensor,
            d_ff=self.ffn_width // tensor,
            vocab_size=max(self.vocab // tensor, 1),
            head_width=self.head_dim,
            rows=self.padded_vocab // tensor,
        )
        if "num_kv_heads" in type(self).model_fields:
            share["num_kv_heads"] = self.kv_heads // tensor
        return _rank_class(type(self)).model_validate(self.model_dump() | share)

    def _residual(self, sizes: Sizes) -> int:
        """Bytes of one sample's residual stream."""
        return sizes.tokens * self.d_model * sizes.element

    def _keys(self, sizes: Sizes) -> float:
        """Keys that an average query is multiplied with: plain attention computes the masked ones too."""
        return self.visible_keys(sizes.tokens, causal=True) if self.causal and sizes.flash else sizes.tokens

    @property
    def _kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def _block_work(self, sizes: Sizes, batch: int, tensor: int) -> Work:
        rows, width, element = batch * sizes.tokens, self.d_model, sizes.element
        weights = (
            matmul(rows, (width + 2 * self._kv_width) / tensor, width, element),
            matmul(rows, width, width / tensor, element),
            matmul(rows, self.gates * self.ffn_width / tensor, width, element),
            matmul(rows, width, self.ffn_width / tensor, element),
        )
        attention_forward, attention_backward = self._attention(sizes, batch, tensor)
        forward, backward = (self._elementwise(sizes, batch, tensor, times) for times in (1, 2))
        return Work((*weights, *attention_forward, *forward), (*transposed(weights), *attention_backward, *backward))

    def _elementwise(self, sizes: Sizes, batch: int, tensor: int, times: int) -> tuple[Operation, Operation]:
        """A pass outside products; its gradient reads two tensors for each one that it writes (`times`).

        The stream: two norms (read, write), two sums (read two, write) and, with dropout, a mask for each sum, on every
        rank.  Divided by the tensor axis: the activation (reads its inputs, writes one) and the rotation of queries and
        keys (read, write).
        """
        hidden = (self.gates + 1) * self.ffn_width + self.rotates * 2 * (self.d_model + self._kv_width)
        drops = self.dropout > 0
        numbers = 2 * batch * sizes.tokens * self.d_model if drops else 0
        return (
            stream(times * (13 if drops else 10) * batch * self._residual(sizes), drawn=numbers, repeated=True),
            stream(times * batch * sizes.tokens * hidden * sizes.element / tensor),
        )

    def _attention(self, sizes: Sizes, batch: int, tensor: int) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """Two products of s queries with the keys for each head; the backward pass makes five, the scores once more.

        Flash attention (Dao et al. 2022, arXiv 2205.14135; backward of five products: Dao 2023, arXiv 2307.08691,
        section 3.1) is one kernel that moves queries, keys, values and the result only.
        """
        heads, tokens, element = batch * self.num_heads / tensor, sizes.tokens, sizes.element
        if sizes.flash:
            product = 2.0 * heads * tokens * self._keys(sizes) * self.head_dim
            moved = batch * tokens * (2 * self.d_model + 2 * self._kv_width) * element / tensor
            rate = fused_attention_rate(tokens, self.head_dim)
            return (
                (Operation(2 * product, moved, "fused attention", rate=rate),),
                (Operation(5 * product, 2 * moved, "fused attention", rate=FUSED_BACKWARD * rate),),
            )
        return plain_attention(sizes, heads, self.head_dim, drops=self.dropout > 0)

    def _tensors(self, sizes: Sizes) -> tuple[NamedTensor, ...]:
        """What the backward pass of a block may find saved, and the FLOP that make each again.

        It reads all but the last one, which only enters a residual sum unless a norm follows.
        """
        tokens, width, element = sizes.tokens, self.d_model, sizes.element
        residual = float(self._residual(sizes))

        def product(
            name: str, columns: int, depth: int, inputs: tuple[str, ...], *, summed: bool = False
        ) -> NamedTensor:
            return NamedTensor(
                name=name,
                bytes=float(tokens * columns * element),
                flops=2.0 * tokens * columns * depth,
                sharded=not summed,
                inputs=inputs,
                read=name != "mlp_out" or self.post_norm,
                summed=summed,
                operand_bytes=float(tokens * depth * element),
            )

        attention = 4.0 * self.num_heads * tokens * self._keys(sizes) * self.head_dim
        return (
            NamedTensor(name=BLOCK_INPUT, bytes=residual, sharded=False),
            product("qkv", width + 2 * self._kv_width, width, (BLOCK_INPUT,)),
            NamedTensor(name="attention_out", bytes=residual, flops=attention, inputs=("qkv",)),
            product("projection_out", width, width, ("attention_out",), summed=True),
            product("mlp_hidden", self.gates * self.ffn_width, width, (BLOCK_INPUT, "projection_out")),
            product("mlp_out", width, self.ffn_width, ("mlp_hidden",), summed=True),
        )


@cache
def _rank_class(settings: type[TransformerConfig]) -> type[TransformerConfig]:
    """Settings of a family whose head width and table are given, not derived: those of the whole model."""

    class Rank(settings):  # type: ignore[misc, valid-type]
        head_width: Count = Field(description="width of one head")
        rows: Count = Field(description="rows of this rank's embedding table")

        @property
        def head_dim(self) -> Any:
            return self.head_width

        @property
        def padded_vocab(self) -> Any:
            return self.rows

    return Rank
