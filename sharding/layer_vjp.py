"""A layer as two functions: forward, which says what it keeps, and backward, which takes that.

`jax.vjp` hides what it keeps in a closure that also holds the layer's parameters.  A schedule that stores what is kept
of many micro-batches must not store the parameters with each, so the closure is opened: every leaf of it is a
parameter, or a key, or can be had again without input and keys (masks of positions, say), or is truly kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

LayerFunction = Callable[[Any, Any, Any], Any]
"""(parameters, x, keys) -> y; all of them may be trees."""

Saved = tuple[jax.Array, ...]


@dataclass(frozen=True)
class SplitLayer:
    """`function`, split for inputs of certain shapes.

    sources: for every leaf of the closure `("parameter" | "key" | "saved" | "again", index)`.
    """

    function: LayerFunction
    sources: tuple[tuple[str, int], ...]
    shapes: tuple[Any, ...]
    """Of what is kept: types of arrays, which say where these lie."""
    closure: Any
    """Tree of the closure."""
    x: Any
    """Shapes of x."""

    def forward(self, params: Any, x: Any, keys: Any) -> tuple[Any, Saved]:
        """(y, kept)."""
        y, pull = jax.vjp(lambda params, x: self.function(params, x, keys), params, x)
        saved = {
            index: leaf
            for (source, index), leaf in zip(self.sources, jax.tree.leaves(pull), strict=True)
            if source == "saved"
        }
        return y, tuple(saved[index] for index in range(len(saved)))

    def backward(self, params: Any, keys: Any, saved: Saved, error: Any) -> tuple[Any, Any]:
        """(gradient of the parameters, gradient of x)."""
        have = {"parameter": jax.tree.leaves(params), "key": jax.tree.leaves(keys), "saved": saved}
        if any(source == "again" for source, _ in self.sources):
            # Only what depends neither on x nor on keys is used of this forward pass; the compiler removes the rest.
            x = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), self.x)
            again = jax.vjp(lambda params, x: self.function(params, x, keys), params, x)[1]
            have["again"] = jax.tree.leaves(again)
        leaves = [have[source][index] for source, index in self.sources]
        gradient, down = jax.tree.unflatten(self.closure, leaves)(error)
        return gradient, down


def split_layer(function: LayerFunction, params: Any, x: Any, keys: Any) -> SplitLayer:
    """Traces the layer once, for arguments of these shapes, to see what its closure holds."""

    def closed(params: Any, x: Any, keys: Any) -> Any:
        return jax.vjp(lambda params, x: function(params, x, keys), params, x)[1]

    traced, shape = jax.make_jaxpr(closed, return_shape=True)(params, x, keys)
    jaxpr = traced.jaxpr
    count, first_key = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, x)))
    given: dict[Any, tuple[str, int]] = {}
    for index, var in enumerate(jaxpr.invars):
        if index < count:
            given[var] = ("parameter", index)
        elif index >= first_key:
            given[var] = ("key", index - first_key)
    moving = _reached(jaxpr, jaxpr.invars[count:])
    sources, shapes, slots = [], [], dict[Any, int]()
    for index, var in enumerate(jaxpr.outvars):
        if not isinstance(var, Literal) and var in given:
            sources.append(given[var])
        elif isinstance(var, Literal) or var not in moving:
            sources.append(("again", index))
        else:
            if var not in slots:
                slots[var] = len(slots)
                shapes.append(var.aval)
            sources.append(("saved", slots[var]))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return SplitLayer(function, tuple(sources), tuple(shapes), jax.tree.structure(shape), like)


def _reached(jaxpr: Any, start: Any) -> set[Any]:
    """The variables that depend on any of `start`."""
    reached = set(start)
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in reached for var in equation.invars):
            reached.update(equation.outvars)
    return reached
