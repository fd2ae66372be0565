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

TICKET = "ticket"
"""Name for recomputation: to have a ticket again would take what gave it."""


def give(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, a ticket for `wait`)."""
    x, ticket = _give(x)
    return x, checkpoint_name(ticket, TICKET)


def wait(x: jax.Array, ticket: jax.Array | None) -> jax.Array:
    """x, once what gave the ticket is there; at once without one."""
    return x if ticket is None else _wait(x, ticket)


def after(x: jax.Array, done: Any) -> jax.Array:
    """x, once every array of a tree is computed; not to be differentiated."""
    return jax.tree.reduce(lambda x, leaf: x + _zero(leaf).astype(x.dtype), done, x)


def _zero(x: jax.Array) -> jax.Array:
    """0, but not before x is known; what is infinite or not a number shows itself."""
    entry = x.ravel()[0].astype(jnp.float32)
    return jnp.where(jnp.abs(entry) < jnp.finfo(jnp.float32).max, 0.0, entry)


@jax.custom_vjp
def _give(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, _zero(x)


_give.defvjp(lambda x: (_give(x), None), lambda _, errors: (errors[0] + errors[1].astype(errors[0].dtype),))


@jax.custom_vjp
def _wait(x: jax.Array, ticket: jax.Array) -> jax.Array:
    return x + ticket.astype(x.dtype)


_wait.defvjp(lambda x, ticket: (_wait(x, ticket), None), lambda _, error: (error, _zero(error)))
