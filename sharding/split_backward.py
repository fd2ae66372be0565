"""The backward pass of a layer in two: the gradient of its input first, gradients of its weights at any time later.

Only the first is waited for by the stage before (Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
With y = x w and the error e = dL/dy

    backward pass    dL/dx = e w^T       reads the saved activations, and leaves x and e for the other
    weight pass      dL/dw = x^T e

The backward pass of autodiff is traced once, and its equations are dealt out.  What the gradient of x depends on is
computed at once.  The weight pass gets the largest matrix products of the rest for whose operands there is room in
between, and what follows them.  The room is that of the saved activations, which nothing reads once the backward pass
is over: a micro-batch never stores more.  Of a block of GPT's or BERT's with width d and MLP width 4 d they are 10 d
numbers a token (`core.families.transformer.NAMED_TENSORS`), as many as the operands of the MLP's two products.  The
other two products, of half as many FLOP, stay in the backward pass.
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

CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
"""The primitives that only call a function."""


class Left(NamedTuple):
    """An array of this shape that the backward pass leaves for the weight pass, and where it is stored.

    sizes: of the pieces into which it is cut along the axis.  places: of each piece, among the saved activations.
    wasted: how many numbers of these places are not used.
    """

    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    wasted: int

    def cut(self, value: jax.Array, shapes: Sequence[Any]) -> dict[int, jax.Array]:
        """The pieces by place, in the shapes of the places."""
        pieces = jnp.split(value, list(itertools.accumulate(self.sizes))[:-1], self.axis)
        return {
            place: jnp.pad(piece.ravel(), (0, shapes[place].size - piece.size)).reshape(shapes[place].shape)
            for place, piece in zip(self.places, pieces, strict=True)
        }

    def joined(self, saved: Saved) -> jax.Array:
        """The array, from the pieces as they are stored."""
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        pieces = []
        for place, size in zip(self.places, self.sizes, strict=True):
            shape = (*before, size, *after)
            pieces.append(saved[place].ravel()[: math.prod(shape)].reshape(shape))
        return jnp.concatenate(pieces, self.axis) if len(pieces) > 1 else pieces[0]


@dataclass(frozen=True, kw_only=True)
class SplitBackward:
    """The two passes of a layer, as `split_backward` has dealt them out.

    left: what the backward pass leaves for the weight pass, in places of the saved activations.
    down, gradient: the tree structures of the gradients of x and of the parameters.
    late: whether the weight pass computes it, of every gradient of a parameter.
    reads_parameters: whether the weight pass does.
    """

    layer: SplitLayer
    left: tuple[Left, ...]
    down: Any
    gradient: Any
    late: tuple[bool, ...]
    reads_parameters: bool
    now: Callable[..., Sequence[Any]]
    later: Callable[..., Sequence[Any]]

    def backward(
        self, params: Tree | tuple[()], at: LayerContext, saved: Saved, error: Activation
    ) -> tuple[Any, Any, dict[int, jax.Array]]:
        """(gradients of parameters, None where they come later, gradient of x, what replaces saved activations)."""
        values = iter(self.now(*jax.tree.leaves((params, at, saved, error))))
        down = jax.tree.unflatten(self.down, list(itertools.islice(values, self.down.num_leaves)))
        gradient = jax.tree.unflatten(self.gradient, [None if late else next(values) for late in self.late])
        left = dict[int, jax.Array]()
        for each in self.left:
            left |= each.cut(next(values), self.layer.shapes)
        return gradient, down, left

    def weights(self, params: Tree | tuple[()], at: LayerContext, saved: Saved) -> Any:
        """The gradients of the parameters that the backward pass has not computed; None for the others.

        saved: with what the backward pass has left.
        """
        left = [each.joined(saved) for each in self.left]
        values = iter(self.later(*jax.tree.leaves((params, at, saved)), *left))
        return jax.tree.unflatten(self.gradient, [next(values) if late else None for late in self.late])


class _Dealt(NamedTuple):
    """The equations of both passes, and the variables that the first leaves for the second, with their places."""

    now: list[JaxprEqn]
    later: list[JaxprEqn]
    left: list[Var]
    placed: tuple[Left, ...]


def split_backward(layer: SplitLayer, params: Tree | tuple[()], at: LayerContext) -> SplitBackward:
    """Traces the backward pass of a layer once, for arguments of these shapes, and deals its equations out."""
    saved = tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in layer.shapes)
    arguments = params, at, saved, jax.eval_shape(layer.forward, params, layer.x, at)[0]
    traced, (gradient, down) = jax.make_jaxpr(layer.backward, return_shape=True)(*arguments)
    flat = jax.make_jaxpr(lambda *leaves: _inlined(traced, leaves))(*jax.tree.leaves(arguments))
    jaxpr, count, known = flat.jaxpr, len(jax.tree.leaves(gradient)), len(jax.tree.leaves((params, at, saved)))
    gradients, downs = jaxpr.outvars[:count], jaxpr.outvars[count:]
    dealt = _dealt_out(jaxpr, gradients, downs, slice(known - len(saved), known))
    made_late = {var for equation in dealt.later for var in equation.outvars}
    late = [not isinstance(var, Literal) and var in made_late for var in gradients]
    sooner, later = (
        [var for var, other in zip(gradients, late, strict=True) if other == which] for which in (False, True)
    )

    def function(inputs: list[Var], equations: list[JaxprEqn], outputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(invars=inputs, outvars=outputs, eqns=equations), flat.consts))

    return SplitBackward(
        layer=layer,
        left=dealt.placed,
        down=jax.tree.structure(down),
        gradient=jax.tree.structure(gradient),
        late=tuple(late),
        reads_parameters=not _read(dealt.later, later).isdisjoint(jaxpr.invars[: len(jax.tree.leaves(params))]),
        now=function(jaxpr.invars, dealt.now, [*downs, *sooner, *dealt.left]),
        later=function([*jaxpr.invars[:known], *dealt.left], dealt.later, later),
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
            called = ClosedJaxpr(called, ()) if isinstance(called, Jaxpr) else called
            results = _inlined(called, map(value, equation.invars))
        else:
            read = list(dict.fromkeys(_variables(equation.invars)))
            alone = jaxpr.jaxpr.replace(constvars=[], invars=read, outvars=equation.outvars, eqns=[equation])
            results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*map(value, read))
        values |= zip(equation.outvars, results, strict=True)
    return list(map(value, jaxpr.jaxpr.outvars))


def _dealt_out(jaxpr: Jaxpr, gradients: Sequence[Any], downs: Sequence[Any], saved: slice) -> _Dealt:
    """What the gradient of x does not depend on comes later: the largest products for whose operands there is room."""
    urgent, wanted = _reaching(jaxpr.eqns, downs), _reaching(jaxpr.eqns, [*gradients, *downs])
    products = [number for number in sorted(wanted - urgent) if _multiplies(jaxpr.eqns[number])]
    best, chosen = _with_late(jaxpr, wanted, urgent, set(), saved), set[int]()
    for number in sorted(products, key=lambda number: -_size(jaxpr.eqns[number])):
        dealt = _with_late(jaxpr, wanted, urgent, chosen | {number}, saved)
        if dealt is not None:
            best, chosen = dealt, chosen | {number}
    assert best is not None, "nothing is left for an empty weight pass"
    return best


def _with_late(jaxpr: Jaxpr, wanted: set[int], urgent: set[int], chosen: set[int], saved: slice) -> _Dealt | None:
    """Equations dealt out where these products come later; None: there is no room for what has to be left."""
    equations, late, made_late = jaxpr.eqns, set[int](), set[Var]()
    for number, equation in enumerate(equations):
        if number in chosen or (number in wanted and made_late & set(_variables(equation.invars))):
            late.add(number)
            made_late.update(equation.outvars)
    # From the last one on: what only the weight pass reads moves there where that does not add to what is stored.
    for number in sorted(wanted - urgent - late, reverse=True):
        results, read = set(equations[number].outvars), _read([equations[other] for other in late], [])
        more = set(_variables(equations[number].invars)) - read
        read_now = {var for other in wanted - late - {number} for var in _variables(equations[other].invars)}
        if results & read and not results & read_now and sum(map(_bytes, more)) <= sum(map(_bytes, results)):
            late.add(number)
    now, later = ([equations[number] for number in sorted(numbers)] for numbers in (wanted - late, late))
    read = _read(later, [])
    known_now = [*jaxpr.invars[saved.stop :], *(var for equation in now for var in equation.outvars)]
    left = sorted((var for var in known_now if var in read), key=_bytes, reverse=True)
    placed = _placed(
        [_shape(var) for var in left], {n: _shape(var) for n, var in enumerate(jaxpr.invars[saved]) if var not in read}
    )
    return None if placed is None else _Dealt(now, later, left, placed)


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


def _placed(left: Sequence[Any], free: dict[int, Any]) -> tuple[Left, ...] | None:
    """Where every array is stored, of free places by number; None: there is no room."""
    placed = list[Left]()
    for shape in left:
        alike = {place: at for place, at in free.items() if at.dtype == shape.dtype}
        best = min(_cuts(shape.shape, alike), key=lambda cut: (cut.wasted, len(cut.places)), default=None)
        if best is None:
            return None
        free = {place: at for place, at in free.items() if place not in best.places}
        placed.append(best)
    return tuple(placed)


def _cuts(shape: tuple[int, ...], free: dict[int, Any]) -> Iterator[Left]:
    """Ways to store an array of this shape in free places: in the largest ones first, or in one alone."""
    orders = [sorted(free, key=lambda place: (-free[place].size, free[place].shape != shape)), *([one] for one in free)]
    for (axis, length), order in itertools.product(enumerate(shape), orders):
        row, sizes, places, wasted = math.prod(shape) // length, list[int](), list[int](), 0
        for place in order:
            if rows := min(free[place].size // row, length - sum(sizes)):
                sizes.append(rows)
                places.append(place)
                wasted += free[place].size - rows * row
        if sum(sizes) == length:
            yield Left(shape, axis, tuple(sizes), tuple(places), wasted)


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether the equation, or a function that it contains, is a matrix product."""
    inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr))
    jaxprs = [
        leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf for leaf in inner if isinstance(leaf, Jaxpr | ClosedJaxpr)
    ]
    return equation.primitive.name in PRODUCTS or any(map(_multiplies, (e for jaxpr in jaxprs for e in jaxpr.eqns)))


def _size(equation: JaxprEqn) -> float:
    """The FLOP of a matrix product up to a factor; of a function that contains some, more than any product's."""
    if equation.primitive.name != "dot_general":
        return math.inf
    left, right = (math.prod(_shape(operand).shape) for operand in equation.invars)
    return math.sqrt(float(left) * right * math.prod(_shape(equation.outvars[0]).shape))


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _shape(var: Any) -> Any:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _bytes(var: Var) -> int:
    """Bytes of a variable; keys and tokens count as numbers."""
    return math.prod(getattr(var.aval, "shape", ())) * getattr(getattr(var.aval, "dtype", None), "itemsize", 4)
