"""All operations with their specs, for tests and benchmarks of every one."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.attention_importance import specs as attention_specs
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.dequantize_sum import specs as dequantize_specs
from jhpt.kernels.gelu_backward import Backward, gelu_backward
from jhpt.kernels.gelu_backward import specs as gelu_specs
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segment_quantize import specs as quantize_specs
from jhpt.kernels.segments import Quantized
from jhpt.kernels.token_topk import specs as token_specs
from jhpt.kernels.token_topk import token_topk
from jhpt.kernels.topk_sparsify import Sparse, topk_sparsify
from jhpt.kernels.topk_sparsify import specs as sparsify_specs


class Operation(NamedTuple):
    """`call(spec, implementation)` is the operation as a function of `specs.arguments(spec, key)`."""

    specs: ModuleType
    call: Callable[[Any, Implementation], Callable[..., Any]]

    def shapes(self, spec: Any) -> Any:
        """Shapes and dtypes of the arguments."""
        return jax.eval_shape(lambda key: self.specs.arguments(spec, key), jax.random.key(0))


def _quantize(spec: quantize_specs.Spec, implementation: Implementation) -> Callable[..., Quantized]:
    def run(x: jax.Array, rows: jax.Array | None, seed: jax.Array | None) -> Quantized:
        return segment_quantize(
            x, bits=spec.bits, group=spec.group, rows=rows, seed=seed, implementation=implementation
        )

    return run


def _dequantize(spec: dequantize_specs.Spec, implementation: Implementation) -> Callable[..., jax.Array]:
    def run(payloads: Quantized, knee: Any) -> jax.Array:
        return dequantize_sum(
            payloads,
            columns=spec.columns,
            bits=spec.bits,
            group=spec.group,
            knee=knee if spec.fitted else None,
            implementation=implementation,
        )

    return run


def _importance(spec: attention_specs.Spec, implementation: Implementation) -> Callable[..., jax.Array]:
    def run(q: jax.Array, k: jax.Array, lengths: jax.Array | None) -> jax.Array:
        return attention_importance(
            q, k, lengths=lengths, causal=spec.causal, stride=spec.stride, implementation=implementation
        )

    return run


def _topk(spec: token_specs.Spec, implementation: Implementation) -> Callable[..., jax.Array]:
    return lambda scores, _: token_topk(scores, spec.k, implementation=implementation)


def _sparsify(spec: sparsify_specs.Spec, implementation: Implementation) -> Callable[..., Sparse]:
    def run(gradient: jax.Array, residual: jax.Array) -> Sparse:
        return topk_sparsify(gradient, residual, keep=spec.keep, block=spec.block, implementation=implementation)

    return run


def _gelu(spec: gelu_specs.Spec, implementation: Implementation) -> Callable[..., Backward]:
    return lambda x, error: gelu_backward(x, error, implementation=implementation)


OPERATIONS = {
    "token_topk": Operation(token_specs, _topk),
    "attention_importance": Operation(attention_specs, _importance),
    "segment_quantize": Operation(quantize_specs, _quantize),
    "dequantize_sum": Operation(dequantize_specs, _dequantize),
    "topk_sparsify": Operation(sparsify_specs, _sparsify),
    "gelu_backward": Operation(gelu_specs, _gelu),
}
