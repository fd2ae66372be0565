"""What is computed first, where no value says so.

A compiler that finds two things to do in any order may do them side by side, and then wait for the sums of both.  Here
one waits for the other, and in the backward pass the other for the one:

    part, ticket = give(part);   y = wait(y, ticket)      forward: y after part      backward: part's error after y's

A ticket is a zero that is computed from what gives it: of an entry that is not as large as numbers get, which the
compiler does not know.  Adding it changes nothing and goes into whatever writes y anyway.  (An optimization_barrier is
gone before the compiler puts things in order.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

ORDERING_TOKEN = "ticket"
"""Name for recomputation: to have a ticket again would take what gave it."""


def emit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, a ticket for `depend_on`)."""
    x, ordering_token = _emit(x)
    return x, checkpoint_name(ordering_token, ORDERING_TOKEN)


def depend_on(x: jax.Array, ordering_token: jax.Array | None) -> jax.Array:
    """x, once what gave the ticket is there; at once without one."""
    return x if ordering_token is None else _depend_on(x, ordering_token)


def after(x: jax.Array, done: Any) -> jax.Array:
    """x, once every array of a tree is computed; not to be differentiated."""
    return jax.tree.reduce(lambda x, leaf: x + _zero(leaf).astype(x.dtype), done, x)


def _zero(x: jax.Array) -> jax.Array:
    """0, but not before x is known; what is infinite or not a number shows itself."""
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
