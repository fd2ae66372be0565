"""What one rank of the tensor axes does: Megatron's two operators (Shoeybi et al. 2019, arXiv 1909.08053, figure 3).

    f  enter        x      -> x                        backward: the sum of the ranks' gradients
    g  sum_parts    parts  -> the sum over the ranks   backward: the same gradient for every part

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) the residual stream between them is
cut along the sequence, [B, S / t, D]: f gathers, g scatters, and each is the other's transpose.

What is whole has a whole gradient, the same on every rank.  So the transposes are written down and not left to
autodiff, which would sum once more.
"""

from functools import partial

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def copy_to_tensor_axis(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """f: x itself."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_over_tensor_axis(axes: tuple[str, ...], parts: jax.Array) -> jax.Array:
    """g: the sum of the ranks' parts."""
    return jax.lax.psum(parts, axes)


copy_to_tensor_axis.defvjp(lambda axes, x: (x, None), lambda axes, _, gradient: (jax.lax.psum(gradient, axes),))
reduce_over_tensor_axis.defvjp(
    lambda axes, parts: (jax.lax.psum(parts, axes), None), lambda axes, _, gradient: (gradient,)
)


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


SEQUENCE = 1
"""The dimension of x[B, S, D] that sequence parallelism cuts."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """f on a cut sequence: the whole of x[B, S / t, D]; backward every rank gets its rows of the ranks' sum."""
    return jax.lax.all_gather(x, axes, axis=SEQUENCE, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_scatter_rows(axes: tuple[str, ...], parts: jax.Array) -> jax.Array:
    """g on a cut sequence: this rank's rows of the sum of parts[B, S, D]; backward the whole gradient."""
    return jax.lax.psum_scatter(parts, axes, scatter_dimension=SEQUENCE, tiled=True)


all_gather_rows.defvjp(
    lambda axes, x: (all_gather_rows(axes, x), None), lambda axes, _, g: (reduce_scatter_rows(axes, g),)
)
reduce_scatter_rows.defvjp(
    lambda axes, parts: (reduce_scatter_rows(axes, parts), None), lambda axes, _, g: (all_gather_rows(axes, g),)
)


def own_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """This rank's rows of x[B, S, ...]."""
    rows = x.shape[SEQUENCE] // jax.lax.psum(1, axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * rows, rows, axis=SEQUENCE)


def all_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The ranks' rows [B, S / t, ...] together."""
    return jax.lax.all_gather(x, axes, axis=SEQUENCE, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def split_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Where the cut stream begins: a rank's rows of what every rank has whole; backward the ranks' rows together."""
    return own_rows(axes, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def join_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Where it ends: all rows; backward a rank's rows of the gradient, which every rank has whole."""
    return all_rows(axes, x)


split_rows.defvjp(lambda axes, x: (own_rows(axes, x), None), lambda axes, _, g: (all_rows(axes, g),))
join_rows.defvjp(lambda axes, x: (all_rows(axes, x), None), lambda axes, _, g: (own_rows(axes, g),))
