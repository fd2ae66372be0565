"""The kernels in interpret mode, with race detection, against their references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.kernels.gelu_backward import gelu_backward
from jhpt.kernels.operations import OPERATIONS
from tests.kernels.test_references import within_rounding

pytestmark = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="Mosaic GPU kernels are interpreted from jax 0.11.2 on"
)

TOLERANCE = {"attention_importance": 2**-15, "gelu_backward": 2**-7}
"""Of the largest number: sums over some 100 queries and keys, in another order; and bfloat16 numbers that are rounded
to either neighbour, because their exponential differs in its last digit.  All else is exact."""


def interpreted():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def check(name, spec, arguments):
    """Kernel and reference agree."""
    call = OPERATIONS[name].call
    expected = jax.jit(call(spec, "reference"))(*arguments)
    with interpreted():
        actual = jax.jit(call(spec, "mosaic"))(*arguments)
    assert_same(actual, expected, TOLERANCE.get(name, 0))


def assert_same(actual, expected, tolerance):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        largest = np.max(np.abs(other), initial=0, where=np.isfinite(other))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(
    ("name", "spec"), [(name, spec) for name in OPERATIONS for spec in OPERATIONS[name].specs.TESTED]
)
def test_equals_reference(name, spec):
    check(name, spec, OPERATIONS[name].specs.arguments(spec, jax.random.key(1)))


few = settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
seeds = st.integers(0, 1000).map(jax.random.key)


def spoiled(x, key):
    """With numbers that are not finite, and some of the same magnitude."""
    which = jax.random.randint(key, x.shape, 0, 24)
    for index, value in enumerate((jnp.nan, jnp.inf, -jnp.inf, 1.0, -1.0, 0.0, -0.0, 1e-40, 1e38)):
        x = jnp.where(which == index, jnp.asarray(value, x.dtype), x)
    return x


@few
@given(seeds, st.integers(1, 3), st.integers(1, 600), st.data())
def test_topk_of_any_scores(key, batch, length, data):
    specs = OPERATIONS["token_topk"].specs
    spec = specs.Spec(batch, length, data.draw(st.integers(0, length)))
    scores, k = specs.arguments(spec, key)
    check("token_topk", spec, (spoiled(scores, key), k))


@few
@given(seeds, st.integers(1, 2000), st.integers(1, 300), st.sampled_from(("float32", "bfloat16")), st.data())
def test_sparsify_any_gradient(key, size, block, dtype, data):
    specs = OPERATIONS["topk_sparsify"].specs
    spec = specs.Spec(size, data.draw(st.integers(1, min(block, 20))), block, dtype)
    gradient, residual = specs.arguments(spec, key)
    check("topk_sparsify", spec, (spoiled(gradient, key), residual))


@few
@given(
    seeds,
    st.integers(1, 9),
    st.integers(1, 600),
    st.sampled_from((4, 8)),
    st.sampled_from((2, 32, 48, 128, 1024)),
    st.sampled_from(("float32", "bfloat16")),
    st.booleans(),
    st.booleans(),
)
def test_quantize_any_rows(key, rows, columns, bits, group, dtype, gathered, stochastic):
    specs = OPERATIONS["segment_quantize"].specs
    spec = specs.Spec(rows, columns, bits, group, dtype, rows if gathered else 0, stochastic)
    x, chosen, seed = specs.arguments(spec, key)
    check("segment_quantize", spec, (spoiled(x, key), chosen, seed))


def test_quantize_gathers_in_the_kernel():
    """Rows of several blocks, in any order and more than once; the last block overlaps the one before."""
    specs = OPERATIONS["segment_quantize"].specs
    spec = specs.Spec(3, 128 * 40, 8, chosen=4)
    x, _, _ = specs.arguments(spec, jax.random.key(2))
    check("segment_quantize", spec, (x, jnp.array([2, 0, 2, 1]), None))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_large_groups(bits):
    """Shared by the warps of a warpgroup."""
    specs = OPERATIONS["segment_quantize"].specs
    spec = specs.Spec(2, 1500, bits, 1500)
    check("segment_quantize", spec, specs.arguments(spec, jax.random.key(3)))


@few
@given(
    seeds,
    st.sampled_from((1, 2, 9, 11)),
    st.integers(1, 7),
    st.integers(1, 300),
    st.sampled_from((4, 8)),
    st.sampled_from((2, 48, 128, 1280)),
    st.booleans(),
)
def test_dequantize_any_payloads(key, payloads, rows, columns, bits, group, fitted):
    specs = OPERATIONS["dequantize_sum"].specs
    spec = specs.Spec(payloads, rows, columns, bits, group, fitted)
    quantized, knee = specs.arguments(spec, key)
    spoil = jax.random.randint(key, quantized.codes.shape, 0, 16) == 0
    codes = jnp.where(spoil, jnp.uint8(0x80 if bits == 8 else 0x18), quantized.codes)
    check("dequantize_sum", spec, (quantized._replace(codes=codes), knee))


@few
@given(seeds, st.integers(1, 200), st.sampled_from((64, 128)), st.booleans(), st.booleans(), st.data())
def test_importance_of_any_sequence(key, length, width, causal, padded, data):
    specs = OPERATIONS["attention_importance"].specs
    stride = data.draw(st.integers(1, min(length, 9)))
    spec = specs.Spec(2, length, 2, 1, width, causal, stride, padded)
    check("attention_importance", spec, specs.arguments(spec, key))


@few
@given(seeds, st.integers(1, 200), st.integers(1, 3), st.booleans())
def test_gelu_backward_of_any_rows(key, rows, columns, scaled):
    """Of large inputs too, whose powers are not finite in float32."""
    specs = OPERATIONS["gelu_backward"].specs
    spec = specs.Spec(rows, 256 * columns)
    x, error = specs.arguments(spec, key)
    x = x * jnp.asarray(1e30, x.dtype) if scaled else x
    check("gelu_backward", spec, (x, error))
    with interpreted():
        within_rounding(gelu_backward(x, error, implementation="mosaic"), x, error)
