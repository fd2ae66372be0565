"""One optimizer step as a pure function: `(state, batch) -> (state, metrics)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jhpt.training.keys import Stream, stream_key
from jhpt.training.objective import Objective, Sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step reads and writes; with the configuration it is all that is needed to go on bit for bit.

    step: updates attempted so far.  skipped: those left out because something was not finite.  bad_steps: how many of
    them were the last ones, in a row.  All int32.
    """

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    params: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """Scalars of one step; `skipped` and `bad_steps` as in the state after it."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array


TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, skipped=zero, bad_steps=zero, params=params, optimizer=optimizer.init(params))


def batch_gradients(
    objective: Objective, params: Any, windows: jax.Array, key: jax.Array, micro_batches: int
) -> tuple[Any, Sums]:
    """Gradient of the mean loss over all predicted tokens of windows[B, *], and the sums.

    With several micro-batches the gradients of the *sums* are accumulated in float32 and divided once.  Micro-batch m
    takes every M-th row, so that each device cuts up its own rows and none move.
    """
    scale = 1.0 / windows.size  # keeps sums near 1, whatever the compute dtype

    def scaled(params: Any, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, Sums]:
        sums = objective(params, rows, None, key, True)
        return sums.loss * scale, sums

    gradient = jax.grad(scaled, has_aux=True)
    if micro_batches == 1:
        grads, sums = gradient(params, windows, key)
    else:
        pieces = windows.reshape(-1, micro_batches, *windows.shape[1:]).swapaxes(0, 1)

        def accumulate(total: tuple[Any, Sums], piece: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, Sums], None]:
            rows, index = piece
            return jax.tree.map(jnp.add, total, gradient(params, rows, jax.random.fold_in(key, index))), None

        nothing = (jax.tree.map(jnp.zeros_like, params), Sums(*(jnp.zeros(()),) * 3))
        (grads, sums), _ = jax.lax.scan(accumulate, nothing, (pieces, jnp.arange(micro_batches)))
    return jax.tree.map(lambda g: g / (scale * sums.tokens), grads), sums


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    *,
    seed: int,
    micro_batches: int,
    max_bad_steps: int,
    place_gradients: Callable[[Any], Any] = lambda grads: grads,
) -> TrainStep:
    """The step.  A loss or gradient that is not finite leaves parameters and optimizer state as they were.

    Args:
      max_bad_steps: after this many skipped steps in a row the state stays frozen, whatever follows: the host, which
        looks only now and then, cannot miss it.
      learning_rate: step -> learning rate.
      place_gradients: states the sharding in which the optimizer wants the gradients (ZeRO's reduce-scatter).
    """

    def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = stream_key(seed, Stream.STEP, state.step)
        grads, sums = batch_gradients(objective, state.params, windows, key, micro_batches)
        grads = place_gradients(grads)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(sums.loss) & jnp.isfinite(norm) & (state.bad_steps < max_bad_steps)

        rate = learning_rate(state.step)
        directions, moments = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, directions)

        def keep_if_bad(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        bad_steps = jnp.where(good, 0, state.bad_steps + 1)
        state = TrainState(
            step=state.step + 1,
            skipped=state.skipped + jnp.where(good, 0, 1),
            bad_steps=bad_steps,
            params=keep_if_bad(params, state.params),
            optimizer=keep_if_bad(moments, state.optimizer),
        )
        return state, StepMetrics(sums.nll / sums.tokens, norm, rate, state.skipped, bad_steps)

    return train_step
