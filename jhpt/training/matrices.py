"""Update rules that look at a matrix as a whole: Adafactor and Muon.

A kernel maps its first dimension to all others: qkv [L, D, K, G + 2, E] is L matrices [D, K (G + 2) E], and the two
matrices of a gated MLP, [L, D, 2, F], are 2 L.  A table is a matrix of rows.  Every other parameter is a vector; in
blocks, one for each layer.  What is before these dimensions counts layers, or stages of a pipeline, whose padding is
zero and stays so: an update depends on its own matrix or vector only, and so not on the plan.

The step runs these rules on whole arrays, which may be cut over devices (`jhpt.training.step`).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jhpt.core.optimizers import NEWTON_SCHULZ_STEPS
from jhpt.sharding.partition import MATRICES, path_name
from jhpt.sharding.types import KeyPath, PyTree

GATED = re.compile(r"mlp/up/kernel$")
"""Matrices of an MLP: with four dimensions [L, D, 2, F] two for each layer."""

EPSILON = 1e-30
"""Added to squared gradients by Adafactor: epsilon_1 of the paper."""

DECAY = 0.8
"""Adafactor's squares decay by 1 - t^-0.8 at step t = 1, 2, ..."""

LARGEST_RMS = 1.0
"""Adafactor scales a direction down to this root mean square, of each matrix or vector: d of the paper."""

ADAMS_RMS = 0.2
"""The root mean square of AdamW's directions, by experience (Liu et al. 2025, arXiv 2502.16982).  Muon's are
scaled to it, so that both have one learning rate and decay."""

