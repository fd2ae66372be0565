"""Every kernel lowers for CUDA, which takes no GPU: interpret mode runs much that no GPU could."""

import jax
import pytest

from jhpt.kernels.operations import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_lowers_for_cuda(name):
    operation = OPERATIONS[name]
    for spec in operation.specs.TESTED + operation.specs.TIMED:
        jax.jit(operation.call(spec, "mosaic")).trace(*operation.shapes(spec)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", OPERATIONS)
def test_is_a_kernel(name):
    """The sizes that benchmarks time are not left to the reference."""
    operation = OPERATIONS[name]
    spec = operation.specs.TIMED[0]
    lowered = jax.jit(operation.call(spec, "mosaic")).trace(*operation.shapes(spec)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
