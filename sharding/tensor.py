"""Megatron's operators of tensor parallelism on one rank of the tensor axes (Shoeybi et al. 2019, arXiv 1909.08053,
figure 3), in the notation of the scaling book, {U_tp} for what is not reduced yet:

    f  copy_to_tensor_axis       x[B, S, D] -> x[B, S, D]           before column-parallel matrices W[D, F/tp];
                                                                    backward: all-reduce of the gradient {U_tp}
    g  reduce_over_tensor_axis   x[B, S, D] {U_tp} -> x[B, S, D]    all-reduce after row-parallel matrices W[F/tp, D];
                                                                    backward: the same gradient on every rank

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) activations between them are cut
along the sequence, x[B, S/tp, D]: f is an all-gather, g a reduce-scatter, and each is the other's transpose.

An array that every rank has whole has a whole gradient, the same on every rank.  Therefore the transposes are written
out here: autodiff would all-reduce once more.
"""

from functools import partial

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def copy_to_tensor_axis(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """f: x itself."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_over_tensor_axis(axes: tuple[str, ...], parts: jax.Array) -> jax.Array:
    """g: the all-reduce of the ranks' parts."""
    return jax.lax.psum(parts, axes)


copy_to_tensor_axis.defvjp(lambda axes, x: (x, None), lambda axes, _, gradient: (jax.lax.psum(gradient, axes),))
reduce_over_tensor_axis.defvjp(
    lambda axes, parts: (jax.lax.psum(parts, axes), None), lambda axes, _, gradient: (gradient,)
)


def max_over_tensor_axis(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The maximum over the ranks; no gradient passes."""
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_columns(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
    """y[..., F/tp] -> y[..., F], an all-gather; backward every rank takes its columns of the gradient.

    It follows a column-parallel matrix whose result is not the input of a row-parallel one: half of g's traffic.
    """
    return jax.lax.all_gather(part, axes, axis=part.ndim - 1, tiled=True)


def _gather_columns_backward(axes: tuple[str, ...], width: int, gradient: jax.Array) -> tuple[jax.Array]:
    start = jax.lax.axis_index(axes) * width
    return (jax.lax.dynamic_slice_in_dim(gradient, start, width, axis=gradient.ndim - 1),)


gather_columns.defvjp(lambda axes, part: (gather_columns(axes, part), part.shape[-1]), _gather_columns_backward)


SEQUENCE = 1
"""The dimension of x[B, S, D] that sequence parallelism cuts."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """f of a cut sequence: x[B, S/tp, D] -> x[B, S, D]; backward the reduce-scatter of the gradient {U_tp}."""
    return jax.lax.all_gather(x, axes, axis=SEQUENCE, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_scatter_rows(axes: tuple[str, ...], parts: jax.Array) -> jax.Array:
    """g of a cut sequence: parts[B, S, D] {U_tp} -> x[B, S/tp, D]; backward the all-gather of the gradient."""
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
    """x[B, S/tp, ...] -> x[B, S, ...]."""
    return jax.lax.all_gather(x, axes, axis=SEQUENCE, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def split_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """After the embedding: this rank's rows of x[B, S, D]; backward the all-gather of the ranks' rows."""
    return own_rows(axes, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def join_rows(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Before the head: x[B, S/tp, D] -> x[B, S, D]; backward this rank's rows of the gradient, whole on every rank."""
    return all_rows(axes, x)


split_rows.defvjp(lambda axes, x: (own_rows(axes, x), None), lambda axes, _, g: (all_rows(axes, g),))
join_rows.defvjp(lambda axes, x: (all_rows(axes, x), None), lambda axes, _, g: (own_rows(axes, g),))
