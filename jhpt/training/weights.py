"""How parameters are stored between steps, and how a step changes them.

A bfloat16 has 8 significant bits: a change of less than 1/512 of a parameter is rounded away, and most changes are
smaller.  With w the stored parameter, u the change by the optimizer, all arithmetic in float32, and `round` to the
dtype of storage,

    bfloat16              w' = round(w + u), to nearest: training stalls as soon as changes are small
    bfloat16_kahan        w' = round(w + u + c),  c' = round((u + c) - (w' - w))
                          c, the remainder, is the sum of what rounding has removed so far; it is a bfloat16, too
    bfloat16_stochastic   w' = w + u rounded up or down, with probabilities that make its mean w + u

With Kahan's sum (1965, Communications of the ACM 8(1): 40) and a remainder of 8 significant bits, a step loses at most
2^-17 of the parameter, so n steps end within n 2^-17 max|w| of the exact sum.  Stochastic rounding has no state; its
variance adds up to at most n 2^-16 max|w|^2, a standard deviation of 2^-8 max|w| sqrt(n).  (Both for training with
pure bfloat16: Zamirai et al. 2020, arXiv 2010.06192.)

Parameters that models use in float32, a thousandth of all, stay float32 (`jhpt.sharding.partition.IN_FLOAT32`).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.config import WeightStorage
from jhpt.sharding.partition import IN_FLOAT32, path_name
from jhpt.sharding.types import KeyPath, Params, PyTree

Keys = Callable[[jax.Array], Any]
"""Key of a step -> a tree like the stored parameters, with the data of a key for each leaf or for each of its rows."""


def widened(tree: PyTree) -> Any:
    """The same numbers in float32, from which moments and decay are computed."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def no_keys(key: jax.Array) -> Any:
    """For weights that are not rounded stochastically."""
    return None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """storage: as in the table above; float32 is exact to rounding.  keys: of stochastic rounding (`rounding_keys`)."""

    storage: WeightStorage = "float32"
    keys: Keys = no_keys

    def stored(self, params: Params) -> Any:
        """Float32 parameters as they are stored, rounded to nearest."""
        if self.storage == "float32":
            return params

        def narrowed(path: KeyPath, leaf: jax.Array) -> jax.Array:
            return leaf if IN_FLOAT32.search(path_name(path)) else leaf.astype(jnp.bfloat16)

        return jax.tree_util.tree_map_with_path(narrowed, params)

    def remainder(self, params: Params) -> Any:
        """The remainder before the first step, zeros like the parameters; None without Kahan summation."""
        if self.storage != "bfloat16_kahan":
            return None
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), params)

    def lowered(self, params: Params, by: PyTree, remainder: PyTree, key: jax.Array) -> tuple[Any, Any]:
        """(parameters - by, the new remainder).

        Args:
          params, remainder: as they are stored.  by: like them, in float32.  key: of this step.
        """
        if self.storage == "bfloat16_kahan":
            pairs = jax.tree.map(kahan, params, by, remainder)
            return jax.tree.transpose(jax.tree.structure(params), None, pairs)
        if self.storage == "bfloat16_stochastic":
            return jax.tree.map(_drawn, params, by, self.keys(key)), None
        return jax.tree.map(lambda p, u: (p.astype(jnp.float32) - u).astype(p.dtype), params, by), None


def kahan(stored: jax.Array, by: jax.Array, remainder: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(stored - by, remainder): any shape; `stored` keeps its dtype.

    The rounding is an explicit operation: on GPUs, XLA removes a conversion to bfloat16 and back, and with it the
    remainder.
    """
    kind, before = jnp.finfo(stored.dtype), stored.astype(jnp.float32)
    change = remainder.astype(jnp.float32) - by
    after = jax.lax.reduce_precision(before + change, kind.nexp, kind.nmant)
    return after.astype(stored.dtype), (change - (after - before)).astype(remainder.dtype)


def stochastic(x: jax.Array, key: jax.Array) -> jax.Array:
    """Float32 [...] -> bfloat16, rounded up with probability (x - below) / (above - below), otherwise down.

    A random 16-bit number is added to the 16 bits that are cut off.  Representable numbers do not change, nor do
    numbers that are not finite; the number above the largest bfloat16 is infinity.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    word = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    drawn = jax.lax.bitcast_convert_type(word, jnp.float32)
    return jnp.where(jnp.isfinite(x), drawn, x).astype(jnp.bfloat16)


def _drawn(stored: jax.Array, by: jax.Array, key: jax.Array) -> jax.Array:
    exact = stored.astype(jnp.float32) - by
    if stored.dtype == jnp.float32:
        return exact
    keys = jax.random.wrap_key_data(key)
    return jax.vmap(stochastic)(exact, keys) if keys.ndim else stochastic(exact, keys)


def rounding_keys(params: Params, stored: Callable[[Any], Any]) -> Keys:
    """A key for every parameter, by its name, and for every block of a stack, laid out like the parameters.

    The random bits of a number depend on the step's key, its parameter, its block and its place there, but not on the
    plan.  A tied table that is on two stages of a pipeline draws the same bits on both.

    Args:
      params: shapes of the model's own tree.  stored: that tree -> as the plan stores it.
    """

    def keys(key: jax.Array) -> Any:
        def leaf_keys(path: tuple[Any, ...], leaf: Any) -> jax.Array:
            name = path_name(path)
            one = jax.random.fold_in(key, zlib.crc32(name.encode()))
            if not name.startswith("blocks/"):
                return jax.random.key_data(one)
            return jax.vmap(lambda block: jax.random.key_data(jax.random.fold_in(one, block)))(
                jnp.arange(leaf.shape[0])
            )

        return stored(jax.tree_util.tree_map_with_path(leaf_keys, params))

    return keys
