"""Clipping of gradients: how much of one is taken, by its norm.

    global      limit / max(limit, |g_t|), with the norm of all gradients of this step (Pascanu et al. 2013, arXiv
                1211.5063)
    previous    limit / max(limit, |g_s|), with that of the last step s that was taken; the first is taken whole
    layer       for each of n groups, a block or what is not in blocks, limit / max(limit, sqrt(n) |g_group|): all of
                them together are not longer than the limit

The first needs every gradient before any can be used.  The others do not, so that a block on the host takes its step
as soon as its gradient is there (`training.block_steps`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.sharding.step import Execution


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The rule of a run.

    limit: `clip_norm`; None: nothing is clipped.  norm: gradients as they are stored -> their global norm.  groups: for
    `layer`, how many there are.  by_group: gradients -> a tree like theirs, of the norms of their groups: () or, where
    blocks are stacked, [L].
    """

    limit: float | None = None
    kind: Literal["global", "previous", "layer"] = "global"
    norm: Callable[[Any], jax.Array] = optax.tree.norm
    groups: int = 1
    by_group: Callable[[Any], Any] | None = None

    @property
    def first(self) -> jax.Array | None:
        """What the state holds before the first step: the last norm; None where nobody asks for it."""
        return jnp.zeros((), jnp.float32) if self.kind == "previous" and self.limit is not None else None

    def after(self, before: jax.Array | None, norm: jax.Array, good: jax.Array) -> jax.Array | None:
        """What it holds after a step with this norm; good: whether that was taken."""
        return None if before is None else jnp.where(good, norm, before)

    def shrink(self, norm: jax.Array) -> jax.Array:
        """By which gradients are multiplied whose norm, or whose group's, this is; of its shape."""
        if self.limit is None:
            return jnp.ones_like(norm)
        limit = self.limit / math.sqrt(self.groups) if self.kind == "layer" else self.limit
        return limit / jnp.maximum(norm, limit)

    def clipped(self, gradients: Any, norm: jax.Array, before: jax.Array | None) -> Any:
        """Gradients of this norm, clipped.  before: what the state holds."""
        if self.limit is None:
            return gradients
        if self.kind == "layer":
            assert self.by_group is not None, "layers are clipped each by its own norm"
            return jax.tree.map(
                lambda leaf, own: leaf * _along(self.shrink(own), leaf), gradients, self.by_group(gradients)
            )
        factor = self.shrink(norm if before is None else before)
        return jax.tree.map(lambda leaf: leaf * factor, gradients)


def clipping(config: OptimizerConfig, execution: Execution) -> Clipping:
    """That of a configuration, of gradients as this execution stores them."""
    return Clipping(
        limit=config.clip_norm,
        kind=config.clip,
        norm=execution.norm,
        groups=execution.layout.num_layers + 1,
        by_group=execution.norms_by_layer,
    )


def _along(factor: jax.Array, leaf: jax.Array) -> jax.Array:
    """() or [L], for a leaf [...] or [L, ...]."""
    return factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))
