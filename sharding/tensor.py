"""What one rank of the tensor axes does: Megatron's two operators (Shoeybi et al. 2019, arXiv 1909.08053, figure 3).

    f  enter        x      -> x                        backward: the sum of the ranks' gradients
    g  sum_parts    parts  -> the sum over the ranks   backward: the same gradient for every part

What is whole has a whole gradient, the same on every rank.  So the transposes are written down and not left to
autodiff, which would sum once more.
"""

from functools import partial

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def enter(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """f: x itself."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_parts(axes: tuple[str, ...], parts: jax.Array) -> jax.Array:
    """g: the sum of the ranks' parts."""
    return jax.lax.psum(parts, axes)


enter.defvjp(lambda axes, x: (x, None), lambda axes, _, gradient: (jax.lax.psum(gradient, axes),))
sum_parts.defvjp(lambda axes, parts: (jax.lax.psum(parts, axes), None), lambda axes, _, gradient: (gradient,))


def largest(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The maximum over the ranks; no gradient passes."""
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def join(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
    """The ranks' parts side by side along the last dimension; backward every rank keeps its own part of the gradient.

    After a product with a column-sharded matrix whose result is not for another sharded one: half of g's traffic.
    """
    return jax.lax.all_gather(part, axes, axis=part.ndim - 1, tiled=True)


def _join_backward(axes: tuple[str, ...], width: int, gradient: jax.Array) -> tuple[jax.Array]:
    start = jax.lax.axis_index(axes) * width
    return (jax.lax.dynamic_slice_in_dim(gradient, start, width, axis=gradient.ndim - 1),)


join.defvjp(lambda axes, part: (join(axes, part), part.shape[-1]), _join_backward)
