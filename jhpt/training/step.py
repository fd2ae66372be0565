"""One optimizer step as a pure function: `(state, batch) -> (state, metrics)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jhpt.training.clipping import Clipping
from jhpt.training.keys import RandomStream, random_key
from jhpt.training.weights import Weights, widened


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step reads and writes; with the configuration it is all that is needed to go on bit for bit.

    step: updates attempted so far.  skipped: those left out because something was not finite.  bad_steps: how many of
    them were the last ones, in a row.  All int32.
    remainder: what rounding took from parameters that are kept in few bits (`training.weights`); None: nothing is kept.
    norm: of the last gradient that a step was taken with (`training.clipping`); None: nobody asks for it.
    feedback: what compressed sums of gradients keep for later steps (`sharding.feedback`); None: nothing is compressed.
    """

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    params: Any
    optimizer: Any
    remainder: Any = None
    norm: Any = None
    feedback: Any = None


class StepMetrics(NamedTuple):
    """Scalars of one step; `skipped` and `bad_steps` as in the state after it."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array


Gradients = Callable[..., Any]
"""(params, windows [B, *], key of the step) -> (gradient of the mean loss over predicted tokens, sums); where the state
has feedback (params, windows, key, feedback) -> (gradient, sums, feedback)."""

TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]


FLOAT32 = Weights()
"""Parameters that are kept as they are computed."""

UNCLIPPED = Clipping()
"""Gradients that are taken as they are."""


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    feedback: Any = None,
    weights: Weights = FLOAT32,
    clip: Clipping = UNCLIPPED,
) -> TrainState:
    """The state before the first step.  params: in float32; the state has them as `weights` keeps them."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        skipped=zero,
        bad_steps=zero,
        params=weights.stored(params),
        optimizer=optimizer.init(params),
        remainder=weights.remainder(params),
        norm=clip.first,
        feedback=feedback,
    )


def make_train_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    *,
    seed: int,
    max_bad_steps: int,
    clip: Clipping = UNCLIPPED,
    weights: Weights = FLOAT32,
) -> TrainStep:
    """The step.  A loss or gradient that is not finite leaves parameters, optimizer state and feedback as they were.

    However parameters are kept, the optimizer sees them in float32.

    Args:
      learning_rate: step -> learning rate.
      max_bad_steps: after this many skipped steps in a row the state stays frozen, whatever follows: the host, which
        looks only now and then, cannot miss it.
      clip: the norm of gradients as they are stored, and how they are scaled down by it.
      weights: how parameters are kept.
    """

    def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = random_key(seed, RandomStream.STEP, state.step)
        if state.feedback is None:
            (grads, sums), feedback = gradients(state.params, windows, key), None
        else:
            grads, sums, feedback = gradients(state.params, windows, key, state.feedback)
        size = clip.norm(grads)
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & (state.bad_steps < max_bad_steps)
        grads = clip.clipped(grads, size, state.norm)

        rate = learning_rate(state.step)
        directions, moments = optimizer.update(grads, state.optimizer, widened(state.params))
        lower = jax.tree.map(lambda d: rate * d, directions)
        rounding = random_key(seed, RandomStream.ROUNDING, state.step)
        params, remainder = weights.lowered(state.params, lower, state.remainder, rounding)

        bad_steps = jnp.where(good, 0, state.bad_steps + 1)
        state = TrainState(
            step=state.step + 1,
            skipped=state.skipped + jnp.where(good, 0, 1),
            bad_steps=bad_steps,
            params=new_if(good, params, state.params),
            optimizer=new_if(good, moments, state.optimizer),
            remainder=new_if(good, remainder, state.remainder),
            norm=clip.after(state.norm, size, good),
            feedback=new_if(good, feedback, state.feedback),
        )
        return state, StepMetrics(sums.nll / sums.tokens, size, rate, state.skipped, bad_steps)

    return train_step


def new_if(good: jax.Array, new: Any, old: Any) -> Any:
    """The new tree where a step is taken, the old one where it is skipped."""
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
