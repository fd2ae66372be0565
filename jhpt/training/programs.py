"""The compiled programs of a run: initialise, train one step, evaluate one batch."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.models.family import Rows
from jhpt.sharding.compiler_options import compiler_options
from jhpt.sharding.compression import feedback
from jhpt.training.clipping import clipping
from jhpt.training.fitting import Programs, check_memory, evaluated, fitting, memory_of, windows_shape
from jhpt.training.keys import RandomStream, random_key
from jhpt.training.offloaded_programs import offloaded_programs, offloaded_step
from jhpt.training.optimizer import learning_rate
from jhpt.training.setup import Design, Setup
from jhpt.training.step import TrainState, init_state, make_train_step


def compile_programs(setup: Setup) -> Programs:
    """Compiles the training step and, where a device's memory is known, what else might not fit: evaluating and saving.

    They would fail when they are first called, hundreds of steps later.

    Raises:
      InputError: the compiler says that one of them needs more memory than there is.
    """
    return offloaded_programs(setup) if setup.plan.offload else _device_programs(setup)


def _device_programs(setup: Setup) -> Programs:
    """Of a plan with everything on the devices."""
    state = abstract_state(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    compiled = _device_step(setup).compile(compiler_options=compiler_options(setup.device.platform, setup.plan))
    memory = memory_of(compiled)
    check_memory(setup, "a step", memory)
    there = memory.get("state", 0)
    return Programs(
        init=jax.jit(partial(fresh_state, setup), out_shardings=shardings),
        train_step=compiled,
        evaluate=fitting(setup, evaluate_program(setup), "evaluating", evaluated(setup, state.params), there),
        memory=memory,
        settled=lambda state: state,
        **_conversions(setup, state, lambda program, part: fitting(setup, program, "saving a checkpoint", (part,))),
    )


def evaluate_program(setup: Setup) -> Any:
    """Sums over a held-out batch, `(params, windows [B, W], row weights [B], key) -> Sums`; to be compiled."""
    return jax.jit(
        lambda params, windows, weights, key: setup.evaluation.sums(params, Rows(windows, weights), key),
        out_shardings=setup.layout.replicated,
    )


def train_program(design: Design) -> jax.stages.Lowered:
    """The training step `(state, windows [B, W]) -> (state, metrics)`, whose state is donated; to be compiled."""
    return offloaded_step(design) if design.plan.offload else _device_step(design)


def _device_step(design: Design) -> jax.stages.Lowered:
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
        max_bad_steps=config.train.max_bad_steps,
        clip=clipping(config.optimizer, execution),
        weights=design.weights,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated))
    return jitted.lower(state, windows_shape(config, layout.batch))


def _conversions(setup: Setup, state: TrainState, fitting: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """`saved`, `restored` and `parameters` of `Programs`.  fitting: (program, its argument) -> the program, where there
    is memory for it."""
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
    load = parts.pop("loaded")
    if left is None:
        return parts | {"restored": lambda checkpoints, step: load(checkpoints.restore(step, there))}

    def with_feedback(convert: Callable[[TrainState], TrainState], rest: Callable[[Any], Any]) -> Any:
        return lambda state: replace(convert(replace(state, feedback=None)), feedback=rest(state.feedback))

    there, load = replace(there, feedback=left["checkpoint"]), with_feedback(load, left["loaded"])
    return parts | {
        "saved": with_feedback(parts["saved"], left["saved"]),
        "restored": lambda checkpoints, step: load(checkpoints.restore(step, there)),
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
    params = design.layout.stored(design.model.init(random_key(design.config.seed, RandomStream.INIT)))
    left = feedback.fresh(design.layout, params, design.plan.gradient_compression)
    return init_state(
        params, design.optimizer, left, design.weights, clipping(design.config.optimizer, design.training)
    )


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
