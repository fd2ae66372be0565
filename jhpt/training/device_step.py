"""The step of a plan whose parameters, gradients and optimizer state are on the devices."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.models.family import Rows, Sums
from jhpt.sharding.compression import feedback
from jhpt.sharding.types import PyTree
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.clipping import clipping
from jhpt.training.optimizer import learning_rate
from jhpt.training.programs import compiled_within_memory, copied_to_save, evaluation_shapes, fitting, windows_shape
from jhpt.training.record import Record
from jhpt.training.setup import Design, Setup
from jhpt.training.spikes import SpikeGuard, spike_guard
from jhpt.training.step import (
    Feedback,
    Params,
    RandomStream,
    StepMetrics,
    TrainState,
    Tree,
    init_state,
    make_train_step,
    random_key,
)

Fitting = Callable[[Any, Any], Any]
"""(program, its argument) -> the program, which fits the devices."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion between the state of a plan and that of a checkpoint.

    checkpoint: shapes, dtypes and shardings of the checkpoint's state.
    saved: a plan's state -> the checkpoint's.  loaded: the inverse.
    parameters: a plan's parameters -> the model's own tree.
    """

    checkpoint: TrainState
    saved: Callable[[TrainState], TrainState]
    loaded: Callable[[TrainState], TrainState]
    parameters: Callable[[Params], Params]


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """Implements `training.programs.Step`; `TrainState` is its state."""

    init: Callable[[], TrainState]
    started: Callable[[Callable[[Params], Params]], TrainState]
    step: Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[Params, jax.Array, jax.Array, jax.Array], Sums]
    conversion: Conversion
    memory: Mapping[str, int]
    host_bytes: int = 0

    def flush(self, state: TrainState) -> TrainState:
        """The state itself: no update is ever pending."""
        return state

    def save(self, checkpoints: Checkpoints, number: int, state: TrainState, record: Record) -> None:
        """Writes the checkpoint of step `number`."""
        checkpoints.save(number, self.conversion.saved(state), record)

    def load(self, checkpoints: Checkpoints, number: int) -> TrainState:
        """The state in the checkpoint of step `number`."""
        return self.conversion.loaded(checkpoints.restore(number, self.conversion.checkpoint))

    def parameters(self, state: TrainState) -> Params:
        """The model's own tree of parameters."""
        return self.conversion.parameters(state.params)


def compile_device_step(setup: Setup) -> DeviceStep:
    """Compiles the training step and, if the memory of a device is known, evaluating and saving.

    Raises:
      InputError: the compiler says that one of them needs more memory than there is.
    """
    state = abstract_state(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    compiled, memory = compiled_within_memory(setup, lower_device_step(setup), "a step", host=copies(state))
    evaluate = fitting(
        setup,
        evaluate_program(setup),
        "evaluating",
        evaluation_shapes(setup, state.params),
        besides=memory.get("state", 0),
    )
    return DeviceStep(
        init=jax.jit(partial(fresh_state, setup), out_shardings=shardings),
        started=partial(_started, setup, shardings),
        step=compiled,
        evaluate=evaluate,
        memory=memory,
        conversion=make_conversion(
            setup, state, lambda program, part: fitting(setup, program, "saving a checkpoint", (part,))
        ),
    )


def copies(state: TrainState) -> dict[str, float]:
    """Bytes of host memory that this process needs beside its devices, by cause.  state: shapes with shardings."""
    return {"copies to save": copied_to_save(state)}


def evaluate_program(setup: Setup) -> Any:
    """`Step.evaluate` of a plan without offload, to be compiled."""
    return jax.jit(
        lambda params, windows, weights, key: setup.evaluation.sums(params, Rows(windows, weights), key),
        out_shardings=setup.layout.replicated,
    )


def lower_device_step(design: Design) -> jax.stages.Lowered:
    """The training step `(state, windows [B, W]) -> (state, metrics)`, which donates the state; to be compiled."""
    config, layout = design.config, design.layout
    state = abstract_state(design)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    execution = design.training
    gradients = execution.gradients if state.feedback is None else execution.compressed_gradients
    step = make_train_step(
        lambda params, windows, *key_and_feedback: gradients(params, Rows(windows), *key_and_feedback),
        design.optimizer,
        partial(learning_rate, config.optimizer, config.train.steps),
        seed=config.seed,
        max_bad_steps=config.train.max_bad_steps,
        clip=clipping(config.optimizer, execution),
        weights=design.weights,
        guard=spike_guard(config.guards),
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated))
    return jitted.lower(state, windows_shape(config, layout.batch))


def _started(setup: Setup, shardings: TrainState, read: Callable[[Params], Params]) -> TrainState:
    """`Step.started`: the model's tree is read in shares, whatever the plan, and then laid out by it."""
    shapes = jax.eval_shape(setup.model.init, jax.random.key(0))
    params = read(_abstract(shapes, setup.layout.model_shardings(shapes)))
    lay_out = jax.jit(partial(state_of, setup), out_shardings=shardings, donate_argnums=0)
    return _quietly(lay_out)(params)


def fresh_state(design: Design) -> TrainState:
    """The state before the first step, as the plan stores it."""
    return state_of(design, design.model.init(random_key(design.config.seed, RandomStream.INIT)))


def state_of(design: Design, params: Params) -> TrainState:
    """The state before the first step with these parameters, the model's own tree."""
    params = design.layout.stored(params)
    residuals = feedback.fresh(design.layout, params, design.plan.gradient_compression)
    clip, guard = clipping(design.config.optimizer, design.training), spike_guard(design.config.guards)
    return init_state(params, design.optimizer, residuals, design.weights, clip, guard)


