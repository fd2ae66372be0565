"""When a block that lives on the host takes its step.

    deferred    the backward pass leaves the gradient on the host, and the step is taken when the block is fetched the
                next time, in the next forward pass: every gradient is known by then, so that clipping by the norm of
                all of them is exact, and a gradient that is not finite leaves everything as it was
    at once     the backward pass fetches a block's state with its weights and writes both, stepped: no gradient ever
                lives on the host (12 bytes a parameter instead of 16), and the forward pass fetches weights alone.  The
                loss is known before the first step is taken, a gradient is not: from the first block on whose gradient
                is not finite none takes a step, and those behind it, which have, do not go back

What a block reads and writes in either pass is its `BlockUpdateHooks`; the step itself is AdamW of optax, number by number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.sharding.offload.step import BlockUpdateHooks
from jhpt.sharding.offload.stream import GRADIENT, WEIGHTS, Rows
from jhpt.training.clipping import Clipping
from jhpt.training.step import new_if

MEAN, SQUARES = "mean", "squares"
"""Adam's two moments."""

SAVED = (WEIGHTS, MEAN, SQUARES)
"""What a checkpoint holds of a block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pending:
    """A step of all blocks.

    shrink: by which gradients are clipped.  rate: the learning rate.  good: whether it is taken at all.  updates: how
    many were taken before.
    """

    shrink: jax.Array
    rate: jax.Array
    good: jax.Array
    updates: jax.Array


Stepped = Callable[[Pending, Rows, jax.Array], Rows]
"""(step, rows of `SAVED`, gradient) -> rows after it."""


def stepped(config: OptimizerConfig, decays: Callable[[jax.Array], jax.Array]) -> Stepped:
    """AdamW.  decays: a row, or a share of it -> which of its numbers decay.

    Moments are those of optax, which divides them by 1 - b^t; this multiplies them by the inverse.  XLA makes the one
    of the other in some loops and not in others, and a block's last bits would depend on whether it stays there.
    """
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)

    def step(pending: Pending, rows: Rows, gradient: jax.Array) -> Rows:
        gradient = gradient * pending.shrink
        before = optax.ScaleByAdamState(count=pending.updates, mu=rows[MEAN], nu=rows[SQUARES])
        _, after = adam.update(gradient, before)
        direction = (
            after.mu
            * unbias(config.b1, after.count)
            / (jnp.sqrt(after.nu * unbias(config.b2, after.count)) + config.eps)
        )
        direction = direction + config.weight_decay * jnp.where(decays(gradient), rows[WEIGHTS], 0.0)
        new = {WEIGHTS: rows[WEIGHTS] - pending.rate * direction, MEAN: after.mu, SQUARES: after.nu}
        return new_if(pending.good, new, {name: rows[name] for name in SAVED})

    return step


def unbias(decay: float, count: jax.Array) -> jax.Array:
    """1 / (1 - decay^count), by which a moment is multiplied after so many steps."""
    return jax.lax.optimization_barrier(1 / (1 - decay ** count.astype(jnp.float32)))


def deferred(step: Stepped, summed: Callable[[jax.Array], jax.Array]) -> BlockUpdateHooks:
    """The step is given to the forward pass; what the backward pass is told and tells is the sum of squares so far.

    summed: over the data ranks.
    """

    def after_backward(_: Any, __: Rows, gradient: jax.Array, squares: jax.Array) -> tuple[jax.Array, Rows]:
        return squares + jnp.sum(jnp.square(gradient)), {GRADIENT: gradient}

    return BlockUpdateHooks(
        before_forward=lambda pending, rows: step(pending, rows, rows[GRADIENT]),
        forward_reads=(*SAVED, GRADIENT),
        forward_writes=SAVED,
        start_backward=lambda _, __: jnp.float32(0),
        after_backward=after_backward,
        backward_writes=(GRADIENT,),
        finish_backward=summed,
    )


def update_in_backward(step: Stepped, summed: Callable[[jax.Array], jax.Array], clip: Clipping) -> BlockUpdateHooks:
    """The step is given to the backward pass, which is told and tells (sum of squares, whether all were finite)."""

    def start_backward(sums: Any, pending: Pending) -> tuple[jax.Array, jax.Array]:
        return jnp.float32(0), pending.good & jnp.isfinite(sums.loss)

    def after_backward(pending: Pending, rows: Rows, gradient: jax.Array, told: Any) -> tuple[Any, Rows]:
        squares, good = told
        own = summed(jnp.sum(jnp.square(gradient)))
        good = good & jnp.isfinite(own)
        shrink = clip.shrink(jnp.sqrt(own)) if clip.kind == "layer" else pending.shrink
        pending = Pending(shrink=shrink, rate=pending.rate, good=good, updates=pending.updates)
        return (squares + own, good), step(pending, rows, gradient)

    return BlockUpdateHooks(
        before_forward=None,
        forward_reads=(WEIGHTS,),
        forward_writes=(),
        start_backward=start_backward,
        after_backward=after_backward,
        backward_reads=(MEAN, SQUARES),
        backward_writes=SAVED,
        finish_backward=lambda told: told,
    )
