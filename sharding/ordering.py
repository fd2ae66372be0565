"""The order of two computations neither of which needs the other's result.

A compiler that may run two computations in any order may run them side by side, and then wait for the all-reduces of
both.  Here the second waits for the first, and in the backward pass the first for the second:

    part, token = emit(part);  y = depend_on(y, token)    forward: y after part    backward: part's gradient after y's

An ordering token is a zero that is computed from `part`: the compiler does not know that no entry of `part` is as large
as float32 allows.  Adding it to y changes nothing, and the addition is fused into whatever writes y.

An optimization_barrier would not do: the compiler removes it before it orders what it computes.  By then it has decided
where it waits for collectives and for copies from the host, so that a barrier can put off such a wait (`zero._received`
and `offload.stream._fetched_beside`; seen with jax 0.11.2).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.sharding.types import PyTree

ORDERING_TOKEN = "ordering_token"
"""The name of tokens for recomputation, which should save them: recomputing one needs all that it was computed from."""


def emit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, an ordering token for `depend_on`)."""
    x, ordering_token = _emit(x)
    return x, checkpoint_name(ordering_token, ORDERING_TOKEN)


def depend_on(x: jax.Array, ordering_token: jax.Array | None) -> jax.Array:
    """x, but not before the array that emitted the token is computed; without a token x itself."""
    return x if ordering_token is None else _depend_on(x, ordering_token)


def after(x: jax.Array, done: PyTree) -> jax.Array:
    """x, but not before every array of a tree is computed; it cannot be differentiated."""
    return jax.tree.reduce(lambda x, leaf: x + _zero(leaf).astype(x.dtype), done, x)


def _zero(x: jax.Array) -> jax.Array:
    """0, but not before x is known; an x that is infinite or not a number is returned instead."""
    entry = x.ravel()[0].astype(jnp.float32)
    return jnp.where(jnp.abs(entry) < jnp.finfo(jnp.float32).max, 0.0, entry)


@jax.custom_vjp
def _emit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, _zero(x)


_emit.defvjp(lambda x: (_emit(x), None), lambda _, errors: (errors[0] + errors[1].astype(errors[0].dtype),))


@jax.custom_vjp
def _depend_on(x: jax.Array, ordering_token: jax.Array) -> jax.Array:
    return x + ordering_token.astype(x.dtype)


_depend_on.defvjp(
    lambda x, ordering_token: (_depend_on(x, ordering_token), None), lambda _, error: (error, _zero(error))
)
