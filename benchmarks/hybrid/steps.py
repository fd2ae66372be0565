"""Whole steps of plans, each compiled once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call
from benchmarks.hybrid.models import Subject
from jhpt.core.config import OptimizerConfig
from jhpt.core.plan import Plan
from jhpt.sharding.mesh import make_device_mesh
from jhpt.training.clipping import Clipping
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import init_state, make_train_step


def train_step(gradients: Callable[..., Any], norm: Callable[[Any], jax.Array] | None) -> Callable[..., Any]:
    """The step of `jhpt train`."""
    clip = Clipping(limit=1.0) if norm is None else Clipping(limit=1.0, norm=norm)
    return make_train_step(
        gradients,
        make_optimizer(OptimizerConfig()),
        lambda step: jnp.float32(1e-3),
        seed=0,
        max_bad_steps=10,
        clip=clip,
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A plan's programs, to be compiled: `fresh` makes the state, `step` takes it and a batch.

    updates: whether the step returns the next state and is donated the last one.
    """

    fresh: Callable[[], jax.stages.Lowered]
    step: Callable[[], jax.stages.Lowered]
    rows: Callable[[], Any]
    updates: bool


def traced(subject: Subject, plan: Plan, devices: Sequence[jax.Device], *, update: bool = True) -> Traced:
    """A training step of the plan on these devices; update=False: its gradients alone."""
    execution = subject.execution(plan, make_device_mesh(plan, devices))
    layout = execution.layout

    def fresh(key: jax.Array) -> Any:
        return init_state(layout.stored(subject.init(key)), make_optimizer(OptimizerConfig()))

    key = jax.random.key(0)
    shapes = jax.eval_shape(fresh, key)
    shardings = layout.shardings(shapes)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
    )
    batch = subject.rows(subject.batch)
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.batch), batch)
    if update:
        run, out = train_step(execution.gradients, execution.norm), (shardings, layout.replicated)
    else:
        run = lambda state, rows: execution.gradients(state.params, rows, key)  # noqa: E731
        out = shardings.params, layout.replicated
    step = jax.jit(run, donate_argnums=(0,) if update else (), out_shardings=out)

    def place() -> Any:
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, layout.batch, lambda index: leaf[index]), batch
        )

    return Traced(
        fresh=lambda: jax.jit(fresh, out_shardings=shardings).lower(jax.eval_shape(lambda: key)),
        step=lambda: step.lower(state, rows),
        rows=place,
        updates=update,
    )


def ready(hosts: Hosts[Any], programs: Mapping[str, Traced]) -> dict[str, Call]:
    """Compiled steps, each with a state of its own."""

    def lowered() -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
        for name, one in programs.items():
            yield f"{name} step", one.step
            yield f"{name} fresh", one.fresh

    compiled = hosts.compiled(dict(lowered()))
    return {
        name: _running(compiled[f"{name} step"], compiled[f"{name} fresh"](jax.random.key(0)), one.rows(), one.updates)
        for name, one in programs.items()
    }


def _running(program: Any, state: Any, rows: Any, updates: bool) -> Call:
    def run() -> Any:
        nonlocal state
        if not updates:
            return program(state, rows)
        state, metrics = program(state, rows)
        return metrics

    return run