def abstract_state(design: Design) -> TrainState:
    """Shapes, dtypes and shardings of the training state, without allocating it."""
    shapes = jax.eval_shape(partial(fresh_state, design))
    shardings = design.layout.shardings(replace(shapes, feedback=None, losses=None))
    if shapes.feedback is not None:
        shardings = replace(shardings, feedback=feedback.shardings(design.layout, shapes.feedback))
    shardings = replace(shardings, losses=jax.tree.map(lambda _: design.layout.replicated, shapes.losses))
    state: TrainState = _abstract(shapes, shardings)
    return state


def make_conversion(setup: Setup, state: TrainState, fitting: Fitting) -> Conversion:
    """The conversion between `state`, given as shapes, and what a checkpoint holds."""
    core = replace(state, feedback=None, losses=None)
    conversion = _same(core) if setup.layout.same else _restacked(setup, core, fitting)
    if (guard := spike_guard(setup.config.guards)) is not None:
        conversion = _with_losses(conversion, state, guard)
    if state.feedback is None:
        return conversion
    checkpoint, saved, loaded = _feedback_conversion(setup, state.feedback, fitting)

    def beside(
        convert: Callable[[TrainState], TrainState], convert_feedback: Callable[[Feedback], Feedback]
    ) -> Callable[[TrainState], TrainState]:
        def both(state: TrainState) -> TrainState:
            assert state.feedback is not None
            return replace(convert(replace(state, feedback=None)), feedback=convert_feedback(state.feedback))

        return both

    return replace(
        conversion,
        checkpoint=replace(conversion.checkpoint, feedback=checkpoint),
        saved=beside(conversion.saved, saved),
        loaded=beside(conversion.loaded, loaded),
    )


def _with_losses(conversion: Conversion, state: TrainState, guard: SpikeGuard) -> Conversion:
    """The conversion of states with what their steps know of losses, which no plan lays out in another way."""
    places = jax.tree.map(lambda leaf: leaf.sharding, state.losses)

    def saved(state: TrainState) -> TrainState:
        return replace(conversion.saved(replace(state, losses=None)), losses=state.losses)

    def loaded(state: TrainState) -> TrainState:
        return replace(conversion.loaded(replace(state, losses=None)), losses=guard.fitted(state.losses, places))

    checkpoint = replace(conversion.checkpoint, losses=state.losses)
    return replace(conversion, checkpoint=checkpoint, saved=saved, loaded=loaded)


def _same(core: TrainState) -> Conversion:
    """The conversion of a plan that stores the model's own tree."""
    return Conversion(
        checkpoint=core, saved=lambda state: state, loaded=lambda state: state, parameters=lambda params: params
    )


def _restacked(setup: Setup, core: TrainState, fitting: Fitting) -> Conversion:
    """The conversion of a plan that stacks, splits or pads the blocks of the model's tree."""
    layout = setup.layout
    model_tree = partial(layout.model_tree, tied=setup.training.tied)
    unstack, stack = partial(_converted, model_tree), partial(_converted, layout.stored)
    shapes = jax.eval_shape(unstack, core)
    places = layout.model_shardings(shapes)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, core)
    return Conversion(
        checkpoint=_abstract(shapes, places),
        saved=fitting(jax.jit(unstack, out_shardings=places), core),
        loaded=_quietly(jax.jit(stack, out_shardings=shardings, donate_argnums=0)),
        parameters=jax.jit(model_tree, out_shardings=places.params),
    )


def _quietly(load: Callable[[Tree], TrainState]) -> Callable[[Tree], TrainState]:
    """`load` without jax's warning that padded rows, which need new buffers, cannot reuse donated ones."""

    def loaded(state: Tree) -> TrainState:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return load(state)

    return loaded


def _feedback_conversion(
    setup: Setup, residuals: Feedback, fitting: Fitting
) -> tuple[Feedback, Callable[[Feedback], Feedback], Callable[[Feedback], Feedback]]:
    """(checkpoint, saved, loaded) of the feedback, as in `Conversion`.

    A checkpoint may come from any number of ranks, or lack some items; those start from zero.
    """
    layout = setup.layout
    save = partial(feedback.saved, layout, tied=setup.training.tied)
    shapes = jax.eval_shape(save, residuals)
    places = feedback.saved_shardings(layout, shapes)
    load = jax.jit(partial(feedback.loaded, layout), out_shardings=feedback.shardings(layout, residuals))

    def loaded(restored: Feedback) -> Feedback:
        complete: Feedback = load({name: restored.get(name) or _zeros(shapes[name], places[name]) for name in shapes})
        return complete

    return _abstract(shapes, places), fitting(jax.jit(save, out_shardings=places), residuals), loaded


def _zeros(shapes: Params, shardings: Params) -> Params:
    make = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
    zeros: Params = jax.jit(make, out_shardings=shardings)()
    return zeros


def _converted(convert: Callable[[Params], Params], state: TrainState) -> TrainState:
    """Converts every tree of the state that has the structure of the parameters: these and the optimizer's moments."""
    like_params = lambda part: isinstance(part, dict) and "blocks" in part  # noqa: E731
    converted: TrainState = jax.tree.map(
        lambda part: convert(part) if like_params(part) else part, state, is_leaf=like_params
    )
    return converted


def _abstract(shapes: PyTree, shardings: PyTree) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
