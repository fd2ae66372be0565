"""Gradient clipping: the factor by which gradients are scaled down, from their norm.

    global      limit / max(limit, |g_t|), with the norm of all gradients of this step (Pascanu et al. 2013, arXiv
                1211.5063)
    previous    limit / max(limit, |g_s|), with the norm at s, the last applied update; the first update is not clipped
    layer       limit / max(limit, sqrt(n) |g_group|) for each of n groups: every block is a group, and everything
                outside blocks is one more; the norm of all groups is at most the limit

The first needs every gradient before any can be used.  With the others an offloaded block can be updated as soon as its
gradient is known (`training.offloaded_training`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.sharding.step import Execution

Tree = TypeVar("Tree")


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The clipping of a run.

    limit: `clip_norm`; None: no clipping.  norm: gradients as they are stored -> their global norm.  groups: number of
    groups for `layer`.  by_group: gradients -> a tree of the same structure with the norm of each leaf's group: () or,
    if blocks are stacked, [L].
    """

    limit: float | None = None
    kind: Literal["global", "previous", "layer"] = "global"
    norm: Callable[[Any], jax.Array] = optax.tree.norm
    groups: int = 1
    by_group: Callable[[Any], Any] | None = None

    @property
    def first(self) -> jax.Array | None:
        """The last norm before the first step, as the state holds it; None unless clipping needs it."""
        return jnp.zeros((), jnp.float32) if self.kind == "previous" and self.limit is not None else None

    def after(self, before: jax.Array | None, norm: jax.Array, good: jax.Array) -> jax.Array | None:
        """The last norm after a step with this norm; good: whether the update was applied."""
        return None if before is None else jnp.where(good, norm, before)

    def shrink(self, norm: jax.Array) -> jax.Array:
        """The factor for gradients whose norm, or whose group's norm, this is; of the same shape."""
        if self.limit is None:
            return jnp.ones_like(norm)
        limit = self.limit / math.sqrt(self.groups) if self.kind == "layer" else self.limit
        return limit / jnp.maximum(norm, limit)

    def clipped(self, gradients: Tree, norm: jax.Array, before: jax.Array | None) -> Tree:
        """Gradients of this norm, clipped.  before: the last norm, as the state holds it."""
        if self.limit is None:
            return gradients
        if self.kind == "layer":
            assert self.by_group is not None, "clipping by layer needs the norm of each layer"
            by_layer: Tree = jax.tree.map(
                lambda leaf, size: leaf * _along(self.shrink(size), leaf), gradients, self.by_group(gradients)
            )
            return by_layer
        factor = self.shrink(norm if before is None else before)
        clipped: Tree = jax.tree.map(lambda leaf: leaf * factor, gradients)
        return clipped


def clipping(config: OptimizerConfig, execution: Execution) -> Clipping:
    """The clipping of a configuration, for gradients as this execution stores them."""
    return Clipping(
        limit=config.clip_norm,
        kind=config.clip,
        norm=execution.norm,
        groups=execution.layout.num_layers + 1,
        by_group=execution.norms_by_layer,
    )


def _along(factor: jax.Array, leaf: jax.Array) -> jax.Array:
    """A factor () or [L], broadcast against a leaf [...] or [L, ...]."""
    return factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))
