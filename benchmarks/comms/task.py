"""What the hosts are asked to measure, and the ways to sum."""

from dataclasses import dataclass, replace

from benchmarks.emulated.task import Launch
from jhpt.core.config import Compression

LANES = 4
"""Chunks of a host's samples, each on a virtual device of its own."""

TOKENS = 0.3
"""Share of the tokens that is important, where any are."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to sum over the tensor axis.

    how: of the bits; None: float32, XLA's own all-reduce.  lanes: over which the samples are divided.
    """

    name: str
    how: Compression | None
    lanes: int = 1

    @property
    def sums(self) -> str:
        """What its sums are called: variants that differ in lanes alone share it."""
        return SHORT if self.name == OVERLAP else MIXED if self.name == ALL else self.name


FLOAT32, SHORT, OVERLAP, TOKENS_ALONE = "serial, float32", "serial, 16 bits", "overlap", "tokens"
QUANTIZED, MIXED, ALL = "quantization", "tokens + quantization", "all"
BASELINE = SHORT

VARIANTS: tuple[Variant, ...] = (
    Variant(name=FLOAT32, how=None),
    Variant(name=SHORT, how=Compression(bits=16)),
    Variant(name=OVERLAP, how=Compression(bits=16), lanes=LANES),
    Variant(name=TOKENS_ALONE, how=Compression(bits=16, tokens=TOKENS, rest_bits=0, steps=2)),
    Variant(name=QUANTIZED, how=Compression(bits=8)),
    Variant(name=MIXED, how=Compression(bits=8, tokens=TOKENS, rest_bits=4, steps=2)),
    Variant(name=ALL, how=Compression(bits=8, tokens=TOKENS, rest_bits=4, steps=2), lanes=LANES),
)
"""In the order of the table.  Where it is left to itself, a sum of four ranks in 5.2 bits is gathered, which rounds
once and moves twice the bytes of two steps (`core.compression.gathers`): here all take two."""

QUICK = (SHORT, OVERLAP, MIXED, ALL)
"""Names of those that `--quick` takes: what claims are made of."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """GPT blocks and what they are given.  batch: samples.  length: tokens of each."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Task(Launch):
    """One launch.

    rates: bits per second.
    blocks: of tensor parallelism.  gradients: of data parallelism, with the batch of a host.
    variants, exchanges: names of the ways to sum over the tensor axis, and to sum gradients
      (`benchmarks.comms.gradients`).
    lanes: most of a variant.
    rounds: samples of a step.  parts_rounds: of what predictions are made of.
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
        """To sum over the tensor axis."""
        chosen = (one for one in VARIANTS if one.name in self.variants)
        return tuple(replace(one, lanes=min(one.lanes, self.lanes)) for one in chosen)
