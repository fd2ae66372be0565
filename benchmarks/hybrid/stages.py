"""Whole steps of general plans: a program for each stage, as `jhpt train` runs them (`jhpt.training.stages_step`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks.emulated.timing import Call
from benchmarks.hybrid.models import Subject
from jhpt.core.config import OptimizerConfig
from jhpt.core.plan import Plan
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import PlacedChunk
from jhpt.sharding.stages.settled import settled
from jhpt.training.clipping import Clipping
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import TrainState, init_state, make_update


def stages_step(subject: Subject, plan: Plan, devices: Sequence[jax.Device]) -> Call:
    """A training step of the plan on these devices, with a state of its own; its programs compile in the first call."""
    execution = subject.stages_execution(plan, devices)
    chunks = execution.layout.chunks
    key = jax.random.key(0)
    parts = _each(execution, lambda at: _fresh(subject, execution, at))
    keys = _each(execution, lambda at: jax.jit(lambda: key, out_shardings=_whole(chunks[at]))())
    updates = [jax.jit(partial(_updated, execution), donate_argnums=0) for _ in chunks]
    batches = execution.batches(subject.rows(subject.batch))

    def run() -> Any:
        nonlocal parts
        params = tuple(None if part is None else part.params for part in parts)
        found = execution.gradients(params, batches, keys)
        results = _each(execution, lambda at: updates[at](parts[at], found.gradients[at], found.report[at]))
        parts = tuple(result and result[0] for result in results)
        return [result[1] for result in results if result]

    return run


def _each(execution: StagesExecution, function: Callable[[int], Any]) -> tuple[Any, ...]:
    """function(number) of every chunk that has devices here."""
    chunks = execution.layout.chunks
    return tuple(settled(function(at)) if chunk.here else None for at, chunk in enumerate(chunks))


def _fresh(subject: Subject, execution: StagesExecution, at: int) -> TrainState:
    """The state of a chunk before the first step."""
    layout = execution.layout

    def state(key: jax.Array) -> TrainState:
        return init_state(layout.part(at, subject.init(key)), make_optimizer(OptimizerConfig()))

    places = layout.chunks[at].layout.shardings(jax.eval_shape(state, jax.random.key(0)))
    made: TrainState = jax.jit(state, out_shardings=places)(jax.random.key(0))
    return made


def _updated(execution: StagesExecution, state: TrainState, gradients: Any, report: jax.Array) -> Any:
    """The update of `jhpt train`, with the norm and the sums that all stages know."""
    sums = jax.tree.unflatten(execution.sums_tree, list(report[1:]))
    share = 1 / (execution.scale * sums.tokens)
    update = make_update(
        make_optimizer(OptimizerConfig()),
        lambda step: jnp.float32(1e-3),
        seed=0,
        max_bad_steps=10,
        clip=Clipping(limit=1.0),
    )
    mean = jax.tree.map(lambda leaf: leaf * share, gradients)
    return update(state, mean, sums, jnp.sqrt(report[0]) * share, None)


def _whole(chunk: PlacedChunk) -> jax.sharding.NamedSharding:
    return chunk.named(PartitionSpec())
