"""GPT blocks, cut over the hosts by tensor parallelism: their value and gradients, with one lane or several.

XLA's CPU backend runs the collectives of a program in line, so nothing overlaps on one device.  Therefore a host has
several virtual devices, called lanes, and each works on a chunk of the samples: the tensor group of lane q is device q
of every host.  While one lane waits for the network, another computes, under the quota of the same host.  A lane starts
when the one before it has computed its first half block, as chunks on one device do, because lanes that started at the
same time would also wait at the same time.  After that, nothing keeps them in step.  Serial variants run on device 0,
with all samples.

Gradients of weights are not added up over the lanes, since that would not leave the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.comms.task import Shape, Variant
from benchmarks.hybrid.layer_times import alone, shard_of
from jhpt.core.axes import TENSOR
from jhpt.core.families.family import ModelConfig
from jhpt.core.load import load_config
from jhpt.models.context import Context
from jhpt.models.family import build
from jhpt.models.hooks import Hooks
from jhpt.models.layers import INIT_STD, Parted
from jhpt.sharding.mesh import Axes
from jhpt.sharding.model_parts import Halves
from jhpt.sharding.operators import Operators
from jhpt.sharding.partition import parameter_spec, path_name
from jhpt.sharding.sample_chunks import ChunkedSamples, UnchunkedSamples
from jhpt.training.parts import compressed_hooks, tensor_hooks


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of a shape over several hosts."""

    shape: Shape
    hosts: int

    @cached_property
    def config(self) -> ModelConfig:
        """The settings of their model."""
        shape = self.shape
        model = {
            "family": "gpt",
            "d_model": shape.width,
            "num_heads": shape.heads,
            "num_layers": shape.layers,
            "max_length": shape.length,
            "dropout": 0.0,
        }
        return load_config({"name": "comms", "model": model, "data": {"sequence_length": shape.length}}).model

    def hooks(self, variant: Variant, axes: tuple[str, ...]) -> Hooks:
        """The hooks of one rank; without axes the rank computes the same alone and sends nothing."""
        if variant.compression is None:
            plain = tensor_hooks(axes, self.hosts) if axes else alone(self.hosts)
            return plain if variant.dtype == "float32" or not axes else replace(plain, **_rounded(axes, variant.dtype))
        return compressed_hooks(axes, self.hosts, variant.compression, causal=True)

    def layers(self, hooks: Hooks, count: int, sample_chunks: int = 1) -> Callable[[Any, jax.Array], jax.Array]:
        """(parameters of every layer, x) -> y after `count` layers, as the runtime cuts samples into chunks."""
        model = build(self.config, hooks=hooks)
        stream: UnchunkedSamples | ChunkedSamples = UnchunkedSamples(lambda params, x, at: model.block(params, x))
        if sample_chunks > 1:
            halves = Halves(
                first=lambda params, x, at, token: model.attend(params, x, Context(), token),
                second=lambda params, parted, at, token: model.feed(params, parted, None, token),
                finish=lambda parted, at: model.finish(_counted(parted), None),
            )
            stream = ChunkedSamples(halves=halves, chunks=sample_chunks, in_turn=True)

        def run(params: Any, x: jax.Array) -> jax.Array:
            passed: Any = stream.opened(params[0], x, (None, 0))
            for layer in range(count):
                passed = stream.layer(params[layer], passed, (None, layer))
            return stream.closed(passed, (None, count))

        return run

    def shapes(self, count: int) -> Any:
        """Shapes of the whole parameters of `count` layers."""
        blocks = jax.eval_shape(build(self.config).init, jax.random.key(0))["blocks"]
        return [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks)] * count

    def x_shape(self, pieces: int) -> tuple[int, int, int]:
        """The shape of a piece of the input."""
        return self.shape.batch // pieces, self.shape.length, self.shape.width

    def step(self, variant: Variant, lane: Mesh) -> tuple[Callable[[], jax.stages.Lowered], Callable[[], Any]]:
        """(the program of a lane's loss and gradients, its arguments)."""
        run = self.layers(self.hooks(variant, (TENSOR,)), self.shape.layers, variant.sample_chunks)

        def local(params: Any, x: jax.Array, error: jax.Array) -> Any:
            return jax.value_and_grad(lambda *at: jnp.vdot(run(*at), error), (0, 1))(params, x)

        shapes, x = self.shapes(self.shape.layers), jax.ShapeDtypeStruct(self.x_shape(variant.lanes), jnp.float32)
        specs, whole = _specs(shapes, self.hosts), PartitionSpec()
        program = jax.jit(
            jax.shard_map(
                local,
                mesh=lane,
                in_specs=(specs, whole, whole),
                out_specs=(whole, (specs, whole)),
                check_vma=False,
            )
        )

        def lowered() -> jax.stages.Lowered:
            arguments = jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(lane, spec)),
                (shapes, x, x),
                (specs, whole, whole),
            )
            return program.lower(*arguments)

        def arguments() -> Any:
            params = jax.tree.map(lambda leaf, spec: placed(leaf, lane, spec), shapes, specs)
            return params, *(placed(x, lane, whole, seed) for seed in (1, 2))

        return lowered, arguments

    def work(self, variant: Variant) -> dict[str, Callable[[], Any]]:
        """A layer of a piece of the samples without communication, compiled: `{"forward": call, "both": call}`."""
        run, shapes = self.layers(self.hooks(variant, ()), 1), self.shapes(1)
        params = shard_of({"layers": shapes}, self.hosts)["layers"]
        x, error = (jnp.asarray(_numbers(self.x_shape(variant.pieces), np.random.default_rng(seed))) for seed in (1, 2))

        def both(params: Any, x: jax.Array, error: jax.Array) -> Any:
            y, pull = jax.vjp(run, params, x)
            return y, pull(error)

        forward_program = jax.jit(run).lower(params, x).compile()
        both_program = jax.jit(both).lower(params, x, error).compile()
        return {"forward": lambda: forward_program(params, x), "both": lambda: both_program(params, x, error)}


