"""Layer tables of networks in the literature on parallel training: VGG-16, ResNet-50 and GNMT.

A table states for each layer, per sample: multiply-accumulates (MAC), parameters, numbers that it reads and writes, and
numbers saved for the backward pass.  `network_profile` turns it into a `ModelProfile` with
`jhpt.planner.profiles.analytic`.

    vgg16     Simonyan & Zisserman 2015 (arXiv 1409.1556), table 1, column D; 224 x 224: 138.36 M parameters, 15.5 GMAC
    resnet50  He et al. 2016 (arXiv 1512.03385), table 1, with the stride in the 3 x 3 convolution of a block, as usual
              since (Goyal et al. 2017, arXiv 1706.02677, section 5.1): 25.56 M parameters, 4.1 GMAC
    gnmt      Wu et al. 2016 (arXiv 1609.08144) as in MLPerf training and NVIDIA's GNMT v2: 4 layers in the encoder, the
              first in both directions, and 4 in the decoder, 1024 wide, 32320 words, attention after the first decoder
              layer: 160 M parameters; 50 tokens on either side

A layer is a convolution with the norm, activation and pooling that follow, a bottleneck block, an LSTM layer or a
fully connected one.  The tensor axis divides every product by channels.  Each product has an all-reduce of its whole
output in the forward pass, and one of its input's gradient in the backward pass.  Left out: Winograd and other
algorithms with fewer FLOP, and the gradient of GNMT's whole table (0.07 ms per micro-batch on a V100).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jhpt.core.calibration import ours
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.core.work import Operation, Work, stream, transposed
from jhpt.planner.profiles.analytic import ELEMENT_BYTES, Runner, check_dtype, timings

STATE_BYTES = {"adam": 16.0, "momentum": 12.0}
"""Bytes of state per parameter: weight and gradient (2 + 2), float32 master weight (4) and moments (4 each); in float32
the weight is its own master, weight and gradient (4 + 4), and the sum is the same."""

UPDATE_BYTES = {"adam": 28.0, "momentum": 20.0}
"""Traffic of an update per parameter: reads the gradient (2), writes the weight (2), reads and writes the master weight
(8) and each moment (8); in float32 reads the gradient (4), reads and writes the weight (8) and each moment (8)."""

MAX_DEGREE = 64
"""Largest tensor degree of a layer here: more devices than any of these networks has ever been divided over."""

VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Output channels of the 3 x 3 convolutions; a 2 x 2 pooling ends each stage."""

RESNET_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner channels and number of bottleneck blocks; the outer channels are four times the inner ones."""

GNMT_WIDTH = 1024
GNMT_WORDS = 32_320
"""32317 of MLPerf's vocabulary, padded to a multiple of 8 (NVIDIA GNMT v2)."""

GNMT_TOKENS = 50
"""Longest sentence in training (NVIDIA GNMT v2, --train-max-length)."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix multiplication or convolution of one sample, executed `steps` times one after the other.

    macs, inputs and outputs are those of one execution; `columns` is what the tensor axis divides.
    """

    macs: int
    inputs: int
    outputs: int
    weights: int
    columns: int
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a table.  saved: how many numbers per sample the backward pass reads."""

    kind: str
    products: tuple[Product, ...]
    parameters: int
    outputs: int
    saved: int
    tied: int = 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample, forward."""
        return sum(product.macs * product.steps for product in self.products)

    @property
    def max_tensor(self) -> int:
        """Largest power of two that divides the output channels of every product, at most `MAX_DEGREE`."""
        return math.gcd(MAX_DEGREE, *(product.columns for product in self.products)) if self.products else 1


def network_layers(name: str) -> tuple[Layer, ...]:
    """The layer table of a network, in the order of the forward pass; InputError for an unknown name."""
    if name not in TABLES:
        raise InputError(f"there is no network {name!r}{did_you_mean(name, TABLES)}; known: {', '.join(TABLES)}")
    return tuple(TABLES[name]())


