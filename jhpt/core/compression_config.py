"""The sections `parallel.compression` and `parallel.gradient_compression`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jhpt.core.divisors import one_of
from jhpt.core.section import Count, Fraction, Section


class Compression(Section):
    """Compressed all-reduces of blocks over the tensor axis: important tokens in `bits`, the others in `rest_bits`."""

    bits: Literal[4, 8, 16] = Field(
        16,
        description="bits of a number of an important token; 16 is bfloat16: if all tokens are important, nothing is "
        "compressed",
    )
    tokens: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the tokens of a sample that is important"
    )
    rest_bits: Literal[0, 4] = Field(
        4, description="bits of a number of any other token; 0: those tokens are left out of the all-reduce"
    )
    steps: Literal["auto", 1, 2] = Field(
        "auto",
        description="1: all-gather the codes, which rounds once; 2: reduce-scatter and all-gather, which move "
        "2 / tensor of its bytes; auto: 1 where that moves less than an all-reduce in bfloat16",
    )
    importance: Literal["auto", "attention", "own"] = Field(
        "auto",
        description="what makes a token important; attention: how much attention it receives, which in a causal model "
        "looks ahead; own: the size of its own activations; auto: own in a causal model, else attention",
    )
    forward: bool = Field(True, description="compress activations, in the forward pass")
    backward: bool = Field(True, description="compress their gradients, in the backward pass")

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return (self.bits < 16 or self.tokens < 1) and (self.forward or self.backward)


class CompressionConfig(Compression):
    """Compression by hand, or left to the planner."""

    auto: bool = Field(
        False,
        description="let the planner decide whether and how; the other settings of this section are not read",
    )

    @property
    def settings(self) -> Compression:
        """The settings by hand; with `auto` nothing is compressed."""
        chosen = {} if self.auto else {name: getattr(self, name) for name in Compression.model_fields}
        return Compression(**chosen)


GRADIENT_SETTINGS: dict[str, tuple[str, ...]] = {
    "off": (),
    "quantize": ("bits", "bucket"),
    "topk": ("share", "block", "momentum", "bucket"),
}
"""The settings that each kind of gradient compression reads."""


class GradientCompression(Section):
    """Compressed all-reduces of the gradients of matrices and tables over the data axes, with error feedback: what is
    not sent in a step is added to the gradient of the next."""

    kind: Literal["off", "quantize", "topk"] = Field(
        "off", description="quantize: all numbers in low precision; topk: the largest numbers of every block"
    )
    bits: Literal[4, 8] = Field(8, description="quantize: bits of a number")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="topk: share of a block's numbers that is sent in a step"
    )
    block: Annotated[int, Field(ge=1, le=1 << 16, strict=True)] = Field(
        1024, description="topk: neighbouring numbers of which the largest are sent"
    )
    momentum: Fraction = Field(
        0.0, description="topk: momentum that is accumulated before the selection instead of after it; 0: none"
    )
    bucket: Count = Field(
        1 << 22,
        description="minimum number of elements in one collective; choose it so that sending them takes ten times the "
        "latency",
    )

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.kind != "off"

    @model_validator(mode="after")
    def _settings_are_read(self) -> "GradientCompression":
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "kind" and name not in GRADIENT_SETTINGS[self.kind] and value != info.default:
                readers = [kind for kind, settings in GRADIENT_SETTINGS.items() if name in settings]
                raise ValueError(
                    f"parallel.gradient_compression.{name}={value} is not read with kind={self.kind}; leave it out, or "
                    f"set parallel.gradient_compression.kind to {one_of(readers)}"
                )
        return self


PLAIN_GRADIENTS = GradientCompression()
"""Gradients that are all-reduced without compression."""
