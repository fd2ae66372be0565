"""Adam's moments in 8 bits: blocks of neighbouring numbers, a code for each and one scale for all.

    first moment    m ~ scale sign(c) (c / 127)^2,   c int8 in [-127, 127]
    second moment   sqrt(v) ~ scale (c / 255)^2,     c uint8

where the scale, a float32, is the largest |m| or sqrt(v) of the block.  Squares put more codes near zero, where most
numbers lie, as the dynamic map of Dettmers et al. (2021, arXiv 2110.02861) does; v is coded by its root, by which Adam
divides.  With L = 127 or 255 and x = m or sqrt(v), up to rounding,

    |decoded - x| <= sqrt(|x| scale) / L + scale / (4 L^2)

which is at most 0.79 % of the block's scale for m, and 0.4 % for sqrt(v).  Scales can be as large as 8.5e37; below
1.2e-38 they count as zero.  A v > 0 never gets code 0, because an update would then be divided by zero: numbers below
scale / (4 L^2) are decoded as scale / L^2.

Codes have the parameter's shape, and so have scales except for the last dim, which counts blocks: partitions by path
and shape apply to both.  A block is the largest divisor of the last dim up to 64, whatever the plan, so a checkpoint
restores under any plan.  Only matrices and tables are coded.  Biases and scales of norms, a thousandth of all numbers,
have float32 moments, and so have matrices whose last dim has no suitable divisor (`core.state`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jhpt.core.errors import InputError
from jhpt.core.state import block_size
from jhpt.sharding.layout import Layout
from jhpt.sharding.partition import MATRICES, names_of, path_name
from jhpt.sharding.types import KeyPath, Params, PyTree

SIGNED, UNSIGNED = 127, 255
"""The largest codes, L."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Coded:
    """A moment of every parameter.

    codes: a tree like the parameters; float32 numbers where a leaf is not coded.  scales: the same tree, None there.
    """

    codes: Any
    scales: Any


def block_of(path: str, shape: tuple[int, ...]) -> int | None:
    """Numbers in a block of this parameter; None: its moments stay float32."""
    return block_size(shape[-1]) if MATRICES.search(path) and shape else None


def encode(x: jax.Array, block: int, levels: int) -> tuple[jax.Array, jax.Array]:
    """Float32 [..., D] -> (codes [..., D], scales [..., D / block]).  levels: `SIGNED`, or `UNSIGNED` for x >= 0.

    Only zeros and numbers below `levels`^-2 / 4 of the scale get code 0; with `UNSIGNED` only zeros do.
    """
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0, scales)
    roots = jnp.sqrt(jnp.abs(blocks) / jnp.where(scales > 0, scales, 1))
    codes = jnp.round(roots * levels)
    if levels == SIGNED:
        codes = (jnp.sign(blocks) * codes).astype(jnp.int8)
    else:
        codes = jnp.where(blocks > 0, jnp.maximum(codes, 1), codes).astype(jnp.uint8)
    return codes.reshape(x.shape), scales[..., 0]


def decode(codes: jax.Array, scales: jax.Array, levels: int) -> jax.Array:
    """The inverse of `encode`, up to the error above."""
    blocks = codes.reshape(*scales.shape, -1).astype(jnp.float32) / levels
    return (scales[..., None] * blocks * jnp.abs(blocks)).reshape(codes.shape)


def encode_square(v: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """`encode` of the root of v >= 0."""
    return encode(jnp.sqrt(v), block, UNSIGNED)


def decode_square(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The inverse of `encode_square`."""
    return jnp.square(decode(codes, scales, UNSIGNED))


def encoded(tree: PyTree, one: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]) -> Coded:
    """A moment of all parameters in the code of `one`."""

    def coded(path: KeyPath, leaf: jax.Array) -> tuple[Any, Any]:
        block = block_of(path_name(path), leaf.shape)
        return (leaf, None) if block is None else one(leaf, block)

    pairs = [coded(*named) for named in jax.tree_util.tree_leaves_with_path(tree)]
    codes, scales = (jax.tree.unflatten(jax.tree.structure(tree), part) for part in zip(*pairs, strict=True))
    return Coded(codes=codes, scales=scales)


def decoded(moment: Coded, one: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """The inverse of `encoded`."""
    return jax.tree.map(
        lambda codes, scales: codes if scales is None else one(codes, scales), moment.codes, moment.scales
    )


def coded_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optax.scale_by_adam` whose moments are coded between updates.

    An update decodes the moments of the last one; its direction is computed from moments that are not yet coded.
    """

    def narrow(state: Any) -> Any:
        return state._replace(mu=encoded(state.mu, partial(encode, levels=SIGNED)), nu=encoded(state.nu, encode_square))

    def wide(state: Any) -> Any:
        return state._replace(mu=decoded(state.mu, partial(decode, levels=SIGNED)), nu=decoded(state.nu, decode_square))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        directions, after = adam.update(gradients, wide(state), params)
        return directions, narrow(after)

    return optax.GradientTransformation(lambda params: narrow(adam.init(params)), update)


def check_blocks(params: Params, layout: Layout) -> None:
    """Refuses a plan that cuts through blocks.

    Args:
      params: shapes, as the plan stores them.

    Raises:
      InputError: the message names the parameter and degrees that would fit.
    """
    moment = jax.eval_shape(lambda tree: encoded(tree, encode_square), params)
    codes, scales = (
        {
            path_name(path): spec
            for path, spec in jax.tree_util.tree_leaves_with_path(
                layout.specs(tree), is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
        }
        for tree in (moment.codes, moment.scales)
    )
    sizes = layout.device_mesh.mesh.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(moment.scales):
        name = path_name(path)
        ways = math.prod(sizes[axis] for axis in names_of(codes[name][-1]))
        if codes[name] != scales[name] or leaf.shape[-1] % ways:
            raise InputError(
                f"optimizer.moments=int8 codes rows of {name} in {leaf.shape[-1]} blocks, and the plan cuts them into "
                f"{ways} pieces; use degrees that divide {leaf.shape[-1]}, or optimizer.moments=float32"
            )
