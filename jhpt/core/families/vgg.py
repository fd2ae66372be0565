"""VGG in numbers: 3 x 3 convolutions in groups that each end in a 2 x 2 maximum, then dense layers (Simonyan and
Zisserman 2015, arXiv 1409.1556).

    vgg16   table 1, column D, without dropout: thirteen convolutions and three dense layers

The embedding is the first layer, the head the last one, and every layer between them is a block with shapes of its own.
The tensor axis divides each layer by its output channels: the output is all-gathered, and in the backward pass the
gradient of the input is all-reduced.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jhpt.core.families.family import (
    LOGIT_BYTES,
    FlopsPerToken,
    LayerCost,
    LayerKindCost,
    Matrices,
    ModelConfig,
    ParameterCount,
    Sizes,
    register_family,
)
from jhpt.core.section import Count
from jhpt.core.work import Operation, Work, matmul, stream, transposed

COLUMN_D = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Output channels of the convolutions of VGG-16."""

CLASS_MULTIPLE = 128
"""The head's columns are padded to this multiple, so that every tensor degree divides them."""


Kind = Literal["conv", "conv_pooled", "dense"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the network.

    name: as in the literature.  kind: of its parameters.  kernel: [3, 3, inputs, outputs] of a convolution, [inputs,
    outputs] of a dense layer.  side: pixels on a side of its input; 1 of a dense layer.
    """

    name: str
    kind: Kind
    kernel: tuple[int, ...]
    side: int = 1

    @property
    def channels(self) -> int:
        """Output channels, which the tensor axis divides."""
        return self.kernel[-1]

    @property
    def inputs(self) -> int:
        """Numbers that it reads of a sample."""
        return self.side**2 * self.kernel[-2]

    @property
    def computed(self) -> int:
        """Numbers that its product has for a sample."""
        return self.side**2 * self.channels

    @property
    def outputs(self) -> int:
        """Numbers that it passes on: a quarter of the above after a maximum of 2 x 2."""
        return self.computed // 4 if self.kind == "conv_pooled" else self.computed

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a sample."""
        return math.prod(self.kernel) * self.side**2

    @property
    def parameters(self) -> int:
        """Kernel and bias."""
        return math.prod(self.kernel) + self.channels


@register_family
class VGGConfig(ModelConfig):
    """A network of unlike layers that classifies images."""

    reads: ClassVar[Literal["text", "images"]] = "images"
    alike: ClassVar[bool] = False
    causal: ClassVar[bool] = False

    family: Literal["vgg"] = "vgg"
    image_size: Count = Field(32, description="pixels on a side of an image")
    colours: Count = Field(3, description="numbers in a pixel")
    convolutions: Annotated[tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...], Field(min_length=1)] = Field(
        COLUMN_D, description="output channels of the 3 x 3 convolutions; a 2 x 2 maximum ends each group"
    )
    dense: tuple[Count, ...] = Field((4096, 4096), description="widths of the dense layers before the last one")
    num_classes: Annotated[int, Field(ge=2, le=2**31 - 1, strict=True)] = Field(10, description="classes of the images")

    @model_validator(mode="after")
    def _image_can_be_halved(self) -> "VGGConfig":
        least = 2 ** len(self.convolutions)
        if self.image_size % least:
            raise ValueError(
                f"model.image_size={self.image_size} cannot be halved {len(self.convolutions)} times, once for each "
                f"group of model.convolutions; use a multiple of {least}, or fewer groups"
            )
        return self

    @property
    def table(self) -> tuple[Layer, ...]:
        """All layers, with as many columns of the head as there are classes."""
        layers, width, side = list[Layer](), self.colours, self.image_size
        for group, channels in enumerate(self.convolutions, 1):
            for index, outputs in enumerate(channels, 1):
                kind: Kind = "conv_pooled" if index == len(channels) else "conv"
                layers.append(Layer(name=f"conv{group}_{index}", kind=kind, kernel=(3, 3, width, outputs), side=side))
                width = outputs
            side //= 2
        width *= side**2
        for number, outputs in enumerate((*self.dense, self.num_classes), len(self.convolutions) + 1):
            layers.append(Layer(name=f"fc{number}", kind="dense", kernel=(width, outputs)))
            width = outputs
        return tuple(layers)

    @property
    def num_layers(self) -> int:
        """Blocks: all layers but the first and the last."""
        return len(self.table) - 2

    @property
    def dropout(self) -> float:
        """None."""
        return 0.0

    @property
    def matmul_dtype(self) -> Literal["same", "float8"]:
        """That of all computation."""
        return "same"

    @property
    def tied_table(self) -> bool | None:
        """There is no table."""
        return None

    @property
    def classifies(self) -> bool:
        """Always."""
        return True

    @property
    def padded_classes(self) -> int:
        """Columns of the head: `num_classes` rounded up to `CLASS_MULTIPLE`."""
        return -(-self.num_classes // CLASS_MULTIPLE) * CLASS_MULTIPLE

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """The output channels of all layers but the last, whose columns are padded."""
        groups = enumerate(self.convolutions)
        channels = {f"convolutions.{group}.{at}": n for group, sizes in groups for at, n in enumerate(sizes)}
        return channels | {f"dense.{at}": width for at, width in enumerate(self.dense)}

    @property
    def cut_sizes(self) -> dict[str, int]:
        """`tensor_sizes`, and the columns of the head."""
        return {**self.tensor_sizes, "padded classes": self.padded_classes}

    @property
    def choices(self) -> dict[str, Any]:
        """No sequence of tokens, and no stack of blocks."""
        return {"sample": "an image", "alike": False, "block_kinds": self.layers[1:-1]}

    @property
    def summary(self) -> str:
        """The shape in a few words."""
        convolutions, dense = sum(map(len, self.convolutions)), len(self.dense) + 1
        pixels = f"{self.image_size} x {self.image_size} x {self.colours}"
        return f"{convolutions} convolutions and {dense} dense layers, images of {pixels}, {self.num_classes} classes"

    def parameter_count(self) -> ParameterCount:
        """By place.  Blocks differ, so they count as one."""
        first, *blocks, last = self.table
        return ParameterCount(
            embedding=first.parameters,
            per_layer=sum(block.parameters for block in blocks),
            num_layers=1,
            head=last.parameters,
            padding=(self.padded_classes - self.num_classes) * (last.kernel[0] + 1),
        )

    def matrices(self) -> tuple[Matrices, ...]:
        """Kernels, those of convolutions with all inputs of an output as one dimension."""
        *others, last = self.table
        kernels = [*(layer.kernel for layer in others), (last.kernel[0], self.padded_classes)]
        last_block = len(kernels) - 2
        return tuple(
            Matrices(
                count=1,
                inputs=math.prod(kernel[:-1]),
                outputs=kernel[-1],
                row=kernel[-1],
                of_blocks=0 < at <= last_block,
            )
            for at, kernel in enumerate(kernels)
        )

    def float32_parameters(self) -> int:
        """None."""
        return 0

    def row_length(self, sequence_length: int) -> int:
        """The numbers of all pixels, and the class."""
        return self.image_size**2 * self.colours + 1

    def units(self, sequence_length: int) -> int:
        """One image."""
        return 1

    def sample(self, sequence_length: int) -> str:
        """An image."""
        return f"an image of {self.image_size} x {self.image_size}"

    def predicted_tokens(self, sequence_length: int, mask_fraction: float) -> int:
        """One class."""
        return 1

    def flops_per_token(
        self,
        sequence_length: int,
        *,
        causal: bool | None = None,
        predicted_share: float = 1.0,
        keys: float | None = None,
    ) -> FlopsPerToken:
        """FLOP of an image: 2 x multiply-accumulates forward, and twice as many backward but for the first layer,
        whose input has no gradient."""
        macs = [layer.macs for layer in self.table]
        return FlopsPerToken(forward=2.0 * sum(macs), backward=2.0 * (2 * sum(macs) - macs[0]))

    @property
    def layers(self) -> tuple[str, ...]:
        """Each layer is a kind of its own."""
        return tuple(layer.name for layer in self.table)

    def layer_kinds(self, sizes: Sizes) -> dict[str, LayerKindCost]:
        """By name; padding counts in the head."""
        first, *_, last = self.table
        padding = self.parameter_count().padding
        return {
            layer.name: LayerKindCost(
                parameters=layer.parameters + (padding if layer == last else 0),
                cost=self._cost(layer, sizes.element, first=layer == first, last=layer == last),
            )
            for layer in self.table
        }

    def _cost(self, layer: Layer, element: int, *, first: bool, last: bool) -> LayerCost:
        """Saved for the backward pass: the input, whole on every tensor rank, and what the product gives.

        An all-gather of s bytes takes half as long as an all-reduce of s bytes, and counts as one of s / 2.  The
        exchange of the head's softmax, three numbers a sample, is left out.
        """
        columns = self.padded_classes if last else layer.channels
        computed, outputs = columns * layer.side**2, 0 if last else layer.outputs

        def work(batch: int, tensor: int) -> Work:
            if layer.kind == "dense":
                product = matmul(batch, columns / tensor, layer.kernel[0], element)
            else:
                moved = batch * layer.inputs + (batch * computed + math.prod(layer.kernel)) / tensor
                product = Operation(2.0 * batch * layer.macs / tensor, float(element * moved))
            # ReLU, and the maximum or the softmax: each reads and writes, and its gradient once more.
            passed = 2.0 * batch * (LOGIT_BYTES if last else element) * (computed + outputs) / tensor
            backward = transposed((product,))
            return Work((product, stream(passed)), (*(backward[1:] if first else backward), stream(2 * passed)))

        return LayerCost(
            work=work,
            boundary_bytes=float(element * outputs),
            activation_bytes=float((LOGIT_BYTES if last else element) * computed),
            replicated_bytes=float(element * layer.inputs),
            tensor_forward_bytes=element * outputs / 2,
            tensor_backward_bytes=0.0 if first else float(element * layer.inputs),
        )
