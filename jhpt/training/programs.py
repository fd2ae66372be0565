"""The compiled programs of a run: initialise, train one step, evaluate one batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.keys import Stream, stream_key
from jhpt.training.objective import Sums
from jhpt.training.optimizer import learning_rate
from jhpt.training.setup import Setup
from jhpt.training.step import TrainState, TrainStep, init_state, make_train_step


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled functions and the layout of their state.

    state: shapes and shardings of the training state.
    train_step: (state, windows [B, W]) -> (state, metrics); the state is donated.
    evaluate: (params, windows, row weights [B], key) -> Sums.
    memory: bytes per device of the training step by cause, as the compiler plans them.
    """

    state: TrainState
    init: Callable[[], TrainState]
    train_step: TrainStep
    evaluate: Callable[..., Sums]
    memory: dict[str, int]


def compile_programs(setup: Setup) -> Programs:
    """Compiles the training step; the smaller programs compile when they are first called."""
    config, layout = setup.config, setup.layout

    def fresh() -> TrainState:
        return init_state(setup.model.init(stream_key(config.seed, Stream.INIT)), setup.optimizer)

    state = abstract_state(setup, fresh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    gradient_shardings = layout.optimizer(state.params)

    step = make_train_step(
        setup.objective,
        setup.optimizer,
        partial(learning_rate, config.optimizer, config.train.steps),
        seed=config.seed,
        micro_batches=config.parallel.micro_batches,
        max_bad_steps=config.train.max_bad_steps,
        place_gradients=lambda grads: jax.lax.with_sharding_constraint(grads, gradient_shardings),
    )
    windows = jax.ShapeDtypeStruct((config.data.batch_size, window_length(setup)), jnp.int32, sharding=layout.batch)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated))
    compiled = jitted.lower(state, windows).compile()
    memory = _memory(compiled)
    _check_memory(setup, memory)
    return Programs(
        state=state,
        init=jax.jit(fresh, out_shardings=shardings),
        train_step=compiled,
        evaluate=jax.jit(partial(setup.objective, train=False), out_shardings=layout.replicated),
        memory=memory,
    )


def abstract_state(setup: Setup, fresh: Callable[[], TrainState]) -> TrainState:
    """Shapes, dtypes and shardings of the training state, without allocating it."""
    shapes, layout = jax.eval_shape(fresh), setup.layout
    shardings = replace(
        jax.tree.map(lambda _: layout.replicated, shapes),
        params=layout.parameters(shapes.params),
        optimizer=layout.optimizer(shapes.optimizer),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def window_length(setup: Setup) -> int:
    """Tokens in one row of a batch."""
    return len(setup.train_windows[0])


def global_batch(setup: Setup, rows: np.ndarray) -> jax.Array:
    """The rows of this process as its part of the global batch."""
    shape = (setup.config.data.batch_size, *rows.shape[1:])
    return jax.make_array_from_process_local_data(setup.layout.batch, rows, shape)


def _memory(compiled: Any) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {"state": analysis.argument_size_in_bytes, "temporary": analysis.temp_size_in_bytes}


def _check_memory(setup: Setup, memory: dict[str, int]) -> None:
    """Refuses what the compiler says cannot fit, before the device runs out of memory in the middle of it."""
    limit, need = setup.device.memory, sum(memory.values())
    if limit is not None and need > limit:
        causes = " + ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in memory.items())
        raise InputError(
            f"a step needs {causes} on each device, which has {limit / 2**30:.1f} GiB; raise parallel.micro_batches, "
            "parallel.zero or parallel.tensor, or lower data.batch_size"
        )
