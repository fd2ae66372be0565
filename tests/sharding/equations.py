"""What a traced program consists of."""

import jax


def every_equation(jaxpr):
    """Every equation, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from every_equation(inner)
