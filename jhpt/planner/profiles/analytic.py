"""A GPT's or BERT's `ModelProfile` from its configuration and a device's datasheet, without running anything.

Layers: embedding, L blocks, head.  Seconds are those of the roofline (`jhpt.planner.profiles.roofline`) over

    block      qkv [bs, d] [d, (d + 2 kv) / t], attention, projection [bs, d / t] [d / t, d],
               up [bs, d] [d, g f / t], down [bs, f / t] [f / t, d]; norms, residual sums, activation
    embedding  rows of the table; in the backward pass a gradient of the whole table
    head       x[bs, d] E^T[d, V / t], softmax over float32 logits; in BERT only at predicted positions, after d x d

with b samples of s tokens, tensor degree t, key/value width kv, MLP width f, and g = 2 for swiglu, else 1.  The tensor
axis divides products as in Megatron (Shoeybi et al. 2019, arXiv 1909.08053, section 3) and `jhpt.sharding.partition`.
Saved for the backward pass are those of a block's named tensors (`NAMED_TENSORS`) that it reads, as in the runtime:
norms, activations and attention scores are recomputed.

Left out: dropout, masks, softmax statistics of flash attention (0.2 % of what is saved), and the conversion of float32
weights to the compute dtype, since the profile counts a 16-bit copy of the weights as part of the state.
"""

import math
from dataclasses import dataclass

from jhpt.core.catalogue import capability_by_driver
from jhpt.core.cluster import Device
from jhpt.core.config import NAMED_TENSORS, BERTConfig, Config, GPTConfig, ModelConfig, divisors
from jhpt.core.profile import LayerKind, ModelProfile, NamedTensor
from jhpt.core.shapes import ParameterCount, parameter_count
from jhpt.core.state import State, most_cuts, state_of
from jhpt.planner.profiles.named_tensors import size_of
from jhpt.planner.profiles.roofline import (
    ELEMENT_BYTES,
    Operation,
    Work,
    check_dtype,
    matmul,
    stream,
    timings,
    transposed,
)

MAX_DEGREE = 64
"""Largest tensor degree with timings of its own; for larger degrees `LayerKind.seconds` divides the last ones."""

FLASH_HEAD = 128
"""Widest head, a multiple of 8, of cuDNN's flash attention (`jhpt.models.attention`)."""

FLASH_CAPABILITY = 8.0
"""The compute capability that cuDNN's flash attention needs at least."""

EIGHT_BITS = {"float8": "; products in 8 bits count as that, and may take less"}
"""Note in a profile's source, by `model.matmul_dtype`: no 8-bit rates have been measured."""

LOGIT_BYTES = 4
"""Logits are float32 (`jhpt.models.vocabulary`)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that costs depend on.

    gates: input matrices of the MLP.  predicted: positions at which the head computes logits.  post_norm: whether a
    norm follows each sum of the residual stream.  element: bytes of a number.
    """

    tokens: int
    width: int
    heads: int
    head_width: int
    kv_width: int
    ffn: int
    gates: int
    vocab: int
    predicted: int
    causal: bool
    rotary: bool
    post_norm: bool
    flash: bool
    element: int

    @property
    def residual(self) -> int:
        """Bytes of one sample's residual stream."""
        return self.tokens * self.width * self.element

    @property
    def keys(self) -> float:
        """Keys that an average query is multiplied with.  Plain attention multiplies with masked keys too."""
        return (self.tokens + 1) / 2 if self.causal and self.flash else self.tokens


