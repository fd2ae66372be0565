"""Every kernel lowers for CUDA, which takes no GPU: interpret mode runs much that no GPU could."""

import jax
import pytest

from jhpt.kernels.operations import OPERATIONS
from tests.covers import quick_and_exhaustive


def lowered(operation, spec):
    return jax.jit(operation.call(spec, "mosaic")).trace(*operation.shapes(spec)).lower(lowering_platforms=("cuda",))


def few(name) -> list:
    """Of the small specs all that differ in kind; shapes that there are with 8 and with 4 bits have both in turn."""
    specs = OPERATIONS[name].specs.TESTED
    if name in ("segment_quantize", "dequantize_sum"):
        half = len(specs) // 2
        return [specs[at + half * (at % 2)] for at in range(half)]
    return list(specs[2:] if name == "attention_importance" else specs)


SMALL = [(name, spec) for name, operation in OPERATIONS.items() for spec in operation.specs.TESTED]
TIMED = [(name, spec) for name, operation in OPERATIONS.items() for spec in operation.specs.TIMED]


@pytest.mark.parametrize(
    ("name", "spec"), quick_and_exhaustive(SMALL, [(name, spec) for name in OPERATIONS for spec in few(name)]), ids=str
)
def test_lowers_for_cuda(name, spec):
    lowered(OPERATIONS[name], spec)


@pytest.mark.parametrize(
    ("name", "spec"),
    quick_and_exhaustive(TIMED, [(name, operation.specs.TIMED[0]) for name, operation in OPERATIONS.items()]),
    ids=str,
)
def test_is_a_kernel(name, spec):
    """The sizes that benchmarks time are not left to the reference."""
    assert "mosaic_gpu" in lowered(OPERATIONS[name], spec).as_text()
