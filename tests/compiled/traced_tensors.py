"""The named tensors of a layer, read off its program: bytes, FLOP, what each is computed from, what backward reads.

The layer is traced with what its backward pass would find if everything were kept: the program computes the layer, and
its results are what autodiff keeps.  Equations are walked back from every `name` to the names before it; what lies
between is computed again with the name behind it.  So of any graph, branches and all, remain its names:

    inputs   the names that are reached
    flops    of the matrix products on the way (2 m n k); of a product on the way to two names, with each
    read     whether a result is the tensor, or is made of it without another name between

Left out: FLOP that are not of products.  Functions that are called inside are walked through where they are plain
(`jit`); those with derivatives of their own count with their products, whole.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal

from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.profile import NamedTensor

PLAIN = ("jit", "pjit", "closed_call", "core_call")
"""Calls whose equations stand for themselves."""


@dataclass
class _Graph:
    """made: by variable, (FLOP of the equation that computes it, its inputs).  names: by variable, its name."""

    made: dict[Any, tuple[float, tuple[Any, ...]]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)


def traced_tensors(
    layer: Callable[[Any, Any, Any], Any], params: Any, x: Any, keys: Any, *, sharded: Sequence[str] = ()
) -> tuple[NamedTensor, ...]:
    """Of a layer (parameters, x[b, ...], keys) -> y, per sample, in the order in which they are computed.

    Args:
      sharded: names of those that the tensor axis divides.
    """

    def saved(params: Any, x: Any) -> Any:
        return jax.vjp(lambda params, x: layer(params, x, keys), params, x)[1]

    program = jax.make_jaxpr(saved)(params, x).jaxpr
    graph, alias = _Graph(), dict[Any, Any]()
    _collect(program, graph, alias)
    samples = jax.tree.leaves(x)[0].shape[0]
    read = set().union(*(_names_before(graph, _of(var, alias))[0] for var in program.outvars))
    tensors = []
    for var, name in graph.names.items():
        above, flops = _behind(graph, var)
        tensors.append(
            NamedTensor(
                name=name,
                bytes=math.prod(var.aval.shape) * var.aval.dtype.itemsize / samples,
                flops=0.0 if name == BLOCK_INPUT else flops / samples,
                sharded=name in sharded,
                inputs=tuple(one for one in graph.names.values() if one in above),
                read=name in read,
            )
        )
    return tuple(tensors)


def _collect(program: Any, graph: _Graph, alias: dict[Any, Any]) -> None:
    for equation in program.eqns:
        inputs = tuple(_of(var, alias) for var in equation.invars if not isinstance(var, Literal))
        inner = next(_programs(equation), None)
        if equation.primitive.name in PLAIN and inner is not None:
            alias.update(
                {
                    var: _of(given, alias)
                    for var, given in zip(inner.invars, equation.invars, strict=True)
                    if not isinstance(given, Literal)
                }
            )
            _collect(inner, graph, alias)
            outer = zip(equation.outvars, inner.outvars, strict=True)
            alias.update({var: _of(inner_var, alias) for var, inner_var in outer if not isinstance(inner_var, Literal)})
            continue
        for var in equation.outvars:
            graph.made[var] = (_flops(equation), inputs)
            if equation.primitive.name == "name":
                graph.names[var] = equation.params["name"]


def _of(var: Any, alias: dict[Any, Any]) -> Any:
    """The variable that computes it, in the function that is called or the one that calls."""
    if isinstance(var, Literal):
        return None
    while var in alias:
        var = alias[var]
    return var


def _behind(graph: _Graph, var: Any) -> tuple[set[str], float]:
    """(names that a variable is computed from, FLOP since then)."""
    flops, inputs = graph.made[var]
    names, more = _names_before(graph, *inputs)
    return names, flops + more


def _names_before(graph: _Graph, *start: Any) -> tuple[set[str], float]:
    """The nearest names, and FLOP on the way from them, each equation once."""
    names, flops, seen, waiting = set[str](), 0.0, set[Any](), list(start)
    while waiting:
        var = waiting.pop()
        if var in graph.names:
            names.add(graph.names[var])
        elif var not in seen and var in graph.made:
            seen.add(var)
            own_flops, inputs = graph.made[var]
            flops += own_flops
            waiting.extend(inputs)
    return names, flops


def _flops(equation: Any) -> float:
    """Of matrix products, in functions that are called, too."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * depth
    return sum(_flops(one) for inner in _programs(equation) for one in inner.eqns)


def _programs(equation: Any) -> Iterator[Any]:
    """What an equation calls."""
    for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
