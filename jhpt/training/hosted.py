"""Training with blocks on the host: the state, its step, and the way from and to that of any other run.

The state between two steps holds the last gradient beside the parameters it belongs to; `flushed` takes the step that
it asks for, and is what a run with everything on the devices holds at the same time.  A checkpoint is that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.models.build import Model
from jhpt.sharding.hosted import HostedBlocks, without_blocks
from jhpt.sharding.streamed import GRADIENT, RESIDENT, WEIGHTS, Hosted, Rows
from jhpt.training.keys import Stream, stream_key
from jhpt.training.layered import Layered
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import StepMetrics, TrainState, init_state, new_if

MEAN, SQUARES = "mean", "squares"
"""Adam's two moments."""

KEPT = (WEIGHTS, MEAN, SQUARES)
"""What a checkpoint holds of a block."""

NAMES = (*KEPT, GRADIENT)


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

    @property
    def params(self) -> tuple[Hosted, Any]:
        """(rows of the blocks' weights, parameters of the ends)."""
        return {name: rows for name, rows in self.rows.items() if name.removeprefix(RESIDENT) == WEIGHTS}, self.ends


@dataclass(frozen=True, kw_only=True)
class HostedTraining:
    """The step of `training.step` over blocks on the host."""

    blocks: HostedBlocks
    config: OptimizerConfig
    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int
    max_bad_steps: int

    def __post_init__(self) -> None:
        """Rows on the host are float32, and so are their moments."""
        if self.config.in_few_bits:
            raise InputError(
                f"blocks on the host are kept in float32, not with optimizer.weights={self.config.weights} and "
                f"optimizer.moments={self.config.moments}; use float32 for both, or memory.offload=off"
            )

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
        key = stream_key(self.seed, Stream.STEP, state.step)
        rows, grads, sums, squares = self.blocks.gradients(
            state.rows, state.ends, windows, key, self.updated, state.pending, NAMES, KEPT
        )
        updates = state.pending.updates + state.pending.good
        size = jnp.sqrt(squares + jnp.square(optax.tree.norm(grads)))
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & (state.bad_steps < self.max_bad_steps)
        shrink = jnp.float32(1)
        if self.config.clip_norm is not None:
            shrink = self.config.clip_norm / jnp.maximum(size, self.config.clip_norm)
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
        rows = self.blocks.over_rows(self.updated, state.rows, state.pending)
        return replace(state, rows=rows, pending=_nothing(state.pending.updates + state.pending.good))

    # From and to the state of a run with everything on the devices, which is what a checkpoint holds.

    def shapes(self, ends: Any) -> HostedState:
        """Shapes of the state; ends: theirs."""
        rows = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self.blocks.shapes(NAMES).items()}
        return jax.eval_shape(lambda rows, ends: _joined(rows, init_state(ends, self._of_ends)), rows, ends)

    def fresh(self, model: Model) -> HostedState:
        """The state before the first step; nothing is ever whole on a device."""
        key, place = stream_key(self.seed, Stream.INIT), self.blocks.execution.layout.replicated
        rows, names = self.blocks.empty(NAMES), self.blocks.shapes([WEIGHTS])
        there = {name: self.blocks.sharding(name) for name in names}
        fill = partial(self.blocks.initial, init=partial(model.init_block, key))
        weights = jax.jit(fill, donate_argnums=0, out_shardings=there)({name: rows.pop(name) for name in names})
        ends = jax.jit(lambda: init_state(model.init_ends(key), self._of_ends), out_shardings=place)()
        return _joined(rows | weights, ends)

    def saved(self, state: HostedState) -> TrainState:
        """Of a flushed state, as a checkpoint holds it: leaves of blocks are read from rows when they are written."""
        adam, decayed = state.optimizer
        blocks = self._layered(state.rows)
        mu, nu = ({**own, "blocks": blocks[name]} for own, name in ((adam.mu, MEAN), (adam.nu, SQUARES)))
        return TrainState(
            step=state.step,
            skipped=state.skipped,
            bad_steps=state.bad_steps,
            params={**state.ends, "blocks": blocks[WEIGHTS]},
            optimizer=(adam._replace(mu=mu, nu=nu), decayed),
        )

    def loaded(self, read: Callable[[TrainState], TrainState], ends: Any) -> HostedState:
        """`saved` backwards, one name after the other, so that only what is of that name is there twice.

        Args:
          read: a checkpoint's tree, of whose leaves those with a sharding are laid out so, those without one are numpy
            arrays, and those that are `...` are left out.
          ends: shapes of the ends.
        """
        place, count = self.blocks.execution.layout.replicated, self.blocks.count
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), self.blocks.layer)
        like = jax.eval_shape(lambda params: init_state(params, self._of_ends), {**ends, "blocks": stacked})

        def only(wanted: str | None) -> TrainState:
            sharding = place if wanted is None else None

            def leaf(path: Any, own: Any) -> Any:
                is_wanted = _name_of(path) == wanted
                return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=sharding) if is_wanted else ...

            return read(jax.tree_util.tree_map_with_path(leaf, like))

        state, rows = only(None), self.blocks.empty([GRADIENT])
        adam, decayed = state.optimizer
        own = adam._replace(mu=without_blocks(adam.mu), nu=without_blocks(adam.nu))
        for name in KEPT:
            found = only(name)
            trees = {WEIGHTS: found.params, MEAN: found.optimizer[0].mu, SQUARES: found.optimizer[0].nu}
            rows |= self.blocks.rows(name, trees[name]["blocks"])
            del found, trees
        return _joined(rows, replace(state, params=without_blocks(state.params), optimizer=(own, decayed)))

    def parameters(self, params: tuple[Hosted, Any]) -> Any:
        """The model's own tree, on the devices; of a state's `params`."""
        rows, ends = params
        bucket, count = self.blocks.bucket, self.blocks.count
        whole = [bucket.views(self.blocks.row(WEIGHTS, rows, block)) for block in range(count)]
        leaves = [jnp.asarray(np.stack(own)) for own in zip(*whole, strict=True)]
        return {**ends, "blocks": jax.tree.unflatten(bucket.tree, leaves)}

    @property
    def _of_ends(self) -> optax.GradientTransformation:
        return make_optimizer(self.config)

    def _layered(self, rows: Hosted) -> Mapping[str, Any]:
        """By name, the blocks' tree with leaves [L, ...] that are read layer by layer."""
        bucket, count = self.blocks.bucket, self.blocks.count

        @lru_cache(maxsize=len(KEPT))  # leaves are asked for layer by layer, all of a row one after the other
        def views(name: str, layer: int) -> list[np.ndarray]:
            return bucket.views(self.blocks.row(name, rows, layer))

        def tree(name: str) -> Any:
            def leaf(at: int) -> Layered:
                shape = (count, *bucket.shapes[at])
                return Layered(shape, np.dtype(np.float32), lambda layer: views(name, layer)[at])

            return jax.tree.unflatten(bucket.tree, [leaf(at) for at in range(len(bucket.shapes))])

        return {name: tree(name) for name in KEPT}


def _name_of(path: tuple[Any, ...]) -> str | None:
    """What rows hold of the leaf at this path of a `TrainState`; None: nothing, it is of the ends."""
    text = jax.tree_util.keystr(path)
    if "['blocks']" not in text:
        return None
    return WEIGHTS if text.startswith(".params") else MEAN if ".mu[" in text else SQUARES


def _joined(rows: Hosted, ends: TrainState) -> HostedState:
    """Rows of the blocks, and the state of the ends."""
    return HostedState(
        step=ends.step,
        skipped=ends.skipped,
        bad_steps=ends.bad_steps,
        rows=rows,
        ends=ends.params,
        optimizer=ends.optimizer,
        pending=_nothing(ends.optimizer[0].count),
    )


def _nothing(updates: jax.Array) -> Pending:
    """No step to take, after so many; laid out as their number is."""
    return Pending(
        shrink=jnp.ones_like(updates, jnp.float32),
        rate=jnp.zeros_like(updates, jnp.float32),
        good=jnp.zeros_like(updates, jnp.bool_),
        updates=jnp.copy(updates),
    )