OnWholeLayers = Callable[[Callable[[Any], Any], Any], Any]
"""(function, tree of blocks' leaves) -> function(tree), computed where no layer is cut (`Layout.on_whole_layers`)."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Which dimensions of a parameter count its matrices, and which are rows and columns of each."""

    layers: tuple[int, ...]
    rows: int
    columns: tuple[int, ...]

    def of(self, x: jax.Array) -> jax.Array:
        """A parameter as matrices [*layers, rows, columns]."""
        moved = x.transpose(self._order)
        return moved.reshape(*moved.shape[: len(self.layers) + 1], -1)

    def back(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `of`, for a parameter of this shape."""
        moved = matrices.reshape([shape[dim] for dim in self._order])
        return moved.transpose([self._order.index(dim) for dim in range(len(shape))])

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.layers, self.rows, *self.columns)


def matrix_of(path: KeyPath, ndim: int) -> Matrix | None:
    """The matrices of a parameter as a plan stores it; None: it has none."""
    name, stacked = path_name(path), _in_block(path)
    if not MATRICES.search(name) or ndim < 2 + stacked:
        return None
    if not stacked:
        return Matrix(layers=tuple(range(ndim - 2)), rows=ndim - 2, columns=(ndim - 1,))
    gates = (2,) if GATED.search(name) and ndim == 4 else ()
    return Matrix(layers=(0, *gates), rows=1, columns=tuple(range(2 + len(gates), ndim)))


def _in_block(path: KeyPath) -> bool:
    return path_name(path).startswith("blocks/")


class Factors(NamedTuple):
    """Mean squares of matrices [*layers, n, m]: rows [*layers, n] and columns [*layers, m]."""

    rows: jax.Array
    columns: jax.Array


class FactoredSquares(NamedTuple):
    """The state of Adafactor.

    updates: so far.  squares: a tree like the parameters with `Factors` for every matrix, and mean squares for
    every number of the others.
    """

    updates: jax.Array
    squares: Any


def scale_by_factored_squares() -> optax.GradientTransformation:
    """Adafactor's directions: with mean squares R of the rows and C of the columns of a matrix, decaying by `DECAY`,

        u = g / sqrt(R C^T / mean(R)),    direction = u / max(1, rms(u) / `LARGEST_RMS`)

    (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 4).  Vectors have a mean square for every number.  There is no
    first moment, and the learning rate is the step's: neither relative to the step's number nor to the parameter.
    """

    def zeros(path: KeyPath, leaf: jax.Array) -> Any:
        matrix = matrix_of(path, leaf.ndim)
        if matrix is None:
            return jnp.zeros_like(leaf)
        *_, rows, columns = shape = matrix.of(leaf).shape
        return Factors(jnp.zeros((*shape[:-2], rows), leaf.dtype), jnp.zeros((*shape[:-2], columns), leaf.dtype))

    def init(params: Any) -> FactoredSquares:
        return FactoredSquares(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(zeros, params))

    def update(gradients: Any, state: FactoredSquares, params: Any = None) -> tuple[Any, FactoredSquares]:
        updates = state.updates + 1
        decay = 1 - updates.astype(jnp.float32) ** -DECAY
        leaves, tree = jax.tree_util.tree_leaves_with_path(gradients), jax.tree.structure(gradients)
        before = jax.tree.leaves(state.squares, is_leaf=lambda part: isinstance(part, Factors))
        pairs = [_scaled(path, leaf, squares, decay) for (path, leaf), squares in zip(leaves, before, strict=True)]
        directions, squares = (jax.tree.unflatten(tree, part) for part in zip(*pairs, strict=True))
        return directions, FactoredSquares(updates, squares)

    return optax.GradientTransformation(init, update)


def _scaled(path: KeyPath, gradient: jax.Array, before: Any, decay: jax.Array) -> tuple[jax.Array, Any]:
    """(direction of a parameter, its new mean squares)."""
    mean = lambda old, new: decay * old + (1 - decay) * new  # noqa: E731
    matrix = matrix_of(path, gradient.ndim)
    if matrix is None:
        squares = mean(before, jnp.square(gradient) + EPSILON)
        first = 1 if _in_block(path) else max(gradient.ndim - 1, 0)
        return _limited(gradient * jax.lax.rsqrt(squares), tuple(range(first, gradient.ndim))), squares
    g = matrix.of(gradient)
    new = jnp.square(g) + EPSILON
    rows, columns = mean(before.rows, new.mean(-1)), mean(before.columns, new.mean(-2))
    share = rows / rows.mean(-1, keepdims=True)
    u = g * jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(columns)[..., None, :]
    return matrix.back(_limited(u, (-2, -1)), gradient.shape), Factors(rows, columns)


def _limited(u: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    rms = jnp.sqrt(jnp.square(u).mean(dims, keepdims=True))
    return u / jnp.maximum(1, rms / LARGEST_RMS)


class Momentum(NamedTuple):
    """The state of Muon.  updates: so far.  mean: a tree like the parameters."""

    updates: jax.Array
    mean: Any


def scale_by_orthogonal_momentum(*, momentum: float, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """Muon's directions of matrices [n, m], from their momentum M with singular vectors U, V,

        direction = 0.2 sqrt(max(n, m)) U V^T

    by five steps of Newton and Schulz, after which all singular values are about 1.  These are fifteen products of each
    matrix: where a plan cuts it, devices share out whole layers (`on_whole_layers`) instead of sharing every product.
    """

    def init(params: Any) -> Momentum:
        return Momentum(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(
        gradients: Any, state: Momentum, params: Any = None, *, on_whole_layers: OnWholeLayers, **_: Any
    ) -> tuple[Any, Momentum]:
        updates = state.updates + 1
        mean = optax.tree.update_moment(gradients, state.mean, momentum, 1)
        used = optax.tree.bias_correction(mean, momentum, updates + nesterov)
        if nesterov:
            used = optax.tree.update_moment(optax.tree.bias_correction(gradients, momentum, updates), used, momentum, 1)
        return on_whole_layers(_orthogonal, used), Momentum(updates, mean)

    return optax.GradientTransformationExtraArgs(init, update)


def _orthogonal(matrices: Any) -> Any:
    """The nearest orthogonal matrices, scaled to the root mean square of AdamW's directions."""
    muon = optax.contrib.scale_by_muon(
        ns_steps=NEWTON_SCHULZ_STEPS, beta=0.0, nesterov=False, weight_dimension_numbers=_dimension_numbers
    )
    directions, _ = muon.update(matrices, muon.init(matrices))
    return jax.tree_util.tree_map_with_path(_with_adams_rms, directions)


def _dimension_numbers(params: PyTree) -> Any:
    def numbers(path: KeyPath, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers:
        matrix = matrix_of(path, leaf.ndim)
        assert matrix is not None, f"{path_name(path)} is no matrix"
        return optax.contrib.MuonDimensionNumbers(matrix.rows, matrix.columns)

    return jax.tree_util.tree_map_with_path(numbers, params)


def _with_adams_rms(path: KeyPath, orthogonal: jax.Array) -> jax.Array:
    matrix = matrix_of(path, orthogonal.ndim)
    assert matrix is not None, f"{path_name(path)} is no matrix"
    columns = math.prod(orthogonal.shape[dim] for dim in matrix.columns)
    return ADAMS_RMS * math.sqrt(max(orthogonal.shape[matrix.rows], columns)) * orthogonal


class Apart(NamedTuple):
    """States of two rules, whose trees have None for the parameters of the other."""

    matrices: Any
    others: Any


def of_block_matrices(
    rule: optax.GradientTransformationExtraArgs, *, others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """One rule for the matrices of blocks, and another for all other parameters."""

    def split(tree: Any) -> Apart:
        def is_matrix(path: KeyPath, leaf: jax.Array) -> bool:
            return _in_block(path) and matrix_of(path, leaf.ndim) is not None

        mask = jax.tree_util.tree_map_with_path(is_matrix, tree)
        return Apart(
            matrices=jax.tree.map(lambda leaf, own: leaf if own else None, tree, mask),
            others=jax.tree.map(lambda leaf, own: None if own else leaf, tree, mask),
        )

    def init(params: Any) -> Apart:
        own, rest = split(params)
        return Apart(rule.init(own), others.init(rest))

    def update(gradients: Any, state: Apart, params: Any = None, **extra: Any) -> tuple[Any, Apart]:
        own, rest = split(gradients)
        own, matrices = rule.update(own, state.matrices, None, **extra)
        rest, remaining = others.update(rest, state.others)
        joined = jax.tree.map(lambda a, b: b if a is None else a, own, rest, is_leaf=lambda leaf: leaf is None)
        return joined, Apart(matrices, remaining)

    return optax.GradientTransformationExtraArgs(init, update)
