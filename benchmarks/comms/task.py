"""The task of the hosts, and the variants of all-reduces that they measure."""

from dataclasses import dataclass, replace

from benchmarks.emulated.task import Launch
from jhpt.core.config import Compression

LANES = 4
"""Chunks of a host's samples, each on a virtual device of its own."""

TOKENS = 0.3
"""Share of important tokens, in variants that choose them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to all-reduce over the tensor axis.

    compression: None: XLA's all-reduce in float32.  lanes: over how many the samples are divided.
    """

    name: str
    compression: Compression | None
    lanes: int = 1

    @property
    def sums(self) -> str:
        """The name of its all-reduces, which variants that differ in lanes alone share."""
        return SHORT if self.name == OVERLAP else MIXED if self.name == ALL else self.name


FLOAT32, SHORT, OVERLAP, TOKENS_ALONE = "serial, float32", "serial, 16 bits", "overlap", "tokens"
QUANTIZED, MIXED, ALL = "quantization", "tokens + quantization", "all"
BASELINE = SHORT

VARIANTS: tuple[Variant, ...] = (
    Variant(name=FLOAT32, compression=None),
    Variant(name=SHORT, compression=Compression(bits=16)),
    Variant(name=OVERLAP, compression=Compression(bits=16), lanes=LANES),
    Variant(name=TOKENS_ALONE, compression=Compression(bits=16, tokens=TOKENS, rest_bits=0, steps=2)),
    Variant(name=QUANTIZED, compression=Compression(bits=8)),
    Variant(name=MIXED, compression=Compression(bits=8, tokens=TOKENS, rest_bits=4, steps=2)),
    Variant(name=ALL, compression=Compression(bits=8, tokens=TOKENS, rest_bits=4, steps=2), lanes=LANES),
)
"""All variants, in the order of the table.  All take two steps: with steps=auto, an all-reduce of four ranks in 5.2
bits would be gathered, which rounds once and moves twice the bytes (`core.compression.gathers`)."""

QUICK = (SHORT, OVERLAP, MIXED, ALL)
"""Names of the variants that `--quick` measures: those of the claims."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """GPT blocks and their input.  batch: samples.  length: tokens of each."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Task(Launch):
    """One launch.

    rates: bits per second.
    blocks: those of tensor parallelism.  gradients: those of data parallelism, with the batch of a host.
    variants, exchanges: names of the ways to reduce over the tensor axis, and to reduce gradients
      (`benchmarks.comms.gradients`).
    lanes: the most that a variant may use.
    rounds: how often a step is timed.  parts_rounds: how often the parts of predictions are.
    """

    rates: tuple[float, ...]
    blocks: Shape
    gradients: Shape
    variants: tuple[str, ...]
    exchanges: tuple[str, ...]
    lanes: int
    rounds: int
    parts_rounds: int

    @property
    def ways(self) -> tuple[Variant, ...]:
        """The variants of this launch."""
        chosen = (one for one in VARIANTS if one.name in self.variants)
        return tuple(replace(one, lanes=min(one.lanes, self.lanes)) for one in chosen)
