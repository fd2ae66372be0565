"""The step of a plan whose stages have a program each.

Every chunk has a `TrainState` of its own parameters on the devices of its stage.  The stages learn from each other the
norm of all gradients and the sums over the batch, and then update their parameters alike: all count the same steps, and
skip the same ones.  A checkpoint holds the state of the whole model, as under any other plan.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.core.axes import DATA
from jhpt.core.errors import InputError
from jhpt.models.family import Rows, Sums
from jhpt.sharding.gather import gathered
from jhpt.sharding.stages.settled import settled
from jhpt.sharding.types import Gradients, PyTree
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.clipping import Clipping
from jhpt.training.optimizer import learning_rate
from jhpt.training.record import Record
from jhpt.training.spikes import Losses, spike_guard
from jhpt.training.stages_setup import StagesSetup
from jhpt.training.step import Params, RandomStream, StepMetrics, TrainState, init_state, make_update, random_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StagesState:
    """parts: the state of every chunk; None of those that have no device here.  All count the same steps."""

    parts: tuple[TrainState | None, ...]

    @property
    def step(self) -> jax.Array:
        """Number of attempted updates."""
        return self._any.step

    @property
    def skipped(self) -> jax.Array:
        """Number of updates that were left out."""
        return self._any.skipped

    @property
    def losses(self) -> Losses | None:
        """What a step knows of losses before it."""
        return self._any.losses

    @property
    def params(self) -> tuple[Any, ...]:
        """Of every chunk, as its stage stores them."""
        return tuple(None if part is None else part.params for part in self.parts)

    @property
    def _any(self) -> TrainState:
        return next(part for part in self.parts if part is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class StagesStep:
    """Implements `training.programs.Step`; `StagesState` is its state."""

    setup: StagesSetup
    host_bytes: int = 0

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the stored state on the device that holds most; what programs need beside it is not known."""
        by_stage: dict[int, int] = {}
        for chunk, state in zip(self.setup.layout.chunks, self._shapes, strict=True):
            size = sum(
                math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(state)
            )
            by_stage[chunk.stage] = by_stage.get(chunk.stage, 0) + size
        return {"state": max(by_stage.values())}

    def init(self) -> StagesState:
        """The state before the first step."""
        key = random_key(self.setup.config.seed, RandomStream.INIT)
        fresh = lambda at: self._state_of(at, self.setup.layout.part(at, self.setup.model.init(key)))  # noqa: E731
        return StagesState(
            parts=self._each(lambda at: jax.jit(partial(fresh, at), out_shardings=_places(self._shapes[at]))())
        )

    def started(self, read: Callable[[Params], Params]) -> StagesState:
        """The state before the first step with the parameters that `read` returns."""
        params = read(jax.eval_shape(self.setup.model.init, jax.random.key(0)))

        def one(at: int) -> TrainState:
            part, places = self.setup.layout.part(at, params), _places(self._shapes[at])
            state: TrainState = jax.jit(partial(self._state_of, at), out_shardings=places)(_placed(part, places.params))
            return state

        return StagesState(parts=self._each(one))

    def step(self, state: StagesState, windows: Any) -> tuple[StagesState, StepMetrics]:
        """One optimizer step on a global batch of windows [B, W]."""
        training = self.setup.training
        parts: tuple[Any, ...] = state.parts
        keys = self._each(lambda at: self._keys[at](parts[at].step))
        found = training.gradients(state.params, training.batches(Rows(windows)), keys)
        results = self._each(lambda at: self._updates[at](parts[at], found.gradients[at], found.report[at]))
        after, metrics = zip(*(result or (None, None) for result in results), strict=True)
        return StagesState(parts=after), next(filter(None, metrics))

    def flush(self, state: StagesState) -> StagesState:
        """The state itself: no update is ever pending."""
        return state

    def evaluate(self, params: Any, windows: Any, weights: Any, key: jax.Array) -> Sums:
        """Sums over held-out windows [B, W] with row weights [B]."""
        evaluation, data = self.setup.evaluation, np.asarray(jax.random.key_data(key))
        keys = self._each(lambda at: self._wrapped[at](data))
        sums = evaluation.sums(params, evaluation.batches(Rows(windows, weights)), keys)
        found: Sums = jax.tree.unflatten(
            evaluation.sums_tree, list(next(np.asarray(one) for one in sums if one is not None))
        )
        return found

    def save(self, checkpoints: Checkpoints, number: int, state: StagesState, record: Record) -> None:
        """Writes the checkpoint of step `number`."""
        checkpoints.save(number, self._joined(state.parts, self._shapes), record)

    def load(self, checkpoints: Checkpoints, number: int) -> StagesState:
        """The state in the checkpoint of step `number`."""
        saved = checkpoints.restore(number, self._checkpoint)
        return StagesState(parts=self._each(lambda at: self._loaded(at, saved)))

    def parameters(self, state: StagesState) -> Params:
        """The model's own tree of parameters, on the host."""
        params: Params = self._joined(state.params, tuple(shapes.params for shapes in self._shapes))
        return params

    # Programs of each chunk.

    @cached_property
    def _keys(self) -> tuple[Any, ...]:
        """State's step -> the key of the step."""
        return self._programs(lambda step: random_key(self.setup.config.seed, RandomStream.STEP, step))

    @cached_property
    def _wrapped(self) -> tuple[Any, ...]:
        """Data of a key -> the key."""
        return self._programs(jax.random.wrap_key_data)

    def _programs(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        return tuple(
            jax.jit(function, out_shardings=chunk.named(PartitionSpec())) for chunk in self.setup.layout.chunks
        )

    @cached_property
    def _updates(self) -> tuple[Any, ...]:
        """(state, gradients, report) -> (the next state, metrics)."""

        def program(at: int) -> Any:
            whole = self.setup.layout.chunks[at].named(PartitionSpec())
            places = (_places(self._shapes[at]), whole)
            return jax.jit(partial(self._updated, at), out_shardings=places, donate_argnums=0)

        return tuple(map(program, range(len(self.setup.layout.chunks))))

    def _updated(self, at: int, state: TrainState, gradients: Gradients, report: jax.Array) -> Any:
        config, training = self.setup.config, self.setup.training
        sums = jax.tree.unflatten(training.sums_tree, list(report[1:]))
        per_token = 1 / (training.scale * sums.tokens)
        update = make_update(
            self.setup.optimizers[at],
            partial(learning_rate, config.optimizer, config.train.steps),
            seed=config.seed,
            max_bad_steps=config.train.max_bad_steps,
            clip=self._clip,
            weights=self.setup.weights[at],
            guard=spike_guard(config.guards),
        )
        mean = jax.tree.map(lambda leaf: leaf * per_token, gradients)
        return update(state, mean, sums, jnp.sqrt(report[0]) * per_token, None)

    @property
    def _clip(self) -> Clipping:
        return Clipping(limit=self.setup.config.optimizer.clip_norm, kind=self.setup.config.optimizer.clip)

    # From the state of chunks to that of a checkpoint, and back.

    def _state_of(self, at: int, params: Params) -> TrainState:
        optimizer, weights = self.setup.optimizers[at], self.setup.weights[at]
        return init_state(params, optimizer, None, weights, self._clip, spike_guard(self.setup.config.guards))

    @cached_property
    def _shapes(self) -> tuple[TrainState, ...]:
        """Of every chunk's state, with shardings."""

        def one(at: int) -> TrainState:
            chunk = self.setup.layout.chunks[at]
            shapes = jax.eval_shape(partial(self._state_of, at), self.setup.training.stored[at])
            places = chunk.layout.shardings(replace(shapes, losses=None))
            whole = jax.tree.map(lambda _: chunk.named(PartitionSpec()), shapes.losses)
            state: TrainState = _abstract(shapes, replace(places, losses=whole))
            return state

        return tuple(map(one, range(len(self.setup.layout.chunks))))

    @cached_property
    def _checkpoint(self) -> TrainState:
        """Shapes of a checkpoint's state, which is read to the host by every process."""
        everywhere = Mesh(np.array(self.setup.layout.devices), (DATA,))
        model = jax.eval_shape(self.setup.model.init, jax.random.key(0))
        optimizer, weights = self.setup.optimizers[0], self.setup.weights[0]
        guard = spike_guard(self.setup.config.guards)
        shapes = jax.eval_shape(lambda tree: init_state(tree, optimizer, None, weights, self._clip, guard), model)
        whole = jax.tree.map(lambda _: NamedSharding(everywhere, PartitionSpec()), shapes.losses)
        return replace(shapes, losses=_abstract(shapes.losses, whole))

    def _joined(self, parts: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
        """The state, or the parameters, of the whole model in numpy, on every process."""
        whole = []
        for chunk, part, like in zip(self.setup.layout.chunks, parts, shapes, strict=True):
            leaves, tree = jax.tree.flatten(like)
            held = [None] * len(leaves) if part is None else jax.tree.leaves(part)
            whole.append(
                jax.tree.unflatten(
                    tree, [on_every_host(chunk.device_mesh.mesh, *one) for one in zip(held, leaves, strict=True)]
                )
            )

        def joined(part: Any, *others: Any) -> Any:
            return self.setup.layout.joined((part, *others)) if _like_params(part) else part

        return jax.tree.map(joined, *whole, is_leaf=_like_params)

    def _loaded(self, at: int, saved: TrainState) -> TrainState:
        shapes, guard = self._shapes[at], spike_guard(self.setup.config.guards)
        core = jax.tree.map(
            lambda part: self.setup.layout.part(at, part) if _like_params(part) else part,
            replace(saved, losses=None),
            is_leaf=_like_params,
        )
        state: TrainState = _placed(core, _places(replace(shapes, losses=None)))
        if guard is None:
            return state
        return replace(state, losses=guard.fitted(saved.losses, _places(shapes.losses)))

    def _each(self, function: Callable[[int], Any]) -> tuple[Any, ...]:
        return tuple(settled(function(at)) if chunk.here else None for at, chunk in enumerate(self.setup.layout.chunks))


def compile_stages_step(setup: StagesSetup) -> StagesStep:
    """The step of a plan whose stages have a program each; every program is compiled when it first runs.

    Raises:
      InputError: a guard that needs one program.
    """
    if setup.config.guards.replicas_every is not None:
        raise InputError(
            "guards.replicas_every compares copies within one program, and space=general has a program for each stage; "
            "leave it out, or use a plan of space=spmd"
        )
    return StagesStep(setup=setup)


def on_every_host(mesh: Mesh, leaf: jax.Array | None, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array of one stage in numpy, on every process, all of which call this.

    leaf: None on processes that have no device of the mesh.  like: its shape.  Several processes take as much memory
    as there are processes.
    """
    if leaf is not None and not leaf.is_fully_replicated:
        leaf = _replicated(NamedSharding(mesh, PartitionSpec()))(leaf)
    mine = np.zeros(like.shape, like.dtype) if leaf is None else np.asarray(leaf.addressable_data(0))
    if jax.process_count() == 1:
        return mine
    return np.asarray(gathered(mine)[mesh.devices.flat[0].process_index])


@cache
def _replicated(place: NamedSharding) -> "jax.stages.Wrapped":
    return jax.jit(lambda leaf: leaf, out_shardings=place)


def _like_params(part: object) -> bool:
    return isinstance(part, dict) and "blocks" in part


def _placed(tree: PyTree, places: PyTree) -> Any:
    """Arrays of the host on devices."""

    def one(leaf: Any, place: NamedSharding) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

    return jax.tree.map(one, tree, places)


def _places(shapes: PyTree) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _abstract(shapes: PyTree, places: PyTree) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
