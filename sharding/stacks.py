"""Saved activations of layers, in stacks with a row for each layer: on the device, or offloaded to the host.

A layer loop's stack on a GPU begins as memory that nothing fills (`unwritten`): filling those of gpt2-124m took 4 % of
a step on an H200.  Other stacks begin filled with a number (`filled`).

A stack on the host begins as a number in host memory that is broadcast: XLA then allocates host memory only.  If the
stack were filled on the device and moved, XLA would also hold it there.  Rows are written by dynamic_update_slice,
which XLA turns into a copy that runs beside computation; a scatter would run on the host.  (Seen in programs for an
H100, jax 0.10.2.)
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jhpt.sharding.types import PyTree

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host

Index = int | jax.Array

T = TypeVar("T")


def filled(shapes: PyTree, leading: tuple[int, ...], value: jax.Array) -> Any:
    """Stacks [*leading, ...] for rows of these shapes, in the memory of the rows, to be written before they are read.

    value: what they hold until then.
    """

    def one(shape: jax.ShapeDtypeStruct) -> jax.Array:
        whole, filling = (*leading, *shape.shape), value.astype(shape.dtype)
        if space(shape) == HOST:
            return jax.lax.broadcast(jax.device_put(filling, HOST), whole)
        return jnp.full(whole, filling)

    return jax.tree.map(one, shapes)


def unwritten(shapes: PyTree, leading: tuple[int, ...], start: jax.Array) -> Any:
    """Stacks [*leading, ...] for rows of these shapes, in the memory of the rows, all of which are written before they
    are read.

    start: a number before whose computation they are not allocated.  The compiler would otherwise keep one stack for
    all micro-batches throughout, and copy it.
    """

    def one(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if space(shape) == HOST:
            return filled(shape, leading, start)

        def allocated(start: jax.Array) -> jax.Array:
            stack, _ = jax.lax.optimization_barrier((jax.lax.empty((*leading, *shape.shape), shape.dtype), start))
            return stack

        return jax.lax.platform_dependent(start, cuda=allocated, default=lambda start: filled(shape, leading, start))

    return jax.tree.map(one, shapes)


def write(stacked: T, at: tuple[Index, ...], rows: PyTree) -> T:
    """The stacks with these rows at [*at]; both are in the same memory."""

    def one(stack: jax.Array, row: jax.Array) -> jax.Array:
        rest = stack.ndim - len(at)
        update = jax.lax.expand_dims(row.astype(stack.dtype), range(len(at)))
        return jax.lax.dynamic_update_slice(stack, update, _start(at, rest))

    stacks: T = jax.tree.map(one, stacked, rows)
    return stacks


def read(stacked: PyTree, at: tuple[Index, ...]) -> Any:
    """The rows at [*at], in the memory of the stacks."""

    def one(stack: jax.Array) -> jax.Array:
        rest = stack.shape[len(at) :]
        row = jax.lax.dynamic_slice(stack, _start(at, len(rest)), (*(1 for _ in at), *rest))
        return jax.lax.reshape(row, rest)

    return jax.tree.map(one, stacked)


def _start(at: tuple[Index, ...], rest: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(index, jnp.int32) for index in (*at, *(0 for _ in range(rest))))


def space(shape: jax.ShapeDtypeStruct) -> Any:
    """The memory in which an array of this shape lies."""
    return getattr(shape, "memory_space", DEVICE)
