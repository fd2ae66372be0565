"""A layer's program: compiled once by one host for all, called as often as it is timed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.emulated.timing import Call


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """A program of a layer.  lower: to be compiled.  call: from the compiled program and the calls before it."""

    lower: Callable[[], jax.stages.Lowered]
    call: Callable[[Any, Mapping[str, Call]], Call]


def calls_of(programs: Mapping[str, LayerProgram], compiled: Mapping[str, Any]) -> dict[str, Call]:
    """Calls of the programs, in their order."""
    calls: dict[str, Call] = {}
    for name, one in programs.items():
        calls[name] = one.call(compiled[name], calls)
    return calls


@dataclass(frozen=True, kw_only=True)
class Result:
    """An argument that an earlier call returns."""

    shapes: Any
    of: Callable[[Mapping[str, Call]], Any]


def program_of(place: NamedSharding, function: Callable[..., Any], args: tuple[Any, ...]) -> LayerProgram:
    """`function(*args)`."""

    def call(program: Any, _: Mapping[str, Call]) -> Call:
        placed = _placed(args, place)
        return lambda: program(*placed)

    return LayerProgram(lower=lambda: jax.jit(function, out_shardings=place).lower(*_described(args, place)), call=call)


def accumulating(
    place: NamedSharding, function: Callable[..., Any], like: Any, args: tuple[Any, ...], before: Result | None = None
) -> LayerProgram:
    """`function(total, *args)`, whose first result is the next total, a tree like `like`.

    before: an argument between `total` and `args`.
    """

    def lower() -> jax.stages.Lowered:
        first = (like,) if before is None else (like, before.shapes)
        described = _described((*first, *args), place)
        return jax.jit(function, donate_argnums=0, out_shardings=place).lower(*described)

    def call(program: Any, calls: Mapping[str, Call]) -> Call:
        total = _placed(jax.tree.map(jnp.zeros_like, like), place)
        given = (() if before is None else (before.of(calls),)) + _placed(args, place)

        def run() -> Any:
            nonlocal total
            total, *others = program(total, *given)
            return total, others

        return run

    return LayerProgram(lower=lower, call=call)


def _described(tree: Any, place: NamedSharding) -> Any:
    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(described, tree)


def _placed(tree: Any, place: NamedSharding) -> Any:
    """Arrays of this host as its part of what all hosts have."""

    def placed(leaf: Any) -> jax.Array:
        return jax.make_array_from_single_device_arrays(leaf.shape, place, [jnp.asarray(leaf)])

    return jax.tree.map(placed, tree)


def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Normally distributed numbers of this shape."""
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape.shape), shape.dtype)
