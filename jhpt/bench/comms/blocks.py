"""GPT blocks, cut over the hosts by tensor parallelism: their value and gradients, with one lane or several.

XLA's CPU backend runs the collectives of a program in line, so within one device nothing overlaps.  A host has several
virtual devices, lanes, with a chunk of the samples each: the mesh is `lane x tensor`, and lane q's tensor group is device q
of every host.  While one lane waits for the network another computes, under the quota of the same host.  Serial variants
run on device 0 of every host, with all samples.

Gradients of weights are left apart by lane: adding them up stays inside a host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jhpt.bench.comms.task import Task, Variant
from jhpt.core.axes import TENSOR
from jhpt.core.config import ModelConfig
from jhpt.core.load import load_config
from jhpt.measure.layers import alone, shard_of
from jhpt.models.build import build
from jhpt.models.hooks import Hooks
from jhpt.models.layers import INIT_STD
from jhpt.sharding.mesh import Axes
from jhpt.sharding.rules import parameter_spec, path_name
from jhpt.training.parts import compressed_hooks, tensor_hooks

LANE = "lane"
"""Mesh axis of a host's lanes."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a task over so many hosts."""

    task: Task
    hosts: int

    @cached_property
    def config(self) -> ModelConfig:
        """Of the model they belong to."""
        task = self.task
        shape = {
            "family": "gpt",
            "d_model": task.width,
            "num_heads": task.heads,
            "num_layers": task.layers,
            "max_length": task.length,
            "dropout": 0.0,
        }
        return load_config({"name": "comms", "model": shape, "data": {"sequence_length": task.length}}).model

    def hooks(self, variant: Variant, axes: tuple[str, ...]) -> Hooks:
        """One rank's view; no axes: a rank alone, which computes what it would and sends nothing."""
        if variant.how is None:
            return tensor_hooks(axes, self.hosts) if axes else alone(self.hosts)
        return compressed_hooks(axes, self.hosts, variant.how, causal=True)

    def layers(self, hooks: Hooks, count: int) -> Callable[[Any, jax.Array], jax.Array]:
        """(parameters of every layer, x) -> y of so many layers."""
        model = build(self.config, hooks=hooks)

        def run(params: Any, x: jax.Array) -> jax.Array:
            for layer in range(count):
                x = model.block(params[layer], x)
            return x

        return run

    def shapes(self, count: int) -> Any:
        """Of the whole parameters of so many layers."""
        blocks = jax.eval_shape(build(self.config).init, jax.random.key(0))["blocks"]
        return [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks)] * count

    def x_shape(self, lanes: int) -> tuple[int, int, int]:
        """Of a lane's input."""
        return self.task.batch // lanes, self.task.length, self.task.width

    def mesh(self, devices: Sequence[jax.Device], lanes: int) -> Mesh:
        """`lane x tensor`."""
        return Mesh(lanes_of(devices, self.hosts)[:lanes], (LANE, TENSOR), axis_types=(AxisType.Auto,) * 2)

    def step(self, variant: Variant, mesh: Mesh) -> tuple[Callable[[], jax.stages.Lowered], Callable[[], Any]]:
        """(the program of loss and gradients, its arguments)."""
        run = self.layers(self.hooks(variant, (TENSOR,)), self.task.layers)

        def local(params: Any, x: jax.Array, error: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(lambda *at: jnp.vdot(run(*at), error), (0, 1))(params, x)
            return jax.tree.map(lambda leaf: leaf[None], (value, gradients[0])), gradients[1]

        shapes = self.shapes(self.task.layers)
        specs, rows = _specs(shapes, self.hosts), PartitionSpec(LANE)
        apart = jax.tree.map(lambda spec: PartitionSpec(LANE, *spec), specs, is_leaf=_is_spec)
        program = jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=(specs, rows, rows), out_specs=((rows, apart), rows), check_vma=False
            )
        )
        x = jax.ShapeDtypeStruct((self.task.batch, self.task.length, self.task.width), jnp.float32)

        def arguments() -> Any:
            params = jax.tree.map(lambda leaf, spec: _placed(leaf, mesh, spec), shapes, specs)
            return params, *(_placed(x, mesh, rows, seed) for seed in (1, 2))

        def lowered() -> jax.stages.Lowered:
            given = jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
                (shapes, x, x),
                (specs, rows, rows),
            )
            return program.lower(*given)

        return lowered, arguments

    def work(self, variant: Variant) -> dict[str, Callable[[], Any]]:
        """A layer of one lane's samples without communication, compiled: `{"forward": call, "both": call}`."""
        run, shapes = self.layers(self.hooks(variant, ()), 1), self.shapes(1)
        params = shard_of({"layers": shapes}, self.hosts)["layers"]
        x, error = (jnp.asarray(_numbers(self.x_shape(variant.lanes), np.random.default_rng(seed))) for seed in (1, 2))

        def both(params: Any, x: jax.Array, error: jax.Array) -> Any:
            y, pull = jax.vjp(run, params, x)
            return y, pull(error)

        forward_program = jax.jit(run).lower(params, x).compile()
        both_program = jax.jit(both).lower(params, x, error).compile()
        return {"forward": lambda: forward_program(params, x), "both": lambda: both_program(params, x, error)}


def lanes_of(devices: Sequence[jax.Device], hosts: int) -> np.ndarray:
    """Devices [lane, host]."""
    by_host = [[device for device in devices if device.process_index == host] for host in range(hosts)]
    return np.array(by_host).T


def _specs(shapes: Any, hosts: int) -> Any:
    axes = Axes(data=(), tensor=(TENSOR,), degree=hosts)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: parameter_spec(path_name(path), leaf.shape, axes, stacked=False, pipe=False, over_data=1),
        shapes,
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _numbers(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh, spec: PartitionSpec, seed: int = 0) -> jax.Array:
    """Random numbers, small in weights (no seed), and ones in vectors; every host keeps its own part of them."""
    whole = (
        np.ones(leaf.shape, np.float32) if len(leaf.shape) == 1 else _numbers(leaf.shape, np.random.default_rng(seed))
    )
    whole = whole if seed or whole.ndim == 1 else INIT_STD * whole
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda at: whole[at])
