"""The compiled programs of a run: initialise, train one step, evaluate one batch."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.config import Config, GPTConfig
from jhpt.core.errors import InputError
from jhpt.sharding import feedback
from jhpt.sharding.options import compiler_options
from jhpt.training.keys import Stream, stream_key
from jhpt.training.optimizer import learning_rate
from jhpt.training.parts import Rows, Sums
from jhpt.training.setup import Design, Setup
from jhpt.training.step import TrainState, TrainStep, init_state, make_train_step


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled functions and the layout of their state.

    state: shapes and shardings of the training state.
    train_step: (state, windows [B, W]) -> (state, metrics); the state is donated.
    evaluate: (params, windows, row weights [B], key) -> Sums.
    memory: bytes per device of the training step by cause, as the compiler plans them.
    saved, loaded: the state as a checkpoint holds it, whose parameters are the model's own tree, and back.
    checkpoint: shapes and shardings of that.  parameters: the state's parameters alone as the model's own tree.
    """

    state: TrainState
    init: Callable[[], TrainState]
    train_step: TrainStep
    evaluate: Callable[..., Sums]
    memory: dict[str, int]
    saved: Callable[[TrainState], TrainState]
    loaded: Callable[[TrainState], TrainState]
    checkpoint: TrainState
    parameters: Callable[[Any], Any]


def compile_programs(setup: Setup) -> Programs:
    """Compiles the training step and, where a device's memory is known, what else might not fit: evaluating and saving.

    They would fail when they are first called, hundreds of steps later.

    Raises:
      InputError: the compiler says that one of them needs more memory than there is.
    """
    state = abstract_state(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    options = compiler_options(setup.device.platform, setup.plan)
    compiled = train_program(setup).compile(compiler_options=options)
    memory = _memory(compiled)
    _check_memory(setup, "a step", memory)

    def fitting(program: Any, what: str, arguments: tuple[Any, ...], besides: dict[str, int] | None = None) -> Any:
        if setup.device.memory is None:
            return program
        compiled = program.lower(*arguments).compile(compiler_options=options)
        _check_memory(setup, what, _memory(compiled) | (besides or {}))
        return compiled

    resident = {"state": memory.get("state", 0)}
    return Programs(
        state=state,
        init=jax.jit(partial(fresh_state, setup), out_shardings=shardings),
        train_step=compiled,
        evaluate=fitting(evaluate_program(setup), "evaluating", _evaluated(setup, state), resident),
        memory=memory,
        **_conversions(setup, state, lambda program, part: fitting(program, "saving a checkpoint", (part,))),
    )


def evaluate_program(setup: Setup) -> Any:
    """Sums over a held-out batch, `(params, windows [B, W], row weights [B], key) -> Sums`; to be compiled."""
    return jax.jit(
        lambda params, windows, weights, key: setup.evaluation.sums(params, Rows(windows, weights), key),
        out_shardings=setup.layout.replicated,
    )


def _evaluated(setup: Setup, state: TrainState) -> tuple[Any, ...]:
    """Shapes of what `evaluate` takes."""
    rows, batch = setup.config.data.batch_size, setup.layout.batch
    windows = jax.ShapeDtypeStruct((rows, window_length(setup.config)), jnp.int32, sharding=batch)
    weights = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=batch)
    return state.params, windows, weights, jax.eval_shape(lambda: stream_key(0, Stream.EVALUATION))


def train_program(design: Design) -> jax.stages.Lowered:
    """The training step `(state, windows [B, W]) -> (state, metrics)`, whose state is donated; to be compiled."""
    config, layout = design.config, design.layout
    state = abstract_state(design)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    execution = design.training
    gradients = execution.gradients if state.feedback is None else execution.compressed_gradients
    step = make_train_step(
        lambda params, windows, *rest: gradients(params, Rows(windows), *rest),
        design.optimizer,
        partial(learning_rate, config.optimizer, config.train.steps),
        seed=config.seed,
        clip_norm=config.optimizer.clip_norm,
        max_bad_steps=config.train.max_bad_steps,
        norm=execution.norm,
    )
    windows = jax.ShapeDtypeStruct((config.data.batch_size, window_length(config)), jnp.int32, sharding=layout.batch)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated))
    return jitted.lower(state, windows)


