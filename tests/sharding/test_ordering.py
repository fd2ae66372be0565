"""Tickets change nothing, and what waits for one cannot be had without what gave it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.sharding.ordering import depend_on, emit


def both(part, y):
    """Two things that have nothing to do with each other, the second after the first."""
    part, ordering_token = emit(part)
    return part, depend_on(y, ordering_token)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_values_and_gradients_are_as_they_were(dtype):
    part, y = jnp.asarray([3.0, -1.0], dtype), jnp.asarray([[0.5], [jnp.finfo(dtype).max]], dtype)
    values, pull = jax.vjp(jax.jit(both), part, y)
    errors = jnp.asarray([2.0, 7.0], dtype), jnp.asarray([[1.0], [-4.0]], dtype)
    for one, other in zip((*values, *pull(errors)), (part, y, *errors), strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)


def test_the_order_outlives_the_compiler():
    """What comes first is not finite: what comes after shows that it has seen it."""
    one, wrong = jnp.ones(3), jnp.full(3, jnp.inf)
    forward = jax.jit(both)
    assert not np.isfinite(forward(wrong, one)[1]).any() and np.isfinite(forward(one, wrong)[0]).all()

    backward = jax.jit(lambda errors: jax.vjp(both, one, one)[1](errors))
    assert not np.isfinite(backward((one, wrong))[0]).any() and np.isfinite(backward((wrong, one))[1]).all()


def test_nothing_waits_without_a_ticket():
    y = jnp.ones(3)
    assert depend_on(y, None) is y