def analytic_profile(config: Config, device: Device, dtype: str = "bfloat16") -> ModelProfile:
    """The profile of `config` on `device`; one sample is a sequence of `data.sequence_length` tokens.

    Parameters include padding.  The seconds of a tensor degree exclude its collectives, whose bytes are
    in `tensor_forward_bytes` and `tensor_backward_bytes`.

    Raises:
      InputError: the device has no rate for `dtype`.
    """
    check_dtype(device, dtype)
    model, shape = config.model, shape_of(config, device, dtype)
    count = parameter_count(model)
    table = model.padded_vocab * model.d_model
    tied = table if isinstance(model, BERTConfig) or model.tied else 0
    state = state_of(model, config.optimizer)
    # The tensor axis cuts the MLP's rows; with int8 moments only between blocks of codes.
    cuts = most_cuts(model.ffn_width) if state.moments == "int8" else model.ffn_width
    max_tensor = math.gcd(model.num_heads, model.kv_heads, cuts, model.padded_vocab)
    parameters = _parameters(model, count)
    profile = ModelProfile(
        name=config.name,
        device=device.name,
        source=f"analytic: roofline of {device.name}, {dtype}" + EIGHT_BITS.get(config.model.matmul_dtype, ""),
        sample=f"a sequence of {shape.tokens} tokens",
        causal=isinstance(model, GPTConfig),
        dtype=dtype,
        products=model.matmul_dtype,
        bytes_per_weight=shape.element,
        state=state,
        kinds={
            "embedding": _embedding(model, shape, parameters["embedding"], max_tensor, device, dtype),
            "block": _block(shape, parameters["block"], max_tensor, device, dtype),
            "head": _head(model, shape, parameters["head"], tied, max_tensor, device, dtype),
        },
        layers=("embedding", *("block",) * model.num_layers, "head"),
    )
    # Clipping reads the gradient once more, for its norm.
    clip = shape.element if config.optimizer.clip_norm is not None else 0
    copy = 0 if profile.used_as_stored else shape.element
    return profile.model_copy(
        update={
            "state_bytes": shape.element + copy + state.bytes,
            "update_seconds": (update_bytes(state, shape.element, copy) + clip) / device.memory_bandwidth,
        }
    )


def update_bytes(state: State, element: int, copy: int) -> float:
    """Bytes that an update reads and writes per parameter: `element + copy + 2 state.bytes`.

    It reads the gradient (element), reads and writes the stored state, and writes the copy of the weight that is
    computed with, if there is one.  Left out: decoding and coding of low-precision moments.
    """
    return element + copy + 2 * state.bytes


def shape_of(config: Config, device: Device, dtype: str) -> Shape:
    """The sizes of `config` that costs depend on."""
    model, tokens = config.model, config.data.sequence_length
    gpt = model if isinstance(model, GPTConfig) else None
    # BERT predicts a fixed number of tokens, never the first and the last one (`jhpt.training.masking`).
    predicted = tokens if gpt else max(1, round(config.data.mask_fraction * (tokens - 2)))
    return Shape(
        tokens=tokens,
        width=model.d_model,
        heads=model.num_heads,
        head_width=model.head_dim,
        kv_width=model.kv_heads * model.head_dim,
        ffn=model.ffn_width,
        gates=2 if gpt and gpt.activation == "swiglu" else 1,
        vocab=model.padded_vocab,
        predicted=predicted,
        causal=gpt is not None,
        rotary=gpt is not None and gpt.positions == "rotary",
        post_norm=gpt is None,
        flash=_flash(model, device, dtype),
        element=ELEMENT_BYTES[dtype],
    )


def _flash(model: ModelConfig, device: Device, dtype: str) -> bool:
    """Whether attention runs in cuDNN's flash kernel, by the rules of `jhpt.models.attention.choose_attention`."""
    fits = ELEMENT_BYTES[dtype] == 2 and model.head_dim % 8 == 0 and model.head_dim <= FLASH_HEAD
    capability = capability_by_driver(device.name)
    return model.attention != "xla" and fits and (capability is None or capability >= FLASH_CAPABILITY)


def _parameters(model: ModelConfig, count: ParameterCount) -> dict[str, int]:
    """Allocated parameters of each kind of layer; padding counts where the padded tables are."""
    rows = model.padded_vocab - model.vocab_size
    in_table = rows * model.d_model
    in_head = count.padding - in_table
    return {"embedding": count.embedding + in_table, "block": count.per_layer, "head": count.head + in_head}


