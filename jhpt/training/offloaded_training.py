"""Training with blocks in host memory: the state, its step, and conversion from and to the state of a checkpoint.

There are two times at which an offloaded block can be updated:

    deferred            The backward pass writes the gradient to the host.  The block is updated when the next forward
                        pass fetches it.  By then every gradient is known, so clipping by the global norm is exact, and
                        a gradient that is not finite changes nothing.
    update_in_backward  The backward pass fetches the optimizer state of a block with its weights and writes both back,
                        updated.  No gradient is on the host (12 bytes per parameter instead of 16), and the forward
                        pass fetches only weights.  The loss is known before the first update, but not all gradients:
                        after the first block whose gradient is not finite no further block is updated, but earlier
                        updates remain.

`BlockUpdateHooks` say what a block reads and writes in either pass.

Between two deferred steps, the state holds the parameters and the gradient of their pending update.  `flushed` makes
that update; the result equals the state of a run without offload, and of a checkpoint.
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
from jhpt.core.plan_check import with_optimizer
from jhpt.core.rules import Choices, check
from jhpt.models.family import Model, as_text
from jhpt.models.family import Rows as TokenRows
from jhpt.sharding.offload.step import BlockUpdateHooks, OffloadedBlocks, without_blocks
from jhpt.sharding.offload.stream import GRADIENT, RESIDENT, WEIGHTS, HostRows, Rows
from jhpt.sharding.types import KeyPath, LossSums
from jhpt.training.clipping import Clipping, clipping
from jhpt.training.layered import Layered
from jhpt.training.optimizer import make_optimizer
from jhpt.training.spikes import Losses, SpikeGuard
from jhpt.training.step import (
    Params,
    RandomStream,
    StepMetrics,
    TrainState,
    init_state,
    new_if,
    random_key,
    without_spike,
)

MEAN, SQUARES = "mean", "squares"
"""Adam's two moments."""

SAVED = (WEIGHTS, MEAN, SQUARES)
"""Names of the rows of a block that a checkpoint holds."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pending:
    """An update of all blocks.

    shrink: factor that clips the gradients.  rate: learning rate.  good: whether the update is applied at all.
    updates: number of updates applied before.  losses: with `update_in_backward`, what the step knows of losses before
    it.
    """

    shrink: jax.Array
    rate: jax.Array
    good: jax.Array
    updates: jax.Array
    losses: Losses | None = None


Carried = tuple[jax.Array, jax.Array]
"""(sum of squared gradients so far, whether all were finite)."""

Stepped = Callable[[Pending, Rows, jax.Array], Rows]
"""(update, rows named in `SAVED`, gradient) -> rows after the update."""


def stepped(config: OptimizerConfig, decays: Callable[[jax.Array], jax.Array]) -> Stepped:
    """AdamW of optax, number by number, for a row of a block.

    Moments are those of `optax.scale_by_adam`, but bias correction differs in its last bits: optax divides by 1 - b^t,
    and this multiplies by the inverse.  XLA turns the division into a multiplication in some loops and not in others,
    so the last bits of a block would depend on whether it is resident or streamed.

    Args:
      decays: a row, or a rank's shard of it -> which of its numbers decay.
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
    """Bias correction 1 / (1 - decay^count), by which a moment is multiplied after `count` updates."""
    return jax.lax.optimization_barrier(1 / (1 - decay ** count.astype(jnp.float32)))


def deferred(step: Stepped, summed: Callable[[jax.Array], jax.Array]) -> BlockUpdateHooks:
    """Updates in the forward pass.  The backward pass carries the sum of squared gradients from block to block.

    summed: all-reduce over the data ranks.
    """

    def after_backward(_: Pending, __: Rows, gradient: jax.Array, squares: jax.Array) -> tuple[jax.Array, Rows]:
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


