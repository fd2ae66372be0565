"""A layer as two functions: forward, which also returns the saved activations, and backward, which takes them.

`jax.vjp` hides what it saves in a closure that also holds the layer's parameters.  A schedule that stores the saved
activations of many micro-batches must not store the parameters with each.  So the closure is opened: each of its leaves
is a parameter, or part of the context (a key, for example), or can be recomputed without input and context (masks of
positions, for example), or is a saved activation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from jhpt.sharding.types import Activation, LayerContext, Params, Tree

LayerFunction = Callable[[Any, Any, Any], Any]
"""(parameters, x, (context, layer)) -> y; all of them may be trees."""

Saved = tuple[jax.Array, ...]
"""Saved activations: of one layer and micro-batch, or stacked."""

SavedOfLayers = list[Saved] | Saved
"""Saved activations of several layers: by layer, or stacked."""


@dataclass(frozen=True)
class SplitLayer:
    """`function`, split for inputs of certain shapes.

    sources: for every leaf of the closure `("parameter" | "context" | "saved" | "recomputed", index)`.
    """

    function: LayerFunction
    sources: tuple[tuple[str, int], ...]
    shapes: tuple[Any, ...]
    """Of the saved activations: types of arrays, which say in which memory these lie."""
    closure: Any
    """The tree structure of the closure."""
    x: Any
    """Shapes of x."""

    def forward(self, params: Tree | tuple[()], x: Activation, at: LayerContext) -> tuple[Any, Saved]:
        """(y, saved activations)."""
        y, pull = jax.vjp(lambda params, x: self.function(params, x, at), params, x)
        saved = {
            index: leaf
            for (source, index), leaf in zip(self.sources, jax.tree.leaves(pull), strict=True)
            if source == "saved"
        }
        return y, tuple(saved[index] for index in range(len(saved)))

    def backward(self, params: Tree | tuple[()], at: LayerContext, saved: Saved, error: Activation) -> tuple[Any, Any]:
        """(gradient of the parameters, gradient of x)."""
        have = {"parameter": jax.tree.leaves(params), "context": jax.tree.leaves(at), "saved": saved}
        if any(source == "recomputed" for source, _ in self.sources):
            # Only what depends neither on x nor on the context is used of this forward pass; the compiler removes the
            # rest.
            x = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), self.x)
            pull = jax.vjp(lambda params, x: self.function(params, x, at), params, x)[1]
            have["recomputed"] = jax.tree.leaves(pull)
        leaves = [have[source][index] for source, index in self.sources]
        gradient, down = jax.tree.unflatten(self.closure, leaves)(error)
        return gradient, down


def split_layer(function: LayerFunction, params: Tree | tuple[()], x: Activation, at: LayerContext) -> SplitLayer:
    """Traces the layer once, for arguments of these shapes, to learn what its closure holds."""

    def closed(params: Params, x: Activation, at: LayerContext) -> Any:
        return jax.vjp(lambda params, x: function(params, x, at), params, x)[1]

    traced, shape = jax.make_jaxpr(closed, return_shape=True)(params, x, at)
    jaxpr = traced.jaxpr
    count, first_of_context = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, x)))
    inputs: dict[Any, tuple[str, int]] = {}
    for index, var in enumerate(jaxpr.invars):
        if index < count:
            inputs[var] = ("parameter", index)
        elif index >= first_of_context:
            inputs[var] = ("context", index - first_of_context)
    dependent = _reached(jaxpr, jaxpr.invars[count:])
    sources, shapes, slots = [], [], dict[Any, int]()
    for index, var in enumerate(jaxpr.outvars):
        if not isinstance(var, Literal) and var in inputs:
            sources.append(inputs[var])
        elif isinstance(var, Literal) or var not in dependent:
            sources.append(("recomputed", index))
        else:
            if var not in slots:
                slots[var] = len(slots)
                shapes.append(var.aval)
            sources.append(("saved", slots[var]))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return SplitLayer(function, tuple(sources), tuple(shapes), jax.tree.structure(shape), like)


def _reached(jaxpr: Jaxpr, start: Sequence[Var]) -> set[Var]:
    """The variables that depend on any of `start`."""
    reached = set(start)
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in reached for var in equation.invars):
            reached.update(equation.outvars)
    return reached