def network_profile(name: str, device: Device, dtype: str = "bfloat16") -> ModelProfile:
    """The profile of a network on a device.  The image networks are trained with momentum, GNMT with Adam.

    Raises:
      InputError: unknown network, or the device has no rate for `dtype`.
    """
    layers = network_layers(name)
    check_dtype(device, dtype)
    optimizer = "adam" if name == "gnmt" else "momentum"
    return ModelProfile(
        name=name,
        device=device.name,
        source=f"analytic: layer table of {name}, roofline of {device.name}, {dtype}",
        sample=f"a pair of sentences of {GNMT_TOKENS} tokens" if name == "gnmt" else "an image of 224 x 224",
        dtype=dtype,
        bytes_per_weight=ELEMENT_BYTES[dtype],
        state_bytes=STATE_BYTES[optimizer],
        update_seconds=UPDATE_BYTES[optimizer] / device.stream_rate,
        framework=ours(),
        kinds={layer.kind: _layer_kind(layer, device, dtype) for layer in layers},
        layers=tuple(layer.kind for layer in layers),
    )


def _layer_kind(layer: Layer, device: Device, dtype: str) -> LayerKind:
    element = ELEMENT_BYTES[dtype]

    def work(batch: int, tensor: int) -> Work:
        products = [
            operation for product in layer.products for operation in _operations(product, batch, tensor, element)
        ]
        # Saved numbers (norms, activations, gates) are written once and read once; their gradients twice each.
        traffic = 2.0 * element * batch * layer.saved / tensor
        return Work((*products, stream(traffic)), (*transposed(products), stream(2 * traffic)))

    split = layer.max_tensor > 1
    degrees = [2**power for power in range(layer.max_tensor.bit_length())]
    return LayerKind(
        parameters=layer.parameters,
        tied_parameters=layer.tied,
        boundary_bytes=float(element * layer.outputs),
        activation_bytes=float(element * layer.saved),
        tensor_forward_bytes=split * element * sum(float(p.outputs * p.steps) for p in layer.products),
        tensor_backward_bytes=split * element * sum(float(p.inputs * p.steps) for p in layer.products),
        max_tensor=layer.max_tensor,
        timings=timings(work, degrees, Runner(device=device, dtype=dtype, framework=ours())),
    )


def _operations(product: Product, batch: int, tensor: int, element: int) -> tuple[Operation, ...]:
    moved = batch * product.inputs + (batch * product.outputs + product.weights) / tensor
    return (Operation(2.0 * batch * product.macs / tensor, float(element * moved)),) * product.steps


def _convolution(size: int, inputs: int, outputs: int, side: int, stride: int = 1) -> Product:
    """size x size filters over `inputs` channels; the output is side x side, the input stride times as wide."""
    weights = size * size * inputs * outputs
    return Product(
        macs=weights * side * side,
        inputs=inputs * (side * stride) ** 2,
        outputs=outputs * side * side,
        weights=weights,
        columns=outputs,
    )


def _dense(inputs: int, outputs: int, rows: int = 1, steps: int = 1) -> Product:
    """`rows` vectors of a sample times one matrix, `steps` times."""
    weights = inputs * outputs
    return Product(
        macs=rows * weights,
        inputs=rows * inputs,
        outputs=rows * outputs,
        weights=weights,
        columns=outputs,
        steps=steps,
    )


def _connected(kind: str, inputs: int, outputs: int) -> Layer:
    """A fully connected layer with bias; its output is saved."""
    return Layer(
        kind=kind,
        products=(_dense(inputs, outputs),),
        parameters=(inputs + 1) * outputs,
        outputs=outputs,
        saved=outputs,
    )


def _vgg16() -> Iterator[Layer]:
    inputs, side = 3, 224
    for stage, channels in enumerate(VGG_STAGES, 1):
        for index, outputs in enumerate(channels, 1):
            product, pooled = _convolution(3, inputs, outputs, side), index == len(channels)
            passed = product.outputs // 4 if pooled else product.outputs
            # The convolution's output, that of the pooling, and the image.
            saved = product.outputs + (passed if pooled else 0) + (product.inputs if inputs == 3 else 0)
            yield Layer(
                kind=f"conv{stage}_{index}",
                products=(product,),
                parameters=product.weights + outputs,
                outputs=passed,
                saved=saved,
            )
            inputs = outputs
        side //= 2
    yield _connected("fc6", inputs * side * side, 4096)
    yield _connected("fc7", 4096, 4096)
    yield _connected("fc8", 4096, 1000)