def _degrees(max_tensor: int) -> list[int]:
    return divisors(max_tensor, up_to=min(max_tensor, MAX_DEGREE))


def _embedding(
    model: ModelConfig, shape: Shape, parameters: int, max_tensor: int, device: Device, dtype: str
) -> LayerKind:
    """The table is cut by rows.  Each rank looks up all tokens, with zeros for missing rows; an all-reduce follows."""
    has_norm = isinstance(model, BERTConfig)

    def work(batch: int, tensor: int) -> Work:
        stream_bytes = batch * shape.residual
        # Reads rows and writes the stream; a norm reads and writes it once more.
        forward = stream((4 if has_norm else 2) * stream_bytes)
        # The table's gradient is as large as the table: zeroed, then rows are added (read and write).
        table = shape.vocab * shape.width * shape.element / tensor
        return Work((forward,), (stream((6 if has_norm else 3) * stream_bytes + table),))

    token_ids = 4.0 * shape.tokens
    return LayerKind(
        parameters=parameters,
        boundary_bytes=shape.residual,
        activation_bytes=0.0,
        replicated_bytes=token_ids + (shape.residual if has_norm else 0.0),
        tensor_forward_bytes=shape.residual,
        max_tensor=max_tensor,
        timings=timings(work, _degrees(max_tensor), device, dtype),
    )


def _block(shape: Shape, parameters: int, max_tensor: int, device: Device, dtype: str) -> LayerKind:
    """Attention and MLP each end in an all-reduce over the tensor axis, and in the backward pass begin with one."""

    def work(batch: int, tensor: int) -> Work:
        return block_work(shape, batch, tensor)

    tensors = named_tensors(shape)
    saved = size_of(tensors, NAMED_TENSORS)
    return LayerKind(
        parameters=parameters,
        boundary_bytes=shape.residual,
        activation_bytes=saved.divided,
        replicated_bytes=saved.whole,
        tensor_forward_bytes=2.0 * shape.residual,
        tensor_backward_bytes=2.0 * shape.residual,
        max_tensor=max_tensor,
        timings=timings(work, _degrees(max_tensor), device, dtype),
        tensors=tensors,
    )


def block_work(shape: Shape, batch: int, tensor: int) -> Work:
    """The operations of one block on one of `tensor` devices."""
    rows, width, element = batch * shape.tokens, shape.width, shape.element
    weights = (
        matmul(rows, (width + 2 * shape.kv_width) / tensor, width, element),
        matmul(rows, width, width / tensor, element),
        matmul(rows, shape.gates * shape.ffn / tensor, width, element),
        matmul(rows, width, shape.ffn / tensor, element),
    )
    attention_forward, attention_backward = _attention(shape, batch, tensor)
    traffic = _elementwise(shape, batch, tensor)
    return Work(
        (*weights, *attention_forward, stream(traffic)),
        # Element-wise operations are recomputed, since they are not saved; gradients read two tensors per one written.
        (*transposed(weights), *attention_backward, stream(3 * traffic)),
    )


def _elementwise(shape: Shape, batch: int, tensor: int) -> float:
    """Bytes of the forward pass outside products.

    The stream, on every rank: two norms (read, write) and two sums (read two, write).  Divided by the tensor axis: the
    activation (reads its inputs, writes one) and the rotation of queries and keys (read, write).
    """
    hidden = (shape.gates + 1) * shape.ffn + shape.rotary * 2 * (shape.width + shape.kv_width)
    return batch * (10 * shape.residual + shape.tokens * hidden * shape.element / tensor)


