"""The task of the hosts, and the variants of all-reduces that they measure."""

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.emulated.task import Launch
from jhpt.core.config import Compression

LANES = 4
"""Chunks of a host's samples, each on a virtual device of its own."""

TOKENS = 0.3
"""Share of important tokens, in variants that choose them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to all-reduce over the tensor axis.

    compression: None: XLA's all-reduce of numbers of this dtype.  lanes: devices of a host over which the samples are
    divided.  sample_chunks: the runtime's own chunks of the samples of one device (`parallel.sample_chunks`).
    """

    name: str
    compression: Compression | None = None
    dtype: Literal["float32", "float16"] = "float32"
    lanes: int = 1
    sample_chunks: int = 1

    @property
    def pieces(self) -> int:
        """The number of pieces in which samples are reduced."""
        return self.lanes * self.sample_chunks

    @property
    def sums(self) -> str:
        """A name of its all-reduces, which variants that differ in pieces alone share."""
        if (how := self.compression) is None:
            return self.dtype
        rest = f" of {how.tokens:.0%} of tokens, the rest in {how.rest_bits}" if how.tokens < 1 else ""
        return f"{how.bits} bits{rest}, steps {how.steps}"


FLOAT32, SHORT, SHORT_STEPS, OVERLAP = "serial, float32", "serial, 16 bits", "16 bits in two steps", "overlap, 16 bits"
TOKENS_ALONE, QUANTIZED, FOUR, MIXED = "tokens", "quantization", "quantization, 4 bits", "tokens + quantization"
GATHERED, ALL = "tokens + quantization, steps auto", "all"
OWN_SHORT, OWN_ALL = "sample chunks, 16 bits", "sample chunks, all"
BASELINE = SHORT

_MIXED = Compression(bits=8, tokens=TOKENS, rest_bits=4, steps=2)

VARIANTS: tuple[Variant, ...] = (
    Variant(name=FLOAT32),
    Variant(name=SHORT, dtype="float16"),
    Variant(name=OVERLAP, dtype="float16", lanes=LANES),
    Variant(name=SHORT_STEPS, compression=Compression(bits=16)),
    Variant(name=TOKENS_ALONE, compression=Compression(bits=16, tokens=TOKENS, rest_bits=0, steps=2)),
    Variant(name=QUANTIZED, compression=Compression(bits=8)),
    Variant(name=FOUR, compression=Compression(bits=4, steps=2)),
    Variant(name=MIXED, compression=_MIXED),
    Variant(name=GATHERED, compression=_MIXED.model_copy(update={"steps": "auto"})),
    Variant(name=ALL, compression=_MIXED, lanes=LANES),
    Variant(name=OWN_SHORT, dtype="float16", sample_chunks=LANES),
    Variant(name=OWN_ALL, compression=_MIXED, sample_chunks=LANES),
)
"""All variants, in the order of the table.  With steps=auto an all-reduce of four ranks in 5.2 bits is gathered, which
rounds once and moves twice the bytes (`core.compression.gathers`); the others take two steps."""

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
