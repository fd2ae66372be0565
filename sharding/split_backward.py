"""The backward pass of a layer in two: the gradient of its input first, that of its parameters at any time later.

Only the first is waited for by the stage before (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
With y = x w and the error e = dL/dy

    backward pass    dL/dx = e w^T       reads the saved activations, and leaves e for the other
    weight pass      dL/dw = x^T e

The backward pass of autodiff is traced once, and its equations are dealt out.  What the gradient of x depends on is
computed at once.  Of the rest the weight pass gets the matrix products and what follows them; anything else, such as
the sum that is the gradient of a norm's scale, only where no more has to be stored for it in between.  What is stored
are the saved activations.  Those that the weight pass does not read make room for what the backward pass leaves: they
have the sizes of their gradients, or these can be cut into pieces that have them, as that of queries, keys and values.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jhpt.sharding.layer_vjp import Saved, SplitLayer
from jhpt.sharding.types import Activation, LayerContext, Tree

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""The primitives that are worth putting off."""

CALLS = ("jit", "pjit", "closed_call")
"""The primitives that only call a function."""


class Left(NamedTuple):
    """An array of this shape that the backward pass leaves for the weight pass, and where it is stored.

    sizes: of the pieces into which it is cut along the axis.  places: of each piece.
    """

    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def cut(self, value: jax.Array) -> dict[int, jax.Array]:
        """The pieces by place."""
        stops = list(itertools.accumulate(self.sizes))[:-1]
        pieces = jnp.split(value, stops, self.axis) if stops else [value]
        return dict(zip(self.places, pieces, strict=True))

    def joined(self, stored: Saved) -> jax.Array:
        """The array, from the pieces as they are stored."""
        if len(self.places) == 1:
            return stored[self.places[0]].reshape(self.shape)
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        pieces = (
            stored[place].reshape((*before, size, *after)) for place, size in zip(self.places, self.sizes, strict=True)
        )
        return jnp.concatenate(list(pieces), self.axis)


@dataclass(frozen=True, kw_only=True)
class SplitBackward:
    """The two passes of a layer, as `split_backward` has dealt them out.

    stored: shapes of what a micro-batch stores of the layer: the saved activations, and after them what the backward
      pass leaves and finds no room for among them.
    down, gradient: the tree structures of the gradients of x and of the parameters.
    """

    layer: SplitLayer
    stored: tuple[Any, ...]
    left: tuple[Left, ...]
    down: Any
    gradient: Any
    now: Callable[..., Sequence[Any]]
    later: Callable[..., Sequence[Any]]

    def backward(
        self, params: Tree | tuple[()], at: LayerContext, saved: Saved, error: Activation
    ) -> tuple[Any, dict[int, jax.Array]]:
        """(gradient of x, what has to be stored for the weight pass, by its place in `stored`)."""
        values = self.now(*jax.tree.leaves((params, at, saved, error)))
        left = dict[int, jax.Array]()
        for each, value in zip(self.left, values[self.down.num_leaves :], strict=True):
            left |= {place: piece.reshape(self.stored[place].shape) for place, piece in each.cut(value).items()}
        return jax.tree.unflatten(self.down, values[: self.down.num_leaves]), left

    def weights(self, params: Tree | tuple[()], at: LayerContext, stored: Saved) -> Any:
        """The gradient of the parameters.  stored: the saved activations, and in their places what is left."""
        saved, left = stored[: len(self.layer.shapes)], [each.joined(stored) for each in self.left]
        return jax.tree.unflatten(self.gradient, self.later(*jax.tree.leaves((params, at, saved)), *left))


def split_backward(layer: SplitLayer, params: Tree | tuple[()], at: LayerContext) -> SplitBackward:
    """Traces the backward pass of a layer once, for arguments of these shapes, and deals its equations out."""
    saved = tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in layer.shapes)
    arguments = params, at, saved, jax.eval_shape(layer.forward, params, layer.x, at)[0]
    traced, (gradient, down) = jax.make_jaxpr(layer.backward, return_shape=True)(*arguments)
    flat = jax.make_jaxpr(lambda *leaves: _inlined(traced, leaves))(*jax.tree.leaves(arguments))
    jaxpr, count, known = flat.jaxpr, len(jax.tree.leaves(gradient)), len(jax.tree.leaves((params, at, saved)))
    gradients, downs = jaxpr.outvars[:count], jaxpr.outvars[count:]
    now, later = _dealt_out(jaxpr.eqns, gradients, downs)
    read = _read(later, gradients)
    known_now = [*jaxpr.invars[known:], *(var for equation in now for var in equation.outvars)]
    left = sorted((var for var in known_now if var in read), key=_bytes, reverse=True)
    unread = [var not in read for var in jaxpr.invars[known - len(saved) : known]]
    placed, stored = _placed(list(map(_shape, left)), layer.shapes, unread)

    def function(inputs: list[Var], equations: list[JaxprEqn], outputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(invars=inputs, outvars=outputs, eqns=equations), flat.consts))

    return SplitBackward(
        layer=layer,
        stored=stored,
        left=placed,
        down=jax.tree.structure(down),
        gradient=jax.tree.structure(gradient),
        now=function(jaxpr.invars, now, [*downs, *left]),
        later=function([*jaxpr.invars[:known], *left], later, gradients),
    )


