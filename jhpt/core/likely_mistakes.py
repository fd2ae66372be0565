"""Settings that are possible and rarely meant: each is one line at the start of a run, and of `jhpt plan`.

A line here has to be right nearly always, or nobody would read any of them: no preset has one.  What nothing reads is
refused instead (`jhpt.core.unused`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jhpt.core.config import Config
from jhpt.core.families.text import TextConfig

USUAL_RATES = {"adamw": 5e-4, "lion": 1e-4, "sgd": 1e-1, "muon": 5e-3, "adafactor": 1e-2}
"""The middle of the peak learning rates that people train with, by optimizer."""

UNUSUAL_BY = 30.0
"""A learning rate so many times above or below the middle is named.  The presets are within a factor of 10."""

EPOCHS = 4
"""Passes over a text up to which repeating it helps about as much as new text (Muennighoff et al. 2023, figure 5)."""

LARGER_VOCABULARY = 4
"""A vocabulary so many times as large as the tokenizer's is named.  Padding, and special tokens to come, are less."""

SHORTER = 8
"""Sequences so many times shorter than the model's positions are named."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What is known once the text is read.

    ids: of the tokenizer.  sequences: by source, in an epoch.  weights: of the sources.
    """

    ids: int
    sequences: tuple[int, ...]
    weights: tuple[float, ...]


def likely_mistakes(config: Config, text: Text | None = None) -> list[str]:
    """What is probably not meant, a line each.  text: None before it is read."""
    return list(_lines(config, text))


def _lines(config: Config, text: Text | None) -> Iterator[str]:
    yield from _schedule(config)
    yield from _intervals(config)
    yield from _rate(config)
    yield from _positions(config)
    ids = text.ids if text else 256 if config.data.tokenizer == "bytes" else None
    if ids is not None:
        yield from _vocabulary(config, ids)
    if text:
        yield from _epochs(config, text)


def _schedule(config: Config) -> Iterator[str]:
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps={warmup} is not less than train.steps={steps}, so the learning rate rises until "
            f"the end; a tenth of the steps, {max(steps // 10, 1)}, is usual"
        )


def _intervals(config: Config) -> Iterator[str]:
    steps = config.train.steps
    rows: Iterable[tuple[str, Any, str]] = (
        ("checkpoint", config.checkpoint, "nothing is saved before the last step"),
        ("evaluation", config.evaluation, "the only evaluation follows the last step"),
        ("log", config.log, "the only line of metrics follows the last step"),
    )
    for section, settings, effect in rows:
        # A short trial with the default intervals is no mistake.
        if steps < settings.every != type(settings).model_fields["every"].default:
            yield f"{section}.every={settings.every} is longer than the run of {steps} steps: {effect}"


def _rate(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    usual, rate = USUAL_RATES.get(optimizer.name), optimizer.learning_rate
    if usual is None:
        return
    # Learned weights are trained on with low rates.
    ratio, low = rate / usual, not config.model.classifies
    if ratio > UNUSUAL_BY or (low and ratio < 1 / UNUSUAL_BY):
        times = f"{ratio:,.0f} times" if ratio > 1 else f"a {1 / ratio:,.0f}th of"
        name = optimizer.name
        yield f"optimizer.learning_rate={rate:g} is {times} what is usual with optimizer.name={name}, {usual:g}"


def _positions(config: Config) -> Iterator[str]:
    if not isinstance(config.model, TextConfig):
        return
    length, most = config.data.sequence_length, config.model.max_length
    if SHORTER * length <= most and getattr(config.model, "positions", "learned") == "learned":
        yield (
            f"data.sequence_length={length} is far below model.max_length={most}: the embeddings of positions from "
            f"{length} on are never trained"
        )


def _vocabulary(config: Config, ids: int) -> Iterator[str]:
    if not isinstance(config.model, TextConfig):
        return
    vocabulary, tokenizer = config.model.vocab_size, config.data.tokenizer
    if vocabulary != "auto" and vocabulary > LARGER_VOCABULARY * ids:
        yield (
            f"model.vocab_size={vocabulary:,} is {vocabulary / ids:.0f} times what data.tokenizer={tokenizer} has, "
            f"{ids:,}: the other ids are never trained, and the head takes as much longer"
        )


def _epochs(config: Config, text: Text) -> Iterator[str]:
    if config.model.classifies:  # a few thousand labelled rows are read a dozen times
        return
    read, total = config.train.steps * config.data.batch_size, sum(text.weights)
    for number, (sequences, weight) in enumerate(zip(text.sequences, text.weights, strict=True)):
        epochs = read * weight / total / sequences
        if epochs > EPOCHS:
            which = f"data.sources.{number}" if len(text.sequences) > 1 else "the text"
            yield (
                f"{which} is read {epochs:,.1f} times: after {EPOCHS} epochs repeated text helps less and less; give "
                "more text, fewer train.steps, or watch the validation loss"
            )
