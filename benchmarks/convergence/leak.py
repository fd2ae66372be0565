"""Leaks of a causal model: how far logits of earlier positions move when only later tokens change.

Attention is causal, so nothing moves without compression.  With compression, a choice of important tokens that looks
ahead may change: an earlier row is then sent in other bits, or not sent.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.families.text import TextConfig
from jhpt.models.family import Rows
from jhpt.training.data.batches import evaluation_batches
from jhpt.training.setup import Setup
from jhpt.training.step import RandomStream, random_key


def leak(setup: Setup, params: Any) -> dict[str, float]:
    """Replaces the second half of every window of a held-out batch by that of another one and compares the logits of
    the first halves.

    Args:
      params: as the plan stores them.

    Returns:
      logits: the largest |difference|; rms: its root mean square; positions: share of positions where anything moved;
      spread: standard deviation of the logits of a position, to compare with.
    """
    assert setup.validation_windows is not None
    size = setup.config.data.batch_size
    windows, _ = next(evaluation_batches(setup.validation_windows, size, slice(0, size), 1))
    half = setup.config.data.sequence_length // 2
    others = np.concatenate([windows[:, :half], np.roll(windows, 1, 0)[:, half:]], 1)
    assert isinstance(setup.config.model, TextConfig)
    real = setup.config.model.vocab
    before, after = (_logits(setup, params, each)[:, :half, :real] for each in (windows, others))
    moved = np.abs(after - before)
    return {
        "logits": float(moved.max()),
        "rms": float(np.sqrt(np.mean(np.square(moved)))),
        "positions": float(np.mean(np.any(moved > 0, -1))),
        "spread": float(np.mean(np.std(before, -1))),
    }


def _logits(setup: Setup, params: Any, windows: np.ndarray) -> np.ndarray:
    """[B, S, V], from a forward pass under the plan."""
    execution = setup.evaluation
    parts = {
        degree: replace(part, head_loss=lambda params, x, rows, keys: x) for degree, part in execution.parts.items()
    }
    forward = replace(execution, parts=parts)

    @jax.jit
    def logits(params: Any, windows: jax.Array) -> jax.Array:
        x: Any = forward.sums(params, Rows(windows), random_key(setup.config.seed, RandomStream.EVALUATION))
        return setup.model.logits(setup.layout.model_tree(params, setup.training.tied), x)

    return np.asarray(logits(params, jnp.asarray(windows)))
