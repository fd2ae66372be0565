"""Every kernel lowers for CUDA, which takes no GPU: interpret mode runs much that no GPU could."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import pytest

from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.attention_importance import specs as attention_specs
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.dequantize_sum import specs as dequantize_specs
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segment_quantize import specs as quantize_specs
from jhpt.kernels.segments import fit_knee
from jhpt.kernels.token_topk import specs as token_specs
from jhpt.kernels.token_topk import token_topk
from jhpt.kernels.topk_sparsify import specs as sparsify_specs
from jhpt.kernels.topk_sparsify import topk_sparsify


class Operation(NamedTuple):
    """call(spec, implementation) is the operation as a function of specs.arguments(spec, key)."""

    specs: ModuleType
    call: Callable[[Any, str], Callable[..., Any]]


def quantize(spec, implementation):
    def run(x, rows, seed):
        knee = fit_knee(x, spec.bits) if spec.group == "tensor" else None
        options = {"bits": spec.bits, "group": spec.group, "knee": knee, "rows": rows, "seed": seed}
        return segment_quantize(x, **options, implementation=implementation)

    return run


def dequantize(spec, implementation):
    def run(payloads, knee):
        options = {"columns": spec.columns, "bits": spec.bits, "group": spec.group}
        fitted = {"knee": knee} if spec.group == "tensor" else {}
        return dequantize_sum(payloads, **options, **fitted, implementation=implementation)

    return run


def importance(spec, implementation):
    options = {"causal": spec.causal, "stride": spec.stride, "implementation": implementation}
    return lambda q, k, lengths: attention_importance(q, k, lengths=lengths, **options)


def topk(spec, implementation):
    return lambda scores, k: token_topk(scores, spec.k, implementation=implementation)


def sparsify(spec, implementation):
    options = {"keep": spec.keep, "block": spec.block, "implementation": implementation}
    return lambda gradient, residual: topk_sparsify(gradient, residual, **options)


OPERATIONS = {
    "token_topk": Operation(token_specs, topk),
    "attention_importance": Operation(attention_specs, importance),
    "segment_quantize": Operation(quantize_specs, quantize),
    "dequantize_sum": Operation(dequantize_specs, dequantize),
    "topk_sparsify": Operation(sparsify_specs, sparsify),
}


def shapes(operation, spec):
    """Arguments that hold nothing."""
    return jax.eval_shape(lambda key: operation.specs.arguments(spec, key), jax.random.key(0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_lowers_for_cuda(name):
    operation = OPERATIONS[name]
    for spec in operation.specs.TESTED + operation.specs.TIMED:
        jax.jit(operation.call(spec, "mosaic")).trace(*shapes(operation, spec)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", OPERATIONS)
def test_is_a_kernel(name):
    """The sizes that benchmarks time are not left to the reference."""
    operation = OPERATIONS[name]
    spec = operation.specs.TIMED[0]
    lowered = (
        jax.jit(operation.call(spec, "mosaic")).trace(*shapes(operation, spec)).lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()