def _inlined(jaxpr: ClosedJaxpr, inputs: Iterable[Any]) -> list[Any]:
    """Evaluates the equations one by one, those of called functions among them."""
    values: dict[Var, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= zip(jaxpr.jaxpr.invars, inputs, strict=True)

    def value(of: Any) -> Any:
        return of.val if isinstance(of, Literal) else values[of]

    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name in CALLS:
            called = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
            results = _inlined(called, map(value, equation.invars))
        else:
            read = list(dict.fromkeys(_variables(equation.invars)))
            alone = jaxpr.jaxpr.replace(constvars=[], invars=read, outvars=equation.outvars, eqns=[equation])
            results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*map(value, read))
        values |= zip(equation.outvars, results, strict=True)
    return list(map(value, jaxpr.jaxpr.outvars))


def _dealt_out(
    equations: Sequence[JaxprEqn], gradients: Sequence[Any], downs: Sequence[Any]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations of the backward pass and of the weight pass."""
    urgent, wanted = _reaching(equations, downs), _reaching(equations, [*gradients, *downs])
    late, made_late = set[int](), set[Var]()
    for number, equation in enumerate(equations):
        if number in wanted - urgent and (_multiplies(equation) or made_late & set(_variables(equation.invars))):
            late.add(number)
            made_late.update(equation.outvars)
    # From the last one on: what only the weight pass reads moves there where that does not add to what is stored.
    for number in sorted(wanted - urgent - late, reverse=True):
        equation, others = equations[number], [equations[other] for other in wanted - late - {number}]
        read = _read([equations[other] for other in late], gradients)
        more = {var for var in _variables(equation.invars) if var not in read}
        read_now = {var for other in others for var in _variables(other.invars)}
        if not read_now & set(equation.outvars) and sum(map(_bytes, more)) <= sum(map(_bytes, equation.outvars)):
            late.add(number)
    return [equations[number] for number in sorted(wanted - late)], [equations[number] for number in sorted(late)]


def _reaching(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> set[int]:
    """The numbers of the equations that these outputs depend on."""
    needed, numbers = set(_variables(outputs)), set[int]()
    for number, equation in reversed(list(enumerate(equations))):
        if needed & set(equation.outvars):
            numbers.add(number)
            needed.update(_variables(equation.invars))
    return numbers


def _read(equations: Iterable[JaxprEqn], outputs: Sequence[Any]) -> set[Var]:
    """The variables that these equations and outputs read and no equation of them computes."""
    equations = list(equations)
    read = {var for equation in equations for var in _variables(equation.invars)} | set(_variables(outputs))
    return read - {var for equation in equations for var in equation.outvars}


def _placed(
    left: Sequence[Any], saved: Sequence[Any], unread: Sequence[bool]
) -> tuple[tuple[Left, ...], tuple[Any, ...]]:
    """Where to store every array: in places that are not read again, else behind all; and the shapes of all places."""
    free = {place: shape for place, shape in enumerate(saved) if unread[place]}
    placed, stored = list[Left](), list(saved)
    for shape in left:
        alike = {place: at for place, at in free.items() if at.dtype == shape.dtype}
        best = min(_cuts(shape.shape, alike), key=lambda cut: len(cut.places), default=None)
        if best is None:
            best = Left(shape.shape, 0, (), (len(stored),))
            stored.append(shape)
        free = {place: at for place, at in free.items() if place not in best.places}
        placed.append(best)
    return tuple(placed), tuple(stored)


def _cuts(shape: tuple[int, ...], free: dict[int, Any]) -> Iterator[Left]:
    """Ways to store an array of this shape in free places that it fills, the largest first."""
    for axis, length in enumerate(shape):
        row, sizes, places = math.prod(shape) // length, list[int](), list[int]()
        for place in sorted(free, key=lambda place: (-free[place].size, free[place].shape != shape)):
            rows, rest = divmod(free[place].size, row)
            if not rest and 0 < rows <= length - sum(sizes):
                sizes.append(rows)
                places.append(place)
        if sum(sizes) == length:
            yield Left(shape, axis, tuple(sizes), tuple(places))


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether the equation, or a function that it contains, is a matrix product."""
    inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr))
    jaxprs = [
        leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf for leaf in inner if isinstance(leaf, Jaxpr | ClosedJaxpr)
    ]
    return equation.primitive.name in PRODUCTS or any(map(_multiplies, (e for jaxpr in jaxprs for e in jaxpr.eqns)))


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _shape(var: Any) -> Any:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _bytes(var: Var) -> int:
    """Bytes of a variable; keys and tokens count as numbers."""
    return math.prod(getattr(var.aval, "shape", ())) * getattr(getattr(var.aval, "dtype", None), "itemsize", 4)
