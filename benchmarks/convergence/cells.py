"""The cells of the table: one short training run each, all on the same tokens, most important first."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jhpt.core.config import Compression

TENSOR, DATA = 4, 4
"""Tensor and data degrees of the compressed runs, on virtual CPU devices."""

HEADLINE = Compression(tokens=0.3, bits=8, rest_bits=4, steps=2)
"""The fastest settings of `jhpt bench comms`.  Two steps round twice."""

GRADIENTS = "parallel.gradient_compression"

SHARES = (0.1, 0.01)
"""Shares of a gradient that top-k sends."""

SEEDS = (0, 1, 2)
STEPS = 400
BATCHES = 40
"""Held-out batches in an evaluation."""

COMPRESSION = "parallel.compression."

PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {},
    "bert-tiny": {"model.num_heads": TENSOR},  # the preset has 2, which a tensor axis of 4 does not divide
}

QUICK = {
    "model.num_layers": 1,
    "model.d_model": 64,
    "data.sequence_length": 32,
    "data.batch_size": 8,
    "train.steps": 8,
    "optimizer.warmup_steps": 2,
    "evaluation.batches": 2,
}
"""Changes that let the cells end within a minute.  They show that cells run, and nothing about losses."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    group: the part of the comparison that it belongs to.  changes: from the preset, by dotted name.  control: what
    chooses tokens in place of the configured rule (`choices`).
    """

    group: str
    preset: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    control: str | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is compressed."""
        return self.group == "plain"

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def devices(self) -> int:
        """Virtual devices it runs on."""
        return int(self.changes.get("parallel.tensor", 1) * self.changes.get("parallel.data", 1))

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides its results."""
        settings = {"group": self.group, "preset": self.preset, "seed": self.seed, "changes": dict(self.changes)}
        return settings | ({} if self.control is None else {"control": self.control})

    @property
    def name(self) -> str:
        """The name of its file: readable, and different for different settings."""
        digest = hashlib.blake2b(json.dumps(self.settings, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.preset}-{self.group.replace(' ', '-')}-{self.seed}-{digest}"


def cells(*, quick: bool) -> list[Cell]:
    """All cells, the most important first."""
    seeds = SEEDS[:1] if quick else SEEDS
    base = {preset: _base(preset, quick=quick) for preset in PRESETS}

    def cell(group: str, preset: str, seed: int, changes: Mapping[str, Any]) -> Cell:
        return Cell(group=group, preset=preset, seed=seed, changes={**base[preset], **changes})

    def compressed(group: str, preset: str, seed: int, compression: Compression) -> Cell:
        changes = {
            f"{COMPRESSION}{name}": value for name, value in compression.model_dump(exclude_defaults=True).items()
        }
        return cell(group, preset, seed, {"parallel.tensor": TENSOR, **changes})

    chosen = []
    for preset in PRESETS:
        chosen += [cell("plain", preset, seed, {}) for seed in seeds]
        chosen += [compressed("headline", preset, seed, HEADLINE) for seed in seeds]
    chosen += [cell("gradients", "gpt-tiny", seed, {"parallel.data": DATA, GRADIENTS: "quantize"}) for seed in seeds]
    chosen += [
        cell(
            "gradients",
            "gpt-tiny",
            0,
            {"parallel.data": DATA, f"{GRADIENTS}.kind": "topk", f"{GRADIENTS}.share": share},
        )
        for share in (SHARES[:1] if quick else SHARES)
    ]
    if not quick:
        chosen += [compressed("table", "gpt-tiny", 0, compression) for compression in table()]
        once = HEADLINE.model_copy(update={"steps": 1})
        chosen += [compressed("one step", preset, seed, once) for preset in PRESETS for seed in seeds]
    return chosen


def table() -> list[Compression]:
    """tokens x bits x rest_bits without the headline, and two choices that look ahead; the least important come last.

    If all tokens are important there are no others, and if all are sent in 4 bits it does not matter which are
    important.
    """
    some = (0.3, 0.5, 0.1)
    dropped = [Compression(tokens=tokens, bits=bits, rest_bits=0, steps=2) for tokens in some for bits in (8, 4)]
    saved = [Compression(tokens=tokens, bits=8, steps=2) for tokens in (1.0, 0.1, 0.5)]
    low = Compression(bits=4, steps=2)
    ahead = [HEADLINE.model_copy(update={"importance": "attention", "rest_bits": bits}) for bits in (0, 4)]
    return [dropped[0], low, saved[0], saved[1], dropped[2], dropped[4], *ahead, saved[2], *dropped[1::2]]


def kind_of(cell: Cell) -> str:
    """What is compressed, in words."""
    changes = cell.changes
    if cell.plain:
        return "nothing"
    if GRADIENTS in changes:
        return "gradients: 8 bits"
    if f"{GRADIENTS}.share" in changes:
        return f"gradients: the largest {changes[f'{GRADIENTS}.share']:.0%}"
    settings = {
        name.removeprefix(COMPRESSION): value for name, value in changes.items() if name.startswith(COMPRESSION)
    }
    return in_words(Compression(**settings))


def in_words(compression: Compression) -> str:
    """`"30% of tokens at 8 bits, the rest at 4"`."""
    rest = f", the rest at {compression.rest_bits}" if compression.rest_bits else ", the rest dropped"
    by = "" if compression.importance == "auto" else f", by {compression.importance}"
    once = ", in one step" if compression.steps == 1 else ""
    return (
        f"{compression.tokens:.0%} of tokens at {compression.bits} bits"
        + (rest if compression.tokens < 1 else "")
        + by
        + once
    )


def _base(preset: str, *, quick: bool) -> dict[str, Any]:
    """What all cells of a preset share."""
    return {
        "train.steps": STEPS,
        "evaluation.batches": BATCHES,
        "log.tensorboard": False,
        "parallel.data": 1,
        **PRESETS[preset],
        **(QUICK if quick else {}),
    }
