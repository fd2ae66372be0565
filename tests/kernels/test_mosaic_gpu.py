"""The kernels on a GPU, against their references there."""

import jax
import pytest

from jhpt.kernels.operations import OPERATIONS
from tests.kernels.test_mosaic_interpret import TOLERANCE, assert_same, spoiled

pytestmark = pytest.mark.gpu


def check(name, spec, arguments):
    """Kernel and reference agree."""
    call = OPERATIONS[name].call
    expected = jax.jit(call(spec, "reference"))(*arguments)
    assert_same(jax.jit(call(spec, "mosaic"))(*arguments), expected, TOLERANCE.get(name, 0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_equals_reference(name):
    specs = OPERATIONS[name].specs
    for spec in specs.TESTED + specs.TIMED[:1]:
        check(name, spec, specs.arguments(spec, jax.random.key(1)))


@pytest.mark.parametrize("name", ["token_topk", "segment_quantize", "topk_sparsify"])
def test_equals_reference_where_numbers_are_not_finite(name):
    specs = OPERATIONS[name].specs
    for spec in specs.TESTED:
        first, *others = specs.arguments(spec, jax.random.key(2))
        check(name, spec, (spoiled(first, jax.random.key(3)), *others))