def _conversions(setup: Setup, state: TrainState, fitting: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """`saved`, `loaded`, `checkpoint` and `parameters` of `Programs`.  fitting: (program, its argument) -> the program,
    where there is memory for it."""
    layout, core = setup.layout, replace(state, feedback=None)
    left = None if state.feedback is None else _feedback_conversions(setup, state, fitting)
    if layout.same:
        same = lambda tree: tree  # noqa: E731
        there, parts = core, {"saved": same, "loaded": same, "parameters": same}
    else:
        model_tree = partial(layout.model_tree, tied=setup.training.tied)
        unstack, stack = partial(_converted, model_tree), partial(_converted, layout.stored)
        shapes = jax.eval_shape(unstack, core)
        places = layout.model_shardings(shapes)
        here = jax.tree.map(lambda leaf: leaf.sharding, core)
        there = _abstract(shapes, places)
        parts = {
            "saved": fitting(jax.jit(unstack, out_shardings=places), core),
            "loaded": _quietly(jax.jit(stack, out_shardings=here, donate_argnums=0)),
            "parameters": jax.jit(model_tree, out_shardings=places.params),
        }
    if left is None:
        return parts | {"checkpoint": there}

    def with_feedback(convert: Callable[[TrainState], TrainState], rest: Callable[[Any], Any]) -> Any:
        return lambda state: replace(convert(replace(state, feedback=None)), feedback=rest(state.feedback))

    return parts | {
        "saved": with_feedback(parts["saved"], left["saved"]),
        "loaded": with_feedback(parts["loaded"], left["loaded"]),
        "checkpoint": replace(there, feedback=left["checkpoint"]),
    }


def _quietly(load: Callable[[TrainState], TrainState]) -> Callable[[TrainState], TrainState]:
    def loaded(state: TrainState) -> TrainState:
        with warnings.catch_warnings():  # padded rows need room of their own; the rest should not be held twice
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return load(state)

    return loaded


def _feedback_conversions(setup: Setup, state: TrainState, fitting: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The same for the feedback of a state, whose checkpoint may have any number of ranks, or lack a part of it."""
    layout = setup.layout
    save = partial(feedback.saved, layout, tied=setup.training.tied)
    shapes = jax.eval_shape(save, state.feedback)
    there = feedback.saved_shardings(layout, shapes)
    here = feedback.shardings(layout, state.feedback)
    load = jax.jit(partial(feedback.loaded, layout), out_shardings=here)

    def loaded(found: Mapping[str, Any]) -> Any:
        return load({name: found.get(name) or _zeros(shapes[name], there[name]) for name in shapes})

    saved = fitting(jax.jit(save, out_shardings=there), state.feedback)
    return {"saved": saved, "loaded": loaded, "checkpoint": _abstract(shapes, there)}


def _zeros(shapes: Any, shardings: Any) -> Any:
    make = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
    return jax.jit(make, out_shardings=shardings)()


def _converted(convert: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Every tree in the state that is like the parameters, converted: they, and the optimizer's moments."""
    like_params = lambda part: isinstance(part, dict) and "blocks" in part  # noqa: E731
    return jax.tree.map(lambda part: convert(part) if like_params(part) else part, state, is_leaf=like_params)


def fresh_state(design: Design) -> TrainState:
    """The state before the first step, as the plan stores it."""
    params = design.layout.stored(design.model.init(stream_key(design.config.seed, Stream.INIT)))
    return init_state(params, design.optimizer, feedback.fresh(design.layout, params, design.plan.gradient_compression))


def abstract_state(design: Design) -> TrainState:
    """Shapes, dtypes and shardings of the training state, without allocating it."""
    shapes = jax.eval_shape(partial(fresh_state, design))
    shardings = design.layout.shardings(replace(shapes, feedback=None))
    if shapes.feedback is not None:
        shardings = replace(shardings, feedback=feedback.shardings(design.layout, shapes.feedback))
    return _abstract(shapes, shardings)


def _abstract(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def window_length(config: Config) -> int:
    """Tokens in one row of a batch: a causal model reads one more than it has inputs."""
    return config.data.sequence_length + isinstance(config.model, GPTConfig)


def global_batch(setup: Setup, rows: np.ndarray) -> jax.Array:
    """The rows of this process as its part of the global batch."""
    shape = (setup.config.data.batch_size, *rows.shape[1:])
    return jax.make_array_from_process_local_data(setup.layout.batch, rows, shape)


def _memory(compiled: Any) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"state": analysis.argument_size_in_bytes, "temporary": analysis.temp_size_in_bytes + made}


LESS_MEMORY = {
    "hand": "raise parallel.micro_batches, parallel.zero or parallel.tensor, or lower data.batch_size",
    "auto": "lower data.batch_size, or lay it out by hand: parallel.auto=false and more of parallel.micro_batches, "
    "parallel.zero or parallel.tensor",
    "given": "give a plan with more micro_batches, zero or tensor, such as `jhpt plan --budget` makes, or one for a "
    "smaller batch",
}
"""What to do about a step that is too large, by where its plan came from."""


def _check_memory(setup: Setup, what: str, memory: dict[str, int]) -> None:
    """Refuses what the compiler says cannot fit, before the device runs out of memory in the middle of it."""
    limit, need = setup.device.memory, sum(memory.values())
    if limit is not None and need > limit:
        causes = " + ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in memory.items())
        raise InputError(
            f"{what} needs {causes} on each device, which has {limit / 2**30:.1f} GiB; "
            + LESS_MEMORY[setup.plan.origin or "given"]
        )
