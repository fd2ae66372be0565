"""The kernels compiled for an H100 that is not here, down to machine code: they fit, and nothing large is hidden."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.compiled.deviceless import compile_only_devices, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.kernels.operations import OPERATIONS

pytestmark = pytest.mark.deviceless


def compiled(name, spec):
    mesh = Mesh(np.array(compile_only_devices(find_cluster("h100x8x1"))[:1]), "data")
    there = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), OPERATIONS[name].shapes(spec)
    )
    return compiled_for(jax.jit(OPERATIONS[name].call(spec, "mosaic")).lower(*arguments))


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles(name):
    for spec in OPERATIONS[name].specs.TESTED:
        compiled(name, spec)


@pytest.mark.parametrize("name", OPERATIONS)
def test_holds_no_second_copy(name):
    """No argument is copied and there is no matrix of all queries by all keys: temporaries are less than half of what
    goes in (that much only for scores, whose mask of a byte and places of four are small beside all else)."""
    for spec in OPERATIONS[name].specs.TIMED:
        memory = compiled(name, spec).memory_analysis()
        assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 2, spec
