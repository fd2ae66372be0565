"""Training with blocks on the host: the state, its step, and the way from and to that of any other run.

The state between two steps holds the last gradient beside the parameters it belongs to; `flushed` takes the step that
it asks for, and is what a run with everything on the devices holds at the same time.  A checkpoint is that.
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.sharding.hosted import HostedBlocks, without_blocks
from jhpt.sharding.streamed import GRADIENT, WEIGHTS, Hosted, Rows
from jhpt.training.keys import Stream, stream_key
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import StepMetrics, TrainState, new_if

MEAN, SQUARES = "mean", "squares"
"""Adam's two moments."""

KEPT = (WEIGHTS, MEAN, SQUARES)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pending:
    """The step that the gradient on the host asks for.

    shrink: by which it is clipped.  rate: the learning rate.  good: whether it is taken at all.  updates: how many were
    taken before.
    """

    shrink: jax.Array
    rate: jax.Array
    good: jax.Array
    updates: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HostedState:
    """As `TrainState`.  rows: of the blocks, on the host.  ends, optimizer: of the two ends, after the last step."""

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    rows: Hosted
    ends: Any
    optimizer: Any
    pending: Pending


@dataclass(frozen=True, kw_only=True)
class HostedTraining:
    """The step of `training.step` over blocks on the host."""

    blocks: HostedBlocks
    config: OptimizerConfig
    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int
    clip_norm: float | None
    max_bad_steps: int

    def updated(self, rows: Rows, pending: Pending) -> Rows:
        """A block's rows, or a share of them, after the step that their gradient asks for: AdamW of optax, number by
        number."""
        gradient = rows[GRADIENT] * pending.shrink
        before = optax.ScaleByAdamState(count=pending.updates, mu=rows[MEAN], nu=rows[SQUARES])
        adam = optax.scale_by_adam(self.config.b1, self.config.b2, self.config.eps)
        direction, after = adam.update(gradient, before)
        direction = direction + self.config.weight_decay * jnp.where(self._decays(gradient), rows[WEIGHTS], 0.0)
        new = {WEIGHTS: rows[WEIGHTS] - pending.rate * direction, MEAN: after.mu, SQUARES: after.nu}
        return new_if(pending.good, new, {name: rows[name] for name in KEPT})

    def _decays(self, share: jax.Array) -> jax.Array:
        """Which numbers of a rank's share, or of the whole row, decay."""
        bucket = self.blocks.bucket
        if share.shape[-1] == bucket.size:
            return bucket.decays
        start = jax.lax.axis_index(self.blocks.axes) * share.shape[-1]
        return start + jnp.arange(share.shape[-1]) < bucket.decayed

    def step(self, state: HostedState, windows: Any) -> tuple[HostedState, StepMetrics]:
        """One step.  A loss or gradient that is not finite leaves everything as it was, as there."""
        key, names = stream_key(self.seed, Stream.STEP, state.step), (*KEPT, GRADIENT)
        rows, grads, sums, squares = self.blocks.gradients(
            state.rows, state.ends, windows, key, self.updated, state.pending, names, KEPT
        )
        updates = state.pending.updates + state.pending.good
        size = jnp.sqrt(squares + jnp.square(optax.tree.norm(grads)))
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & (state.bad_steps < self.max_bad_steps)
        shrink = jnp.float32(1)
        if self.clip_norm is not None:
            shrink = self.clip_norm / jnp.maximum(size, self.clip_norm)
        rate = self.learning_rate(state.step)
        clipped = jax.tree.map(lambda leaf: leaf * shrink, grads)
        directions, moments = make_optimizer(self.config).update(clipped, state.optimizer, state.ends)
        ends = jax.tree.map(lambda p, d: p - rate * d, state.ends, directions)

        bad_steps = jnp.where(good, 0, state.bad_steps + 1)
        state = HostedState(
            step=state.step + 1,
            skipped=state.skipped + jnp.where(good, 0, 1),
            bad_steps=bad_steps,
            rows=rows,
            ends=new_if(good, ends, state.ends),
            optimizer=new_if(good, moments, state.optimizer),
            pending=Pending(shrink=shrink, rate=rate, good=good, updates=updates),
        )
        return state, StepMetrics(sums.nll / sums.tokens, size, rate, state.skipped, bad_steps)

    def flushed(self, state: HostedState) -> HostedState:
        """The state with no step left to take."""
        rows = self.blocks.over_rows(lambda rows, pending: self.updated(rows, pending), state.rows, state.pending)
        taken = state.pending.updates + state.pending.good
        none = Pending(shrink=jnp.float32(1), rate=jnp.float32(0), good=jnp.bool_(False), updates=taken)
        return HostedState(**{**vars(state), "rows": rows, "pending": none})

    def hosted(self, state: TrainState) -> HostedState:
        """Of a run with everything on the devices; rows where they are computed: `place` them on the host."""
        adam, decayed = state.optimizer
        trees = {
            WEIGHTS: state.params,
            MEAN: adam.mu,
            SQUARES: adam.nu,
            GRADIENT: jax.tree.map(jnp.zeros_like, adam.mu),
        }
        rows = [self.blocks.rows(name, tree["blocks"]) for name, tree in trees.items()]
        own = adam._replace(mu=without_blocks(adam.mu), nu=without_blocks(adam.nu))
        none = Pending(shrink=jnp.float32(1), rate=jnp.float32(0), good=jnp.bool_(False), updates=adam.count)
        return HostedState(
            step=state.step,
            skipped=state.skipped,
            bad_steps=state.bad_steps,
            rows=dict(ChainMap(*rows)),
            ends=without_blocks(state.params),
            optimizer=(own, decayed),
            pending=none,
        )

    def placed(self, state: HostedState) -> HostedState:
        """The state with rows of streamed blocks on the host, those of resident ones and the rest on the devices."""
        everywhere = self.blocks.execution.layout.replicated
        rest = {name: jax.device_put(part, everywhere) for name, part in vars(state).items() if name != "rows"}
        rows = {name: jax.device_put(leaf, self.blocks.sharding(name)) for name, leaf in state.rows.items()}
        return HostedState(**rest, rows=rows)

    def train_state(self, state: HostedState) -> TrainState:
        """`hosted` backwards; of a flushed state."""
        adam, decayed = state.optimizer
        blocks = {name: self.blocks.blocks(name, state.rows) for name in KEPT}
        mu, nu = ({**own, "blocks": blocks[name]} for own, name in ((adam.mu, MEAN), (adam.nu, SQUARES)))
        return TrainState(
            step=state.step,
            skipped=state.skipped,
            bad_steps=state.bad_steps,
            params={**state.ends, "blocks": blocks[WEIGHTS]},
            optimizer=(adam._replace(mu=mu, nu=nu), decayed),
        )
