"""The step of a plan whose blocks are in host memory, wholly or in part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jhpt.compiled.deviceless import OnHost, on_host, shape_on_host
from jhpt.core.amounts import gib
from jhpt.core.errors import InputError
from jhpt.measure.hosts import processes_here
from jhpt.models.family import Model, Rows, Sums, as_text
from jhpt.sharding.offload.step import OffloadedBlocks
from jhpt.sharding.offload.stream import HostRows
from jhpt.sharding.step import Execution
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.offloaded_training import OffloadedState, OffloadedTraining
from jhpt.training.optimizer import DECAYED, learning_rate
from jhpt.training.programs import compiled_within_memory, evaluation_shapes, fitting, windows_shape
from jhpt.training.record import Record
from jhpt.training.runtime import host_budget
from jhpt.training.setup import Design, Setup
from jhpt.training.spikes import spike_guard
from jhpt.training.step import Params, StepMetrics


def offloaded_training(design: Design, execution: Execution | None = None) -> OffloadedTraining:
    """The step of the plan, to be traced.  execution: by default that of training."""
    config, model = design.config, as_text(design.model)
    layer = jax.eval_shape(partial(model.init_block, jax.random.key(0)), 0)
    blocks = OffloadedBlocks(
        execution=execution or design.training,
        layer=layer,
        decays=lambda path: path.split("/")[-1] in DECAYED,
    )
    return OffloadedTraining(
        blocks=blocks,
        config=config.optimizer,
        learning_rate=partial(learning_rate, config.optimizer, config.train.steps),
        seed=config.seed,
        max_bad_steps=config.train.max_bad_steps,
        guard=spike_guard(config.guards),
    )


@dataclass(frozen=True, kw_only=True)
class OffloadedStep:
    """Implements `training.programs.Step`; `OffloadedState` is its state.

    flushing: makes the pending update.  room_for_parameters: whether a device can hold all parameters.
    """

    training: OffloadedTraining
    model: Model
    step: Callable[[OffloadedState, jax.Array], tuple[OffloadedState, StepMetrics]]
    evaluate: Callable[[tuple[HostRows, Params], jax.Array, jax.Array, jax.Array], Sums]
    flushing: Callable[[OffloadedState], OffloadedState]
    memory: Mapping[str, int]
    host_bytes: int
    room_for_parameters: bool

    def init(self) -> OffloadedState:
        """The state before the first step."""
        return self.training.fresh(self.model)

    def started(self, read: Callable[[Params], Params]) -> OffloadedState:
        """The state before the first step with other parameters."""
        return self.training.started(read, jax.eval_shape(self.model.init, jax.random.key(0)))

    def flush(self, state: OffloadedState) -> OffloadedState:
        """The state after its pending update, if there is one."""
        return self.flushing(state) if state.pending is not None and bool(state.pending.good) else state

    def save(self, checkpoints: Checkpoints, number: int, state: OffloadedState, record: Record) -> None:
        """Writes the checkpoint of step `number`."""
        checkpoints.save(number, self.training.saved(state), record)

    def load(self, checkpoints: Checkpoints, number: int) -> OffloadedState:
        """The state in the checkpoint of step `number`."""
        embedding_and_head = jax.eval_shape(as_text(self.model).init_embedding_and_head, jax.random.key(0))
        state, guard = self.training.loaded(partial(checkpoints.part, number), embedding_and_head), self.training.guard
        if guard is None:
            return state
        place = self.training.blocks.execution.layout.replicated
        like = jax.eval_shape(guard.fresh)
        like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in like.items()}
        losses = guard.fitted(checkpoints.losses(number, like), dict.fromkeys(like, place))
        return replace(state, losses=losses)

    def parameters(self, state: OffloadedState) -> Params | None:
        """The model's own tree of parameters; None if the devices have no room for it."""
        return self.training.parameters(state.params) if self.room_for_parameters else None