def _attention(shape: Shape, batch: int, tensor: int) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Two products of s queries with `keys` keys per head; the backward pass has five, as it recomputes the scores.

    Flash attention (Dao et al. 2022, arXiv 2205.14135; backward of five products: Dao 2023, arXiv 2307.08691, section
    3.1) is one kernel that moves only queries, keys, values and the result.
    """
    heads, tokens, element = batch * shape.heads / tensor, shape.tokens, shape.element
    if shape.flash:
        product = 2.0 * heads * tokens * shape.keys * shape.head_width
        moved = batch * tokens * (2 * shape.width + 2 * shape.kv_width) * element / tensor
        return (Operation(2 * product, moved),), (Operation(5 * product, 2 * moved),)
    scores = matmul(tokens, tokens, shape.head_width, element, heads)
    mixed = matmul(tokens, shape.head_width, tokens, element, heads)
    # Softmax in float32: reads scores for the maximum and the sum and for the result, which it writes.
    softmax = stream((4 + 4 + element) * heads * tokens * tokens)
    return (scores, softmax, mixed), (scores, softmax, *transposed((scores, mixed)), softmax)


def named_tensors(shape: Shape) -> tuple[NamedTensor, ...]:
    """Tensors that a block may save for its backward pass, per sample, with the FLOP that recompute each.

    The backward pass reads all but the last one, which only enters a residual sum unless a norm follows.
    """
    tokens, width, element = shape.tokens, shape.width, shape.element

    def product(name: str, columns: int, depth: int, inputs: tuple[str, ...], *, summed: bool = False) -> NamedTensor:
        return NamedTensor(
            name=name,
            bytes=float(tokens * columns * element),
            flops=2.0 * tokens * columns * depth,
            sharded=not summed,
            inputs=inputs,
            read=name != "mlp_out" or shape.post_norm,
            summed=summed,
        )

    attention = 4.0 * shape.heads * tokens * shape.keys * shape.head_width
    return (
        NamedTensor(name="residual_in", bytes=float(shape.residual), sharded=False),
        product("qkv", width + 2 * shape.kv_width, width, ("residual_in",)),
        NamedTensor(name="attention_out", bytes=float(shape.residual), flops=attention, inputs=("qkv",)),
        product("projection_out", width, width, ("attention_out",), summed=True),
        product("mlp_hidden", shape.gates * shape.ffn, width, ("residual_in", "projection_out")),
        product("mlp_out", width, shape.ffn, ("mlp_hidden",), summed=True),
    )


def _head(
    model: ModelConfig, shape: Shape, parameters: int, tied: int, max_tensor: int, device: Device, dtype: str
) -> LayerKind:
    """Logits are cut by columns.  Left out: three numbers per token that the ranks exchange for the softmax.

    Saved: the float32 logits or their softmax, and the input of the product with the tensors that led to it.
    """
    transform = isinstance(model, BERTConfig)
    stream_bytes = shape.predicted * shape.width * shape.element

    def work(batch: int, tensor: int) -> Work:
        rows = batch * shape.predicted
        logits = rows * shape.vocab / tensor
        products = [matmul(rows, shape.vocab / tensor, shape.width, shape.element)]
        if transform:
            products.append(matmul(rows, shape.width, shape.width, shape.element))
        norm = batch * stream_bytes * (6 if transform else 2)
        # Logits are written in float32 and read for the maximum, the sum and the target; backward: read, gradient
        # written.
        forward = norm + logits * (LOGIT_BYTES - shape.element + 2 * LOGIT_BYTES)
        backward = 2 * norm + logits * (LOGIT_BYTES + shape.element)
        return Work((*products, stream(forward)), (*transposed(products), stream(backward)))

    return LayerKind(
        parameters=parameters,
        tied_parameters=tied,
        boundary_bytes=0.0,
        activation_bytes=float(shape.predicted * shape.vocab * LOGIT_BYTES),
        replicated_bytes=float((4 if transform else 2) * stream_bytes),
        tensor_backward_bytes=float(stream_bytes),
        max_tensor=max_tensor,
        timings=timings(work, _degrees(max_tensor), device, dtype),
    )