def update_in_backward(
    step: Stepped, summed: Callable[[jax.Array], jax.Array], clip: Clipping, guard: SpikeGuard | None = None
) -> BlockUpdateHooks:
    """Updates in the backward pass, which carries (sum of squared gradients, whether all were finite) from block to
    block.  summed: all-reduce over the data ranks.  guard: which losses are spikes, at which nothing is updated."""

    def start_backward(sums: LossSums, pending: Pending) -> tuple[jax.Array, jax.Array]:
        good = pending.good & jnp.isfinite(sums.loss)
        if guard is not None and pending.losses is not None:
            good = good & ~guard.spikes(pending.losses, sums.nll / sums.tokens)
        return jnp.float32(0), good

    def after_backward(pending: Pending, rows: Rows, gradient: jax.Array, carried: Carried) -> tuple[Carried, Rows]:
        squares, good = carried
        group = summed(jnp.sum(jnp.square(gradient)))
        good = good & jnp.isfinite(group)
        shrink = clip.shrink(jnp.sqrt(group)) if clip.kind == "layer" else pending.shrink
        pending = Pending(shrink=shrink, rate=pending.rate, good=good, updates=pending.updates)
        return (squares + group, good), step(pending, rows, gradient)

    return BlockUpdateHooks(
        before_forward=None,
        forward_reads=(WEIGHTS,),
        forward_writes=(),
        start_backward=start_backward,
        after_backward=after_backward,
        backward_reads=(MEAN, SQUARES),
        backward_writes=SAVED,
        finish_backward=lambda carried: carried,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OffloadedState:
    """Like `TrainState`, for the step with offloaded blocks.

    rows: parameters, moments and deferred gradients of the blocks, in host memory or resident on the devices.
    embedding_and_head, optimizer: parameters and optimizer state of embedding and head, after the last step.
    pending: the update for which gradients are held; None with `update_in_backward`, which holds no gradients.
    """

    step: jax.Array
    skipped: jax.Array
    bad_steps: jax.Array
    rows: HostRows
    embedding_and_head: Params
    optimizer: Any
    norm: jax.Array | None = None
    pending: Pending | None = None
    losses: Losses | None = None

    @property
    def params(self) -> tuple[HostRows, Params]:
        """(rows of the blocks' weights, parameters of embedding and head)."""
        return {
            name: rows for name, rows in self.rows.items() if name.removeprefix(RESIDENT) == WEIGHTS
        }, self.embedding_and_head


@dataclass(frozen=True, kw_only=True)
class OffloadedTraining:
    """The step of `training.step` over offloaded blocks."""

    blocks: OffloadedBlocks
    config: OptimizerConfig
    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int
    max_bad_steps: int
    guard: SpikeGuard | None = None

    def __post_init__(self) -> None:
        """Refuses storage in low precision, and a plan whose time of updating does not suit the clipping."""
        config = self.config
        storage = (config.weights, config.moments) if config.low_precision else None
        check(with_optimizer(Choices(offload=self.blocks.offload.kind, storage=storage), self.blocks.offload, config))

    @property
    def update_in_backward(self) -> bool:
        """Whether blocks are updated in the backward pass."""
        return self.blocks.offload.update_in_backward

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows that exist between two steps."""
        return SAVED if self.update_in_backward else (*SAVED, GRADIENT)

    @property
    def _stepped(self) -> Stepped:
        return stepped(self.config, self._decays)

    def _decays(self, share: jax.Array) -> jax.Array:
        """Which numbers of a rank's shard, or of the whole row, decay."""
        bucket = self.blocks.bucket
        if share.shape[-1] == bucket.size:
            return bucket.decays
        start = jax.lax.axis_index(self.blocks.axes) * share.shape[-1]
        return start + jnp.arange(share.shape[-1]) < bucket.decayed

    @property
    def _clip(self) -> Clipping:
        """Clipping of the gradients of embedding and head, which are one group."""
        return replace(clipping(self.config, self.blocks.execution), norm=optax.tree.norm, by_group=_one_group)

    def step(self, state: OffloadedState, windows: TokenRows) -> tuple[OffloadedState, StepMetrics]:
        """One step.

        A loss or gradient that is not finite changes nothing, except that `update_in_backward` may have updated some
        blocks before it meets the gradient.
        """
        key, clip, rate = (
            random_key(self.seed, RandomStream.STEP, state.step),
            self._clip,
            self.learning_rate(state.step),
        )
        active, embedding_and_head = state.bad_steps < self.max_bad_steps, state.embedding_and_head
        if state.pending is None:
            applied = state.optimizer[0].count
            shrink = jnp.float32(1) if state.norm is None else clip.shrink(state.norm)
            due = Pending(shrink=shrink, rate=rate, good=active, updates=applied, losses=state.losses)
            hooks = update_in_backward(self._stepped, self.blocks.summed, clip, self.guard)
        else:
            due, applied = state.pending, state.pending.updates + state.pending.good
            hooks = deferred(self._stepped, self.blocks.summed)
        rows, grads, sums, carried = self.blocks.gradients(state.rows, embedding_and_head, windows, key, hooks, due)
        squares, finite = carried if state.pending is None else (carried, True)
        size = jnp.sqrt(squares + jnp.square(optax.tree.norm(grads)))
        good = jnp.isfinite(sums.loss) & jnp.isfinite(size) & active & finite
        good, losses = without_spike(self.guard, state, sums, good)
        clipped = clip.clipped(grads, size, state.norm)
        directions, moments = make_optimizer(self.config).update(clipped, state.optimizer, embedding_and_head)
        lowered = jax.tree.map(lambda p, d: p - rate * d, embedding_and_head, directions)

        bad_steps = jnp.where(good, 0, state.bad_steps + 1)
        pending = (
            None
            if self.update_in_backward
            else Pending(shrink=clip.shrink(size), rate=rate, good=good, updates=applied)
        )
        state = OffloadedState(
            step=state.step + 1,
            skipped=state.skipped + jnp.where(good, 0, 1),
            bad_steps=bad_steps,
            rows=rows,
            embedding_and_head=new_if(good, lowered, embedding_and_head),
            optimizer=new_if(good, moments, state.optimizer),
            norm=clip.after(state.norm, size, good),
            pending=pending,
            losses=losses,
        )
        return state, StepMetrics(sums.nll / sums.tokens, size, rate, state.skipped, bad_steps, losses)

    def flushed(self, state: OffloadedState) -> OffloadedState:
        """The state with no update pending."""
        if state.pending is None:
            return state
        rows = self.blocks.over_rows(self._arrived, state.rows, state.pending)
        return replace(state, rows=rows, pending=_none_pending(state.pending.updates + state.pending.good))

    def _arrived(self, pending: Pending, rows: Rows) -> Rows:
        return self._stepped(pending, rows, rows[GRADIENT])

    # From and to the state of a run without offload, which is what a checkpoint holds.

    def shapes(self, embedding_and_head: Params) -> OffloadedState:
        """Shapes of the state.  embedding_and_head: shapes of their parameters."""
        shapes = self.blocks.shapes(self.names)
        rows = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return jax.eval_shape(
            lambda rows, embedding_and_head: self._joined(rows, self._initial(embedding_and_head)),
            rows,
            embedding_and_head,
        )

    def fresh(self, model: Model) -> OffloadedState:
        """The state before the first step.  No device ever holds all blocks."""
        key, place = random_key(self.seed, RandomStream.INIT), self.blocks.execution.layout.replicated
        rows, names = self.blocks.empty(self.names), self.blocks.shapes([WEIGHTS])
        there = {name: self.blocks.sharding(name) for name in names}
        fill = partial(self.blocks.initial, init=partial(as_text(model).init_block, key))
        weights = jax.jit(fill, donate_argnums=0, out_shardings=there)({name: rows.pop(name) for name in names})
        embedding_and_head = jax.jit(
            lambda: self._initial(as_text(model).init_embedding_and_head(key)), out_shardings=place
        )()
        return self._joined(rows | weights, embedding_and_head)

    def started(self, read: Callable[[Params], Params], shapes: Params) -> OffloadedState:
        """As `fresh`, with parameters that are read.  shapes: of the model's own tree."""
        place = self.blocks.execution.layout.replicated
        laid = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
        params = read({**laid, "blocks": shapes["blocks"]})
        rows = self.blocks.rows(WEIGHTS, params.pop("blocks"))
        rows |= self.blocks.empty([name for name in self.names if name != WEIGHTS])
        return self._joined(rows, jax.jit(self._initial, out_shardings=place)(params))

    def saved(self, state: OffloadedState) -> TrainState:
        """A flushed state as a checkpoint holds it.  Leaves of blocks are read from rows while they are written."""
        adam, decayed = state.optimizer
        blocks = self._layered(state.rows)
        mu, nu = ({**moments, "blocks": blocks[name]} for moments, name in ((adam.mu, MEAN), (adam.nu, SQUARES)))
        return TrainState(
            step=state.step,
            skipped=state.skipped,
            bad_steps=state.bad_steps,
            params={**state.embedding_and_head, "blocks": blocks[WEIGHTS]},
            optimizer=(adam._replace(mu=mu, nu=nu), decayed),
            norm=state.norm,
            losses=state.losses,
        )

    def loaded(self, read: Callable[[TrainState], TrainState], embedding_and_head: Params) -> OffloadedState:
        """The inverse of `saved`.  It converts weights, first and second moments in turn, so that only one of them is
        in memory twice.

        Args:
          read: shapes -> the leaves of a checkpoint.  It restores leaves with a sharding as device arrays and those
            without one as numpy arrays, and leaves out those that are `...`.
          embedding_and_head: shapes of their parameters.
        """
        place, count = self.blocks.execution.layout.replicated, self.blocks.count
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), self.blocks.layer)
        like = jax.eval_shape(self._initial, {**embedding_and_head, "blocks": stacked})

        def only(wanted: str | None) -> TrainState:
            sharding = place if wanted is None else None

            def chosen(path: Any, leaf: Any) -> Any:
                is_wanted = _name_of(path) == wanted
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) if is_wanted else ...

            return read(jax.tree_util.tree_map_with_path(chosen, like))

        state, rows = only(None), dict[str, jax.Array]()
        adam, decayed = state.optimizer
        outer = adam._replace(mu=without_blocks(adam.mu), nu=without_blocks(adam.nu))
        for name in SAVED:
            part = only(name)
            trees = {WEIGHTS: part.params, MEAN: part.optimizer[0].mu, SQUARES: part.optimizer[0].nu}
            rows |= self.blocks.rows(name, trees[name]["blocks"])
            del part, trees
        # Only now, when nothing is in memory twice.
        rows |= self.blocks.empty([name for name in self.names if name not in SAVED])
        return self._joined(rows, replace(state, params=without_blocks(state.params), optimizer=(outer, decayed)))

    def parameters(self, params: tuple[HostRows, Params]) -> Params:
        """The model's own tree, on the devices, from `OffloadedState.params`."""
        rows, embedding_and_head = params
        bucket, count = self.blocks.bucket, self.blocks.count
        views = [bucket.views(self.blocks.row(WEIGHTS, rows, block)) for block in range(count)]
        leaves = [jnp.asarray(np.stack(leaf)) for leaf in zip(*views, strict=True)]
        return {**embedding_and_head, "blocks": jax.tree.unflatten(bucket.tree, leaves)}

    def _initial(self, params: Params) -> TrainState:
        return init_state(params, make_optimizer(self.config), clip=self._clip, guard=self.guard)

    def _joined(self, rows: HostRows, embedding_and_head: TrainState) -> OffloadedState:
        """The state made of the rows of the blocks and the state of embedding and head."""
        return OffloadedState(
            step=embedding_and_head.step,
            skipped=embedding_and_head.skipped,
            bad_steps=embedding_and_head.bad_steps,
            rows=rows,
            embedding_and_head=embedding_and_head.params,
            optimizer=embedding_and_head.optimizer,
            norm=embedding_and_head.norm,
            pending=None if self.update_in_backward else _none_pending(embedding_and_head.optimizer[0].count),
            losses=embedding_and_head.losses,
        )

    def _layered(self, rows: HostRows) -> Mapping[str, Params]:
        """By name, a tree of the blocks with leaves [L, ...] that are read layer by layer."""
        bucket, count = self.blocks.bucket, self.blocks.count

        @lru_cache(maxsize=len(SAVED))  # leaves are read layer by layer, all leaves of a row one after the other
        def views(name: str, layer: int) -> list[np.ndarray]:
            return bucket.views(self.blocks.row(name, rows, layer))

        def tree(name: str) -> Params:
            def leaf(at: int) -> Layered:
                shape = (count, *bucket.shapes[at])
                return Layered(shape, np.dtype(np.float32), lambda layer: views(name, layer)[at])

            return jax.tree.unflatten(bucket.tree, [leaf(at) for at in range(len(bucket.shapes))])

        return {name: tree(name) for name in SAVED}


def _name_of(path: KeyPath) -> str | None:
    """The name of the rows that hold the leaf at this path of a `TrainState`; None for embedding and head."""
    text = jax.tree_util.keystr(path)
    if "['blocks']" not in text:
        return None
    return WEIGHTS if text.startswith(".params") else MEAN if ".mu[" in text else SQUARES


def _one_group(tree: Params) -> Params:
    """A tree of the same structure, each of whose leaves is the norm of the whole tree."""
    norm = optax.tree.norm(tree)
    return jax.tree.map(lambda _: norm, tree)


def _none_pending(updates: jax.Array) -> Pending:
    """No pending update, after `updates` of them; sharded like `updates`."""
    return Pending(
        shrink=jnp.ones_like(updates, jnp.float32),
        rate=jnp.zeros_like(updates, jnp.float32),
        good=jnp.zeros_like(updates, jnp.bool_),
        updates=jnp.copy(updates),
    )