def compile_offloaded_step(setup: Setup) -> OffloadedStep:
    """Compiles the training step and, if the memory of a device is known, evaluating and saving.

    Raises:
      InputError: devices or hosts have less memory than is needed.
    """
    training, state = offloaded_training(setup), abstract_state(setup)
    check_host(setup, training)
    compiled, memory = compiled_within_memory(setup, lower_offloaded_step(setup), "a step", host=copies(training))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    flushing = jax.jit(training.flushed, donate_argnums=0, out_shardings=places)
    flushing = fitting(setup, flushing, "saving a checkpoint", (state,))
    sums = offloaded_training(setup, setup.evaluation).blocks.sums
    evaluate = jax.jit(
        lambda params, windows, weights, key: sums(params[0], params[1], Rows(windows, weights), key),
        out_shardings=setup.layout.replicated,
    )
    state_bytes = memory.get("state", 0)
    return OffloadedStep(
        training=training,
        model=setup.model,
        step=compiled,
        evaluate=fitting(setup, evaluate, "evaluating", evaluation_shapes(setup, state.params), state_bytes),
        flushing=flushing,
        memory=memory,
        host_bytes=host_bytes(training),
        room_for_parameters=_room_for_parameters(setup, training.blocks, state_bytes),
    )


COPIED_TO_SAVE = 0.25
"""Share of the offloaded rows that is copied at a time while they are saved layer by layer (measured: 0.16)."""


def copies(training: OffloadedTraining) -> dict[str, float]:
    """Bytes of host memory that this process needs beside its rows, by cause."""
    return {"copies to save": COPIED_TO_SAVE * host_bytes(training)}


def lower_offloaded_step(design: Design) -> jax.stages.Lowered:
    """The training step `(state, windows [B, W]) -> (state, metrics)`, which donates the state; to be compiled.

    Devices need not be attached to this machine.
    """
    training, state, batch = offloaded_training(design), abstract_state(design), design.layout.batch
    inputs = jax.tree.map(lambda leaf: leaf.sharding, state)
    places = {name: on_host(place) if training.blocks.on_host(name) else place for name, place in inputs.rows.items()}
    there = OffloadedState(**vars(inputs) | {"rows": places})
    rows = {
        name: shape_on_host(leaf.shape, leaf.dtype, place) if isinstance(place := places[name], OnHost) else leaf
        for name, leaf in state.rows.items()
    }
    jitted = jax.jit(
        lambda state, windows: training.step(state, Rows(windows)),
        in_shardings=(there, batch),
        out_shardings=(inputs, design.layout.replicated),
        donate_argnums=0,
    )
    return jitted.lower(OffloadedState(**vars(state) | {"rows": rows}), windows_shape(design.config, batch))


def abstract_state(design: Design) -> OffloadedState:
    """Shapes, dtypes and shardings of the state."""
    training, everywhere = offloaded_training(design), design.layout.replicated
    shapes = training.shapes(jax.eval_shape(as_text(design.model).init_embedding_and_head, jax.random.key(0)))

    def laid(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    places = jax.tree.map(lambda leaf: laid(leaf, everywhere), shapes)
    rows = {name: laid(leaf, training.blocks.sharding(name)) for name, leaf in shapes.rows.items()}
    return OffloadedState(**vars(places) | {"rows": rows})


def check_host(setup: Setup, training: OffloadedTraining) -> None:
    """Refuses a plan for which this host has too little memory.

    Raises:
      InputError: with the bytes needed and available, and a remedy.
    """
    here = processes_here()
    need, room = here * host_bytes(training), host_budget(setup.config.memory)
    if need > room:
        raise InputError(
            f"offloaded blocks need {gib(need)} on each host, which has {gib(room)} for them "
            "(memory.host_budget_bytes); keep more blocks resident, set memory.offload=optimizer, use more hosts, "
            "or train a smaller model"
        )


def host_bytes(training: OffloadedTraining) -> int:
    """Bytes of rows that this process holds in host memory."""
    blocks, names = training.blocks, training.names
    mesh = blocks.execution.layout.device_mesh.mesh
    local_share = len(mesh.local_devices) / mesh.size
    total = sum(4 * rows * size for name, (rows, size) in blocks.shapes(names).items() if blocks.on_host(name))
    return int(total * local_share)


def _room_for_parameters(setup: Setup, blocks: OffloadedBlocks, state_bytes: int) -> bool:
    """Whether a device can hold all parameters twice, as sampling needs, beside the state."""
    return setup.device.memory is None or state_bytes + 8 * blocks.count * blocks.bucket.size < setup.device.memory