def meshes(devices: Sequence[jax.Device], hosts: int) -> list[Mesh]:
    """A mesh for every lane: the tensor axis over one device of every host."""
    by_host = [[device for device in devices if device.process_index == host] for host in range(hosts)]
    return [Mesh(np.array(lane), (TENSOR,), axis_types=(AxisType.Auto,)) for lane in zip(*by_host, strict=True)]


def _counted(parted: Parted) -> Parted:
    """Positions of tokens as integers: chunks carry numbers of one type from layer to layer."""
    return parted if parted.tokens is None else parted._replace(tokens=parted.tokens.astype(jnp.int32))


def _rounded(axes: tuple[str, ...], dtype: str) -> Operators:
    """Megatron's f and g whose all-reduces, forward and backward, are of numbers of this dtype: XLA reduces float16 as
    such, in a ring, which fills 90 % of a link and more; bfloat16 it would widen."""

    @jax.custom_vjp
    def copy(x: jax.Array) -> jax.Array:
        return x

    @jax.custom_vjp
    def total(part: jax.Array) -> jax.Array:
        return summed(part)

    def summed(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part.astype(dtype), axes).astype(part.dtype)

    copy.defvjp(lambda x: (x, None), lambda _, error: (summed(error),))
    total.defvjp(lambda part: (summed(part), None), lambda _, error: (error,))
    return {
        "copy_to_tensor_axis": lambda x, tokens=None: copy(x),
        "copy_before_choice": lambda x: (copy(x), lambda y, tokens=None: y),
        "reduce_over_tensor_axis": lambda part, tokens=None: total(part),
    }


def _specs(shapes: Any, hosts: int) -> Any:
    axes = Axes(data=(), tensor=(TENSOR,), degree=hosts)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: parameter_spec(path_name(path), leaf.shape, axes, stacked=False, pipe=False, over_data=1),
        shapes,
    )


def _numbers(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh, spec: PartitionSpec, seed: int = 0) -> jax.Array:
    """Random numbers, small in weights (no seed), and ones in vectors; every host has its part of them."""
    vector = len(leaf.shape) == 1
    whole = np.ones(leaf.shape, np.float32) if vector else _numbers(leaf.shape, np.random.default_rng(seed))
    whole = whole if seed or vector else INIT_STD * whole
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda at: whole[at])
