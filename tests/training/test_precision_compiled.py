"""What a GPU's compiler leaves of a rounding."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jhpt.compiled.deviceless import compile_only_devices, compiled_for
from jhpt.core.catalogue import cluster_named
from jhpt.training.weights import kahan

pytestmark = pytest.mark.deviceless


def test_the_rounding_that_a_remainder_is_of_is_not_optimised_away():
    """A conversion to bfloat16 and back is, and then the remainder is zero."""
    place = SingleDeviceSharding(compile_only_devices(cluster_named("h100x8x1"))[0])

    def by_conversion(stored, by, remainder):
        before, change = stored.astype(jnp.float32), remainder.astype(jnp.float32) - by
        after = (before + change).astype(jnp.bfloat16)
        return after, (change - (after.astype(jnp.float32) - before)).astype(jnp.bfloat16)

    def roundings(function):
        dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16
        shapes = [jax.ShapeDtypeStruct((4096,), dtype, sharding=place) for dtype in dtypes]
        text = compiled_for(jax.jit(function).lower(*shapes)).as_text()
        return text.count("reduce-precision("), text.count(" convert(")

    assert roundings(kahan) == (1, 4)
    assert roundings(by_conversion) == (0, 4)  # of five
