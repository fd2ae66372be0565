"""What the hosts are asked to measure, as text on their command line, and where they leave what they found."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One launch.

    tag, cpu: of the lab.  folder: for files that all hosts see.  rates: bits per second.
    layers, width, heads, length, batch: of the blocks.
    rounds: samples of a step.  parts_rounds: of what predictions are made of.
    """

    tag: str
    cpu: float
    folder: str
    rates: tuple[float, ...]
    layers: int
    width: int
    heads: int
    length: int
    batch: int
    rounds: int
    parts_rounds: int

    def text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    def leave(self, rows: list[dict[str, Any]]) -> None:
        """Writes what was found."""
        Path(self.folder, "rows.json").write_text(json.dumps(rows))

    def result(self) -> list[dict[str, Any]]:
        """What `leave` wrote."""
        return json.loads(Path(self.folder, "rows.json").read_text())

    @staticmethod
    def parse(text: str) -> "Task":
        """`text` backwards."""
        given = json.loads(text)
        return Task(**{**given, "rates": tuple(given["rates"])})
