"""The programs of a run whose blocks live on the host, wholly or in part."""

from functools import partial
from typing import Any

import jax

from jhpt.compiled.deviceless import OnHost, on_host, shape_on_host
from jhpt.core.amounts import gib
from jhpt.core.errors import InputError
from jhpt.models.family import Rows
from jhpt.sharding.compiler_options import compiler_options
from jhpt.sharding.offload.step import OffloadedBlocks
from jhpt.sharding.step import Execution
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.fitting import Programs, check_memory, evaluated, fitting, memory_of, windows_shape
from jhpt.training.offloaded_step import OffloadedState, OffloadedTraining
from jhpt.training.optimizer import DECAYED, learning_rate
from jhpt.training.processes import processes_here
from jhpt.training.runtime import host_budget
from jhpt.training.setup import Design, Setup


def offloaded_training(design: Design, execution: Execution | None = None) -> OffloadedTraining:
    """The plan's step; execution: None: that of training."""
    config, model = design.config, design.model
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
    )


def offloaded_programs(setup: Setup) -> Programs:
    """As `programs.compile_programs`.

    Raises:
      InputError: devices or hosts have less memory than is needed.
    """
    training, state = offloaded_training(setup), abstract_state(setup)
    check_host(setup, training)
    compiled = offloaded_step(setup).compile(compiler_options=compiler_options(setup.device.platform, setup.plan))
    memory = memory_of(compiled)
    check_memory(setup, "a step", memory)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    embedding_and_head = jax.eval_shape(setup.model.init_embedding_and_head, jax.random.key(0))
    flush = jax.jit(training.flushed, donate_argnums=0, out_shardings=places)
    flush = fitting(setup, flush, "saving a checkpoint", (state,))
    sums = offloaded_training(setup, setup.evaluation).blocks.sums
    evaluate = jax.jit(
        lambda params, windows, weights, key: sums(params[0], params[1], Rows(windows, weights), key),
        out_shardings=setup.layout.replicated,
    )
    there = memory.get("state", 0)

    def settled(state: OffloadedState) -> OffloadedState:
        return flush(state) if state.pending is not None and bool(state.pending.good) else state

    def restored(checkpoints: Checkpoints, step: int) -> OffloadedState:
        return training.loaded(partial(checkpoints.part, step), embedding_and_head)

    return Programs(
        init=partial(training.fresh, setup.model),
        train_step=compiled,
        evaluate=fitting(setup, evaluate, "evaluating", evaluated(setup, state.params), there),
        memory=memory,
        settled=settled,
        saved=training.saved,
        restored=restored,
        host=host_bytes(training),
        parameters=training.parameters if _room_for_all(setup, training.blocks, there) else None,
    )


def offloaded_step(design: Design) -> jax.stages.Lowered:
    """As `programs.train_program`; also for devices that are not there."""
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
    shapes = training.shapes(jax.eval_shape(design.model.init_embedding_and_head, jax.random.key(0)))

    def laid(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rest = jax.tree.map(lambda leaf: laid(leaf, everywhere), shapes)
    rows = {name: laid(leaf, training.blocks.sharding(name)) for name, leaf in shapes.rows.items()}
    return OffloadedState(**vars(rest) | {"rows": rows})


def check_host(setup: Setup, training: OffloadedTraining) -> None:
    """Refuses what this host has no memory for.

    Raises:
      InputError: with both numbers and what to do.
    """
    here = processes_here()
    need, room = here * host_bytes(training), host_budget(setup.config.memory)
    if need > room:
        raise InputError(
            f"blocks need {gib(need)} on each host, which has {gib(room)} for them "
            f"(memory.host_budget_bytes); let more of them stay on the devices, set memory.offload=optimizer, use more "
            "hosts, or take a smaller model"
        )


def host_bytes(training: OffloadedTraining) -> int:
    """Bytes of rows that this process has on its host."""
    blocks, names = training.blocks, training.names
    from_here = (
        len(blocks.execution.layout.device_mesh.mesh.local_devices) / blocks.execution.layout.device_mesh.mesh.size
    )
    total = sum(4 * rows * size for name, (rows, size) in blocks.shapes(names).items() if blocks.on_host(name))
    return int(total * from_here)


def _room_for_all(setup: Setup, blocks: OffloadedBlocks, there: int) -> bool:
    """Whether a device can hold all parameters and as much again, as a sample needs, beside the state."""
    return setup.device.memory is None or there + 8 * blocks.count * blocks.bucket.size < setup.device.memory
