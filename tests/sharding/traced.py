"""What is in a traced program."""

import math

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def called(equation):
    """The programs within an equation."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if isinstance(leaf, Jaxpr | ClosedJaxpr)]


def equations(jaxpr, within=()):
    """Every equation with those that contain it."""
    for equation in jaxpr.eqns:
        yield equation, within
        for inner in called(equation):
            yield from equations(inner, (*within, equation))


def loops(equation):
    """Whether it is a loop that is not unrolled."""
    return equation.primitive.name == "while" or (
        equation.primitive.name == "scan" and equation.params["unroll"] < equation.params["length"]
    )


def products(jaxpr):
    """FLOP of the matrix products in a program, those of functions and loops that it calls among them."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * equation.outvars[0].aval.size
        total += equation.params.get("length", 1) * sum(map(products, called(equation)))
    return total
