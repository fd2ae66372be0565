"""Whole steps of plans, each compiled once; programs that hold equal parts of the model share one state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.short_sums import with_short_sums
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

    held: equal for programs whose states lie alike.  updates: whether the step returns the next state and is donated
    the last one; otherwise the state is the parameters alone.
    """

    held: str
    fresh: Callable[[], jax.stages.Lowered]
    step: Callable[[], jax.stages.Lowered]
    rows: Callable[[], Any]
    updates: bool


def traced(
    subject: Subject, plan: Plan, devices: Sequence[jax.Device], *, update: bool = True, short: bool = False
) -> Traced:
    """A training step of the plan on these devices.

    Args:
      update: False: its gradients alone.
      short: whether gradients are sent in 16 bits.
    """
    execution = subject.execution(plan, make_device_mesh(plan, devices))
    if short:
        execution = with_short_sums(execution)
    layout = execution.layout

    def fresh(key: jax.Array) -> Any:
        params = layout.stored(subject.init(key))
        return init_state(params, make_optimizer(OptimizerConfig())) if update else params

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
        run = lambda params, rows: execution.gradients(params, rows, key)  # noqa: E731
        out = shardings, layout.replicated
    step = jax.jit(run, donate_argnums=(0,) if update else (), out_shardings=out)

    def place() -> Any:
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, layout.batch, lambda index: leaf[index]), batch
        )

    return Traced(
        held=plan.model_dump_json(include={"stages"}),
        fresh=lambda: jax.jit(fresh, out_shardings=shardings).lower(jax.eval_shape(lambda: key)),
        step=lambda: step.lower(state, rows),
        rows=place,
        updates=update,
    )


def ready(hosts: Hosts[Any], programs: Mapping[str, Traced]) -> dict[str, Call]:
    """Compiled steps.  Those whose states lie alike train one state together."""
    holders = {one.held: one for one in programs.values()}
    fresh = {f"fresh {held}": one.fresh for held, one in holders.items()}
    compiled = hosts.compiled({name: one.step for name, one in programs.items()} | fresh)
    states = {held: _Held(state=compiled[f"fresh {held}"](jax.random.key(0))) for held in holders}
    return {name: _running(compiled[name], states[one.held], one.rows(), one.updates) for name, one in programs.items()}


def on_one_host(hosts: Hosts[Any], subject: Subject, plans: Mapping[str, Plan]) -> dict[str, Call]:
    """Compiled steps of plans of one device, which train one state on host 0; the others do nothing meanwhile."""
    if not plans or hosts.rank > 0:
        return dict.fromkeys(plans, lambda: None)
    programs = {name: traced(subject, plan, jax.local_devices()[:1]) for name, plan in plans.items()}
    state = next(iter(programs.values())).fresh().compile()
    held = _Held(state=state(jax.random.key(0)))
    return {name: _running(one.step().compile(), held, one.rows(), one.updates) for name, one in programs.items()}


@dataclass
class _Held:
    """The state of several programs."""

    state: Any


def _running(program: Any, held: _Held, rows: Any, updates: bool) -> Call:
    def run() -> Any:
        if not updates:
            return program(held.state, rows)
        held.state, metrics = program(held.state, rows)
        return metrics

    return run
