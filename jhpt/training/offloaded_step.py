"""Training with blocks on the host: the state, its step, and the way from and to that of any other run.

Where steps are deferred the state between two of them holds the last gradient beside the parameters it belongs to;
`flushed` takes the step that it asks for, and is what a run with everything on the devices holds at the same time.  A
checkpoint is that.
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
from jhpt.models.family import Model
from jhpt.sharding.offload.step import OffloadedBlocks, without_blocks
from jhpt.sharding.offload.stream import GRADIENT, RESIDENT, WEIGHTS, HostRows, Rows
from jhpt.training.block_steps import MEAN, SAVED, SQUARES, Pending, Stepped, deferred, stepped, update_in_backward
from jhpt.training.clipping import Clipping, clipping
from jhpt.training.keys import RandomStream, random_key
from jhpt.training.layered import Layered
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import StepMetrics, TrainState, init_state, new_if


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OffloadedState:
    """As `TrainState`.  rows: of the blocks, on the host.  ends, optimizer: of the two ends, after the last step.
    pending: the step that gradients on the host ask for; None: blocks step at once, and no gradients are there."""

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    rows: HostRows
    embedding_and_head: Any
    optimizer: Any
    norm: Any = None
    pending: Pending | None = None

    @property
    def params(self) -> tuple[HostRows, Any]:
        """(rows of the blocks' weights, parameters of the ends)."""
        return {
            name: rows for name, rows in self.rows.items() if name.removeprefix(RESIDENT) == WEIGHTS
        }, self.embedding_and_head


@dataclass(frozen=True, kw_only=True)
class OffloadedTraining:
    """The step of `training.step` over blocks on the host."""

    blocks: OffloadedBlocks
    config: OptimizerConfig
    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int
    max_bad_steps: int

    def __post_init__(self) -> None:
        """Rows on the host are float32, and so are their moments; a step that needs all gradients waits for them."""
        if self.config.low_precision:
            raise InputError(
                f"blocks on the host are kept in float32, not with optimizer.weights={self.config.weights} and "
                f"optimizer.moments={self.config.moments}; use float32 for both, or memory.offload=off"
            )

        if self.config.clip_norm is not None and self.update_in_backward != self.config.update_in_backward:
            raise InputError(
                f"the plan has offload.at_once={str(self.update_in_backward).lower()}, which is not how optimizer.clip="
                f"{self.config.clip} takes a step; plan again with this configuration, or change offload.at_once"
            )

    @property
    def update_in_backward(self) -> bool:
        """Whether blocks take their steps in the backward pass."""
        return self.blocks.offload.update_in_backward

    @property
    def names(self) -> tuple[str, ...]:
        """Of the rows that live between two steps."""
        return SAVED if self.update_in_backward else (*SAVED, GRADIENT)

    @property
    def _stepped(self) -> Stepped:
        return stepped(self.config, self._decays)

    def _decays(self, share: jax.Array) -> jax.Array:
        """Which numbers of a rank's share, or of the whole row, decay."""
        bucket = self.blocks.bucket
        if share.shape[-1] == bucket.size:
            return bucket.decays
        start = jax.lax.axis_index(self.blocks.axes) * share.shape[-1]
        return start + jnp.arange(share.shape[-1]) < bucket.decayed

    @property
    def _clip(self) -> Clipping:
        """Of the two ends' gradients, which are one group."""
        return replace(clipping(self.config, self.blocks.execution), norm=optax.tree.norm, by_group=_one_group)

    def step(self, state: OffloadedState, windows: Any) -> tuple[OffloadedState, StepMetrics]:
        """One step.  A loss that is not finite leaves everything as it was, and so does a gradient, but for blocks that
        step at once."""
        key, clip, rate = (
            random_key(self.seed, RandomStream.STEP, state.step),
            self._clip,
            self.learning_rate(state.step),
        )
        going_on, embedding_and_head = state.bad_steps < self.max_bad_steps, state.embedding_and_head
        if state.pending is None:
            taken = state.optimizer[0].count
            shrink = jnp.float32(1) if state.norm is None else clip.shrink(state.norm)
            due = Pending(shrink=shrink, rate=rate, good=going_on, updates=taken)
            turns = update_in_backward(self._stepped, self.blocks.summed, clip)
        else:
            due, taken = state.pending, state.pending.updates + state.pending.good
            turns = deferred(self._stepped, self.blocks.summed)
        rows, grads, sums, told = self.blocks.gradients(state.rows, embedding_and_head, windows, key, turns, due)
        squares, finite = told if state.pending is None else (told, True)
        size = jnp.sqrt(squares + jnp.square(optax.tree.norm(grads)))
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & going_on & finite
        clipped = clip.clipped(grads, size, state.norm)
        directions, moments = make_optimizer(self.config).update(clipped, state.optimizer, embedding_and_head)
        lowered = jax.tree.map(lambda p, d: p - rate * d, embedding_and_head, directions)

        bad_steps = jnp.where(good, 0, state.bad_steps + 1)
        left = (
            None if self.update_in_backward else Pending(shrink=clip.shrink(size), rate=rate, good=good, updates=taken)
        )
        state = OffloadedState(
            step=state.step + 1,
            skipped=state.skipped + jnp.where(good, 0, 1),
            bad_steps=bad_steps,
            rows=rows,
            embedding_and_head=new_if(good, lowered, embedding_and_head),
            optimizer=new_if(good, moments, state.optimizer),
            norm=clip.after(state.norm, size, good),
            pending=left,
        )
        return state, StepMetrics(sums.nll / sums.tokens, size, rate, state.skipped, bad_steps)

    def flushed(self, state: OffloadedState) -> OffloadedState:
        """The state with no step left to take."""
        if state.pending is None:
            return state
        rows = self.blocks.over_rows(self._arrived, state.rows, state.pending)
        return replace(state, rows=rows, pending=_nothing(state.pending.updates + state.pending.good))

    def _arrived(self, pending: Pending, rows: Rows) -> Rows:
        return self._stepped(pending, rows, rows[GRADIENT])

    # From and to the state of a run with everything on the devices, which is what a checkpoint holds.

    def shapes(self, embedding_and_head: Any) -> OffloadedState:
        """Shapes of the state; ends: theirs."""
        shapes = self.blocks.shapes(self.names)
        rows = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return jax.eval_shape(
            lambda rows, embedding_and_head: self._joined(rows, self._initial(embedding_and_head)),
            rows,
            embedding_and_head,
        )

    def fresh(self, model: Model) -> OffloadedState:
        """The state before the first step; nothing is ever whole on a device."""
        key, place = random_key(self.seed, RandomStream.INIT), self.blocks.execution.layout.replicated
        rows, names = self.blocks.empty(self.names), self.blocks.shapes([WEIGHTS])
        there = {name: self.blocks.sharding(name) for name in names}
        fill = partial(self.blocks.initial, init=partial(model.init_block, key))
        weights = jax.jit(fill, donate_argnums=0, out_shardings=there)({name: rows.pop(name) for name in names})
        embedding_and_head = jax.jit(lambda: self._initial(model.init_embedding_and_head(key)), out_shardings=place)()
        return self._joined(rows | weights, embedding_and_head)

    def saved(self, state: OffloadedState) -> TrainState:
        """Of a flushed state, as a checkpoint holds it: leaves of blocks are read from rows when they are written."""
        adam, decayed = state.optimizer
        blocks = self._layered(state.rows)
        mu, nu = ({**own, "blocks": blocks[name]} for own, name in ((adam.mu, MEAN), (adam.nu, SQUARES)))
        return TrainState(
            step=state.step,
            skipped=state.skipped,
            bad_steps=state.bad_steps,
            params={**state.embedding_and_head, "blocks": blocks[WEIGHTS]},
            optimizer=(adam._replace(mu=mu, nu=nu), decayed),
            norm=state.norm,
        )

    def loaded(self, read: Callable[[TrainState], TrainState], embedding_and_head: Any) -> OffloadedState:
        """`saved` backwards, one name after the other, so that only what is of that name is there twice.

        Args:
          read: a checkpoint's tree, of whose leaves those with a sharding are laid out so, those without one are numpy
            arrays, and those that are `...` are left out.
          ends: shapes of the ends.
        """
        place, count = self.blocks.execution.layout.replicated, self.blocks.count
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), self.blocks.layer)
        like = jax.eval_shape(self._initial, {**embedding_and_head, "blocks": stacked})

        def only(wanted: str | None) -> TrainState:
            sharding = place if wanted is None else None

            def leaf(path: Any, own: Any) -> Any:
                is_wanted = _name_of(path) == wanted
                return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=sharding) if is_wanted else ...

            return read(jax.tree_util.tree_map_with_path(leaf, like))

        state, rows = only(None), dict[str, jax.Array]()
        adam, decayed = state.optimizer
        own = adam._replace(mu=without_blocks(adam.mu), nu=without_blocks(adam.nu))
        for name in SAVED:
            found = only(name)
            trees = {WEIGHTS: found.params, MEAN: found.optimizer[0].mu, SQUARES: found.optimizer[0].nu}
            rows |= self.blocks.rows(name, trees[name]["blocks"])
            del found, trees
        rows |= self.blocks.empty([name for name in self.names if name not in SAVED])  # when nothing is there twice
        return self._joined(rows, replace(state, params=without_blocks(state.params), optimizer=(own, decayed)))

    def parameters(self, params: tuple[HostRows, Any]) -> Any:
        """The model's own tree, on the devices; of a state's `params`."""
        rows, embedding_and_head = params
        bucket, count = self.blocks.bucket, self.blocks.count
        whole = [bucket.views(self.blocks.row(WEIGHTS, rows, block)) for block in range(count)]
        leaves = [jnp.asarray(np.stack(own)) for own in zip(*whole, strict=True)]
        return {**embedding_and_head, "blocks": jax.tree.unflatten(bucket.tree, leaves)}

    def _initial(self, params: Any) -> TrainState:
        return init_state(params, make_optimizer(self.config), clip=self._clip)

    def _joined(self, rows: HostRows, embedding_and_head: TrainState) -> OffloadedState:
        """Rows of the blocks, and the state of the ends."""
        return OffloadedState(
            step=embedding_and_head.step,
            skipped=embedding_and_head.skipped,
            bad_steps=embedding_and_head.bad_steps,
            rows=rows,
            embedding_and_head=embedding_and_head.params,
            optimizer=embedding_and_head.optimizer,
            norm=embedding_and_head.norm,
            pending=None if self.update_in_backward else _nothing(embedding_and_head.optimizer[0].count),
        )

    def _layered(self, rows: HostRows) -> Mapping[str, Any]:
        """By name, the blocks' tree with leaves [L, ...] that are read layer by layer."""
        bucket, count = self.blocks.bucket, self.blocks.count

        @lru_cache(maxsize=len(SAVED))  # leaves are asked for layer by layer, all of a row one after the other
        def views(name: str, layer: int) -> list[np.ndarray]:
            return bucket.views(self.blocks.row(name, rows, layer))

        def tree(name: str) -> Any:
            def leaf(at: int) -> Layered:
                shape = (count, *bucket.shapes[at])
                return Layered(shape, np.dtype(np.float32), lambda layer: views(name, layer)[at])

            return jax.tree.unflatten(bucket.tree, [leaf(at) for at in range(len(bucket.shapes))])

        return {name: tree(name) for name in SAVED}


def _name_of(path: tuple[Any, ...]) -> str | None:
    """What rows hold of the leaf at this path of a `TrainState`; None: nothing, it is of the ends."""
    text = jax.tree_util.keystr(path)
    if "['blocks']" not in text:
        return None
    return WEIGHTS if text.startswith(".params") else MEAN if ".mu[" in text else SQUARES


def _one_group(tree: Any) -> Any:
    """A tree like this one, of its norm."""
    norm = optax.tree.norm(tree)
    return jax.tree.map(lambda _: norm, tree)


def _nothing(updates: jax.Array) -> Pending:
    """No step to take, after so many; laid out as their number is."""
    return Pending(
        shrink=jnp.ones_like(updates, jnp.float32),
        rate=jnp.zeros_like(updates, jnp.float32),
        good=jnp.zeros_like(updates, jnp.bool_),
        updates=jnp.copy(updates),
    )
