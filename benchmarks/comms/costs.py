"""The predicted seconds of a step, from parts of it that are measured on the hosts.

    work     a layer of a lane's samples, forward and backward, while all hosts compute and nothing is sent; quantizing
             and decoding included
    travel   one all-reduce of a lane's samples, on links of the rate, while nothing is computed

A variant's step is `two_streams.layers_seconds` of these: work and all-reduces in line for one lane, as XLA's CPU
backend runs the chunks of one device too, and two streams for several lanes.  A lane waits for its all-reduce before
anything that follows, gradients of weights too.  Sending also takes processor time (`busy`, counted while nothing is
computed), which is added to the work that it overlaps with.  Choosing important tokens sends nothing, because all ranks
see them (`Compression.importance`, own in a causal model).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.comms.task import Shape, Task, Variant
from benchmarks.comms.two_streams import layers_seconds
from jhpt.core.compression import gathers, wire_bytes

REPEATS = 4
"""All-reduces in a program that times them, one after the other."""


def sum_bytes(shape: Shape, hosts: int, variant: Variant) -> float:
    """Bytes that a rank sends for one all-reduce of a piece of the samples."""
    batch = shape.batch // variant.pieces
    if variant.compression is None:
        width = jnp.dtype(variant.dtype).itemsize
        return 2 * (hosts - 1) / hosts * width * batch * shape.length * shape.width
    return wire_bytes(hosts, variant.compression, batch, shape.length, shape.width)


def step_bytes(shape: Shape, hosts: int, variant: Variant) -> float:
    """Bytes that a host sends in a step: four all-reduces a layer."""
    return variant.pieces * shape.layers * 4 * sum_bytes(shape, hosts, variant)


def travel_key(variant: Variant) -> str:
    """A key of the all-reduces: variants with the same key send the same bytes in each."""
    return f"{variant.sums} / {variant.pieces}"


def travel(shape: Shape, hosts: int, variant: Variant, mesh: Mesh) -> tuple[Any, Any]:
    """The program of `REPEATS` all-reduces of a piece of the samples, and its arguments."""
    if variant.compression is None:
        numbers = shape.batch // variant.pieces * shape.length * shape.width
        return bare_sum(numbers, mesh, jnp.dtype(variant.dtype))
    exchange = gathering if gathers(hosts, variant.compression) else two_steps
    return exchange(sum_bytes(shape, hosts, variant), mesh)


def bare_sum(numbers: int, mesh: Mesh, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """XLA's all-reduce of `numbers` numbers, `REPEATS` times: a program and its arguments."""
    (axis,) = mesh.axis_names
    return _chained(lambda x: jax.lax.psum(x, axis), (numbers,), dtype, mesh)


def two_steps(sent: float, mesh: Mesh) -> tuple[Any, Any]:
    """All-to-all and all-gather in which a rank sends `sent` bytes, `REPEATS` times."""
    (axis,) = mesh.axis_names

    def once(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.all_to_all(x, axis, 0, 0, tiled=True)[0], axis)

    return _chained(once, (mesh.size, int(sent) // (2 * (mesh.size - 1)) // 2), jnp.uint16, mesh)


def gathering(sent: float, mesh: Mesh) -> tuple[Any, Any]:
    """All-gather in which a rank sends `sent` bytes, `REPEATS` times."""
    (axis,) = mesh.axis_names
    words = int(sent) // (mesh.size - 1) // 2
    return _chained(lambda x: jax.lax.all_gather(x[0], axis), (mesh.size, words), jnp.uint16, mesh)


def _chained(once: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> tuple[Any, Any]:
    """A program that calls `once` `REPEATS` times on an array of every rank, and that array."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(REPEATS):
            x = once(x)
        return x

    spec = PartitionSpec(mesh.axis_names)
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    whole, place = (mesh.size * shape[0], *shape[1:]), NamedSharding(mesh, spec)
    shapes = jax.ShapeDtypeStruct(whole, dtype, sharding=place)
    zeros = np.zeros(shape, dtype)
    return (lambda: program.lower(shapes)), (lambda: (jax.make_array_from_callback(whole, place, lambda _: zeros),))


def predicted(task: Task, variant: Variant, work: dict[str, float], sum_: dict[str, float]) -> float:
    """Seconds of a step.

    Args:
      work: seconds of a lane's layer, forward and both passes.  sum_: seconds of one all-reduce, and those in which the
        processor is busy.
    """
    beside = variant.lanes > 1
    busy = 2 * sum_["busy"] / task.cpu if beside else 0.0
    return layers_seconds(
        layers=task.blocks.layers,
        forward=work["forward"] + busy,
        backward=work["both"] - work["forward"] + busy,
        travel=sum_["seconds"],
        chunks=variant.pieces,
        overlap=beside,
    )


def sent_bytes() -> int:
    """Bytes that this host has sent over its link so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    return 0


def relative(measured: float, expected: float) -> float:
    """|measured - expected| / expected."""
    return math.fabs(measured - expected) / expected
