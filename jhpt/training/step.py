"""One optimizer step as a pure function, `(state, batch) -> (state, metrics)`, and its state and metrics."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from jhpt.sharding.types import LossSums
from jhpt.training.clipping import Clipping
from jhpt.training.spikes import Losses, SpikeGuard
from jhpt.training.weights import Weights, widened

Params = dict[str, Any]
"""A tree of parameters, gradients or descent directions by name: arrays, or their shapes."""

Feedback = dict[str, Any]
"""Residuals of compressed gradient reduction, by item (`sharding.compression.feedback`)."""

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes.  Together with the configuration it continues a run bit for bit.

    step: number of attempted updates.  skipped: number of updates that were left out because a loss or gradient was not
    finite, or a loss was a spike.  bad_steps: number of skipped updates since the last one that was applied.  All are
    int32.
    optimizer: what the optimizer's `init` returned, updated.
    remainder: rounding error of parameters in low precision (`training.weights`); None without Kahan summation.
    norm: gradient norm of the last applied update (`training.clipping`); None unless clipping needs it.
    feedback: residuals of compressed gradient reduction; None without gradient compression.
    losses: what a step knows of losses before it (`training.spikes`); None unless `guards.spike` is skip or rewind.

    A checkpoint holds this state, with parameters as the model's own tree, whatever step the run uses.
    """

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    params: Params
    optimizer: Any
    remainder: Params | None = None
    norm: jax.Array | None = None
    feedback: Feedback | None = None
    losses: Losses | None = None


class StepState(Protocol):
    """What the training loop reads from a state.  `TrainState` and the offloaded state satisfy it."""

    @property
    def step(self) -> jax.Array:
        """Number of attempted updates."""

    @property
    def skipped(self) -> jax.Array:
        """Number of updates that were left out."""

    @property
    def losses(self) -> Losses | None:
        """What a step knows of losses before it."""

    @property
    def params(self) -> Any:
        """Parameters as the step stores them; what evaluation takes."""


class StepMetrics(NamedTuple):
    """Scalars of one step; `skipped`, `bad_steps` and `losses` are those of the state after it."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    losses: Losses | None = None


class RandomStream(enum.IntEnum):
    """The uses of randomness."""

    INIT = 0
    STEP = 1
    EVALUATION = 2
    SAMPLE = 3
    ROUNDING = 4


def random_key(seed: int, stream: RandomStream, number: int | jax.Array = 0) -> jax.Array:
    """The key of the `number`-th use of a stream: a function of its arguments, so no key needs saving."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), int(stream)), number)


Gradients = Callable[..., Any]
"""(params, windows [B, *], key of the step) -> (gradient of the mean loss over predicted tokens, sums).  If the state
has feedback: (params, windows, key, feedback) -> (gradient, sums, feedback)."""

TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]


Update = Callable[[TrainState, Any, LossSums, jax.Array, Feedback | None], tuple[TrainState, StepMetrics]]
"""(state, gradients, sums over the batch, norm of all gradients, residuals) -> (the next state, metrics)."""


FLOAT32 = Weights()
"""Parameters are stored in the precision in which they are updated."""

UNCLIPPED = Clipping()
"""Gradients are used as they are."""


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    feedback: Feedback | None = None,
    weights: Weights = FLOAT32,
    clip: Clipping = UNCLIPPED,
    guard: SpikeGuard | None = None,
) -> TrainState:
    """The state before the first step.  params: in float32; the state stores them as `weights` says."""
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
        losses=None if guard is None else guard.fresh(),
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
    guard: SpikeGuard | None = None,
) -> TrainStep:
    """The step.  If a loss or gradient is not finite, parameters, optimizer state and feedback do not change.

    The optimizer sees parameters in float32, however they are stored.

    Args:
      learning_rate: step -> learning rate.
      max_bad_steps: after this many skipped updates in a row, the state does not change any more.  The host reads it
        only from time to time, and so cannot miss them.
      clip: how gradients, as they are stored, are clipped by their norm.
      weights: how parameters are stored.
      guard: which losses are spikes, whose updates are left out too; None: none.
    """

    update = make_update(
        optimizer,
        learning_rate,
        seed=seed,
        max_bad_steps=max_bad_steps,
        clip=clip,
        weights=weights,
        guard=guard,
    )

    def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = random_key(seed, RandomStream.STEP, state.step)
        if state.feedback is None:
            (grads, sums), feedback = gradients(state.params, windows, key), None
        else:
            grads, sums, feedback = gradients(state.params, windows, key, state.feedback)
        return update(state, grads, sums, clip.norm(grads), feedback)

    return train_step


def make_update(
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    *,
    seed: int,
    max_bad_steps: int,
    clip: Clipping = UNCLIPPED,
    weights: Weights = FLOAT32,
    guard: SpikeGuard | None = None,
) -> Update:
    """What a step does with its gradients; the arguments are those of `make_train_step`."""

    def update(
        state: TrainState, grads: Any, sums: LossSums, size: jax.Array, feedback: Feedback | None
    ) -> tuple[TrainState, StepMetrics]:
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & (state.bad_steps < max_bad_steps)
        good, losses = without_spike(guard, state, sums, good)
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
            losses=losses,
        )
        return state, StepMetrics(sums.nll / sums.tokens, size, rate, state.skipped, bad_steps, losses)

    return update


def without_spike(
    guard: SpikeGuard | None, state: StepState, sums: LossSums, good: jax.Array
) -> tuple[jax.Array, Losses | None]:
    """(whether an update that is `good` so far is applied, what the next step knows of losses).

    Args:
      state: before the step.  sums: of its batch.
    """
    if guard is None or state.losses is None:
        return good, None
    loss = sums.nll / sums.tokens
    spike = guard.spikes(state.losses, loss)
    good = good & ~spike
    return good, guard.after(state.losses, state.step + 1, loss, spike=spike, good=good)


def new_if(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """The new tree if the update is applied, the old one if it is skipped."""
    chosen: Tree = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
    return chosen
