"""The Pallas kernel: a row in the registers of a warpgroup, its threshold found by counting."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.kernels.order import ordered
from jhpt.kernels.pallas import LANES, PARAMS, WARPS, by_warpgroup, largest, load, store
from jhpt.kernels.token_topk import reference

VECTOR = 4
UNIT = WARPS * LANES * VECTOR
MOST = 16384
"""128 numbers in a thread, which is what registers can hold beside those for counting."""


def topk(scores: jax.Array, k: int) -> jax.Array:
    """See `token_topk`.  Calls the reference for rows of more than 16,384 tokens."""
    batch, length = scores.shape
    if length > MOST or not batch or not k:
        return reference.topk(scores, k)
    # The filling comes after tokens with an equal score.
    filled = jnp.pad(scores, ((0, 0), (0, -length % UNIT)), constant_values=-jnp.inf)
    chosen = plgpu.kernel(
        partial(_body, k=k),
        out_type=jax.ShapeDtypeStruct(filled.shape, jnp.int8),
        grid=(batch,),
        grid_names=("row",),
        kernel_name="token_topk",
        compiler_params=PARAMS,
    )(filled)
    return _compacted(chosen[:, :length], k)


def _body(scores_ref: Any, chosen_ref: Any, *, k: int) -> None:
    """One row: 1 where the token is chosen."""
    here, layout = jax.lax.axis_index("row"), by_warpgroup(VECTOR)
    keys = ordered(load(scores_ref.at[here], layout))
    store(chosen_ref.at[here], largest(keys, k, bits=32, layout=layout).astype(jnp.int8))


def _compacted(chosen: jax.Array, k: int) -> jax.Array:
    """Positions of the k ones in every row of chosen[B, S]."""
    batch, length = chosen.shape
    position = jnp.arange(length, dtype=jnp.int32)[None]
    slot = jnp.where(chosen > 0, jnp.cumsum(chosen, 1, jnp.int32) - 1, k + position)  # k and above: nowhere
    row = jnp.arange(batch)[:, None]
    empty = jnp.zeros((batch, k), jnp.int32)
    return empty.at[row, slot].set(jnp.broadcast_to(position, slot.shape), mode="drop", unique_indices=True)
