"""Rows with labels: what `jhpt.training.data.labelled` and `pairs` write into a batch, as models read it.

[CLS] text [SEP] (second text [SEP]) padding, length, where the second text begins, class        int32 [S + 3]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.families.family import LABEL_COLUMNS
from jhpt.models.context import Context


class Labelled(NamedTuple):
    """Rows [B].  tokens: [B, S].  context: their lengths, and type 1 for the second text.  second: [B], where that
    begins.  labels: [B], the classes."""

    tokens: jax.Array
    context: Context
    second: jax.Array
    labels: jax.Array


def labelled(windows: jax.Array) -> Labelled:
    """windows [B, S + 3] -> their parts."""
    tokens = windows[:, :-LABEL_COLUMNS]
    lengths, second, labels = (windows[:, column - LABEL_COLUMNS] for column in range(LABEL_COLUMNS))
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    types = (at >= second[:, None]) & (at < lengths[:, None])
    return Labelled(tokens, Context(lengths=lengths, types=types.astype(jnp.int32)), second, labels)