def _resnet50() -> Iterator[Layer]:
    """Convolutions have no bias; each is followed by a batch norm, which saves its input and its output."""
    stem = _convolution(7, 3, 64, 112, stride=2)
    pooled = 64 * 56 * 56
    yield Layer(
        kind="conv1",
        products=(stem,),
        parameters=stem.weights + 2 * 64,
        outputs=pooled,
        saved=stem.inputs + 2 * stem.outputs + pooled,
    )
    inputs, side = 64, 56
    for stage, (inner, blocks) in enumerate(RESNET_STAGES, 2):
        stride = 1 if stage == 2 else 2
        side //= stride
        yield _bottleneck(f"block{stage}_1", inputs, inner, side, stride, shortcut=True)
        inputs = 4 * inner
        for _ in range(blocks - 1):
            yield _bottleneck(f"block{stage}", inputs, inner, side, 1, shortcut=False)
    yield _connected("fc", inputs, 1000)


def _bottleneck(kind: str, inputs: int, inner: int, side: int, stride: int, *, shortcut: bool) -> Layer:
    """1 x 1, 3 x 3 with the stride, 1 x 1; the first block of a stage has a convolution in its shortcut too."""
    products = [
        _convolution(1, inputs, inner, side * stride),
        _convolution(3, inner, inner, side, stride),
        _convolution(1, inner, 4 * inner, side),
    ]
    if shortcut:
        products.append(_convolution(1, inputs, 4 * inner, side, stride))
    return Layer(
        kind=kind,
        products=tuple(products),
        parameters=sum(product.weights + 2 * product.columns for product in products),
        outputs=4 * inner * side * side,
        saved=2 * sum(product.outputs for product in products),
    )


def _gnmt() -> Iterator[Layer]:
    """Decoder layers pass on the attention's context, which each of them reads beside its own input."""
    width, tokens, table = GNMT_WIDTH, GNMT_TOKENS, GNMT_WORDS * GNMT_WIDTH
    passed = tokens * width
    yield Layer(kind="embedding", products=(), parameters=table, outputs=passed, saved=passed)
    yield _lstm("encoder1", width, directions=2, outputs=2 * passed)
    yield _lstm("encoder2", 2 * width, outputs=passed)
    yield _lstm("encoder", width, outputs=passed)
    yield _lstm("encoder", width, outputs=passed)
    yield _attentive_lstm(table, 2 * passed)
    for _ in range(2):
        yield _lstm("decoder", 2 * width, outputs=2 * passed)
    yield _lstm("decoder4", 2 * width, outputs=passed)
    words = _dense(width, GNMT_WORDS, rows=tokens)
    yield Layer(
        kind="classifier",
        products=(words,),
        parameters=words.weights + GNMT_WORDS,
        outputs=words.outputs,
        saved=words.outputs,
    )


def _lstm(kind: str, inputs: int, *, outputs: int, directions: int = 1) -> Layer:
    """Four gates of x[inputs] and of h[width]; two biases each, as cuDNN has.

    There is one product with x over all tokens; the products with h run token by token.  Saved: gates, cell, h.
    """
    width, tokens = GNMT_WIDTH, GNMT_TOKENS
    products = (_dense(inputs, 4 * width, rows=tokens), _dense(width, 4 * width, steps=tokens)) * directions
    return Layer(
        kind=kind,
        products=products,
        parameters=sum(product.weights + 4 * width for product in products),
        outputs=outputs,
        saved=directions * tokens * 6 * width,
    )


def _attentive_lstm(table: int, outputs: int) -> Layer:
    """The decoder's first layer: embedding (the encoder's table), LSTM, and attention v tanh(W q + U k) over the source
    (Bahdanau et al. 2015, arXiv 1409.0473), all target tokens at once; normalised, with a scale and a bias."""
    width, tokens = GNMT_WIDTH, GNMT_TOKENS
    lstm = _lstm("decoder1", width, outputs=outputs)
    queries = _dense(width, width, rows=tokens)
    pairs = tokens * tokens
    context = Product(
        macs=2 * pairs * width, inputs=2 * tokens * width, outputs=tokens * width, weights=0, columns=width
    )
    return Layer(
        kind="decoder1",
        products=(*lstm.products, queries, queries, context),
        parameters=lstm.parameters + 2 * queries.weights + 2 * width + 1,
        outputs=outputs,
        # Embedded tokens, projected queries and keys, context, and tanh of every pair.
        saved=lstm.saved + 4 * tokens * width + pairs * width,
        tied=table,
    )


TABLES: dict[str, Callable[[], Iterator[Layer]]] = {"vgg16": _vgg16, "resnet50": _resnet50, "gnmt": _gnmt}
"""Networks by name."""
