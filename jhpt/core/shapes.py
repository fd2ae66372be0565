"""Exact parameter counts and FLOPs of a model, as functions of its configuration.

FLOPs are those of matrix multiplications, 2mnk each; element-wise work is left out (about 1 % at d_model 1024).  The
backward pass multiplies twice for each forward product.  Causal convention: query `i` of `s` sees `i + 1` keys, so
attention costs (s + 1) / 2 keys per query, half of what a dense kernel executes; utilisation figures that count the
full square are up to 2x higher in the attention part.
"""

from dataclasses import dataclass

from jhpt.core.config import BERTConfig, GPTConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by place.  `padding` rows of the vocabulary are allocated but never used."""

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


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Number of scalar parameters, by place."""
    d, padding_rows = model.d_model, model.padded_vocab - model.vocab_size
    tokens = model.vocab_size * d
    match model:
        case GPTConfig():
            norm = d if model.norm == "rmsnorm" else 2 * d
            positions = model.max_length * d if model.positions == "learned" else 0
            return ParameterCount(
                embedding=tokens + positions,
                per_layer=_block_parameters(model, norm, model.bias),
                num_layers=model.num_layers,
                head=norm + (0 if model.tied else tokens),
                padding=padding_rows * d * (1 if model.tied else 2),
            )
        case BERTConfig():
            norm = 2 * d
            return ParameterCount(
                embedding=tokens + model.max_length * d + model.type_vocab_size * d + norm,
                per_layer=_block_parameters(model, norm, True),
                num_layers=model.num_layers,
                head=(d * d + d) + (d * d + d + norm + model.vocab_size),
                padding=padding_rows * (d + 1),
            )


def _block_parameters(model: ModelConfig, norm: int, bias: bool) -> int:
    d, width, kv_width = model.d_model, model.ffn_width, 2 * model.kv_heads * model.head_dim
    gates = _gates(model)
    attention = d * (d + kv_width) + d * d + bias * ((d + kv_width) + d)
    mlp = (gates + 1) * d * width + bias * (gates * width + d)
    return attention + mlp + 2 * norm


def matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(numbers, numbers in a row) of all matrices and tables in memory, those of all blocks together; a row is the last
    dim, as the models lay them out."""
    d, width, layers = model.d_model, model.ffn_width, model.num_layers
    table = model.padded_vocab * d
    qkv, up = d * (d + 2 * model.kv_heads * model.head_dim), d * _gates(model) * width
    blocks = ((layers * qkv, model.head_dim), (layers * d * d, d), (layers * up, width), (layers * width * d, d))
    match model:
        case GPTConfig():
            positions = model.max_length * d if model.positions == "learned" else 0
            embedding_and_head = [(table + positions + (0 if model.tied else table), d)]
        case BERTConfig():
            embedding_and_head = [(table + (model.max_length + model.type_vocab_size) * d, d), (2 * d * d, d)]
    return (*embedding_and_head, *blocks)


def in_float32(model: ModelConfig) -> int:
    """Parameters that models use in float32, whatever they compute in: norms, and the bias of BERT's head."""
    d, layers = model.d_model, model.num_layers
    match model:
        case GPTConfig():
            return (2 * layers + 1) * (d if model.norm == "rmsnorm" else 2 * d)
        case BERTConfig():
            return (2 * layers + 2) * 2 * d + model.padded_vocab


def _gates(model: ModelConfig) -> int:
    """Input matrices of the MLP: two for swiglu."""
    return 2 if isinstance(model, GPTConfig) and model.activation == "swiglu" else 1


def flops_per_token(
    model: ModelConfig, sequence_length: int, *, causal: bool | None = None, predicted_share: float = 1.0
) -> FlopsPerToken:
    """FLOPs of one token of a sequence of `sequence_length`, averaged over the sequence.

    forward = 2 [L (d (d + 2 kv) + d^2 + (gates + 1) d f + 2 d keys) + share head]
    keys = (s + 1) / 2 causal, s otherwise

    Args:
      causal: whether only visible keys count; None: as the model's family is.
      predicted_share: share of positions on which the output head runs (BERT predicts masked tokens only).
    """
    d, layers = model.d_model, model.num_layers
    causal = isinstance(model, GPTConfig) if causal is None else causal
    keys = (sequence_length + 1) / 2 if causal else sequence_length
    projections = d * (d + 2 * model.kv_heads * model.head_dim) + d * d
    mlp = (_gates(model) + 1) * d * model.ffn_width
    head = model.vocab_size * d + (d * d if isinstance(model, BERTConfig) else 0)
    forward = 2.0 * (layers * (projections + mlp + 2 * d * keys) + predicted_share * head)
    return FlopsPerToken(forward=forward, backward=2 * forward)
