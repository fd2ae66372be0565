"""Segmented quantization: what it keeps, what it shows, and that it beats uniform quantization at equal total bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quantization import DISTRIBUTIONS, charged_errors, relative, relative_errors
from jhpt.core.compression import BLOCK, codes_in_row
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.dequantize_sum.reference import unpacked
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segment_quantize.reference import packed, rounded_up, uniform
from jhpt.kernels.segments import Knee, fit_knee, knee_for, most

REFERENCE = {"implementation": "reference"}
GROUPS = (512, 128, 2)


summed = jax.jit(partial(dequantize_sum, **REFERENCE), static_argnames=("columns", "bits", "group"))


def decoded(payload, **options):
    """The numbers of one payload."""
    return summed(jax.tree.map(lambda leaf: leaf[None], payload), **options)


quantized = jax.jit(partial(segment_quantize, **REFERENCE), static_argnames=("bits", "group"))


@partial(jax.jit, static_argnames=("bits", "group"))
def there_and_back(x, bits, group, seed=None):
    payload = segment_quantize(x, bits=bits, group=group, seed=seed, **REFERENCE)
    return payload, decoded(payload, columns=x.shape[1], bits=bits, group=group)


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from((4, 8)),
    st.sampled_from(GROUPS),
    st.sampled_from(("float32", "bfloat16")),
    st.integers(0, 9),
)
@settings(max_examples=24, deadline=None, derandomize=True)
@pytest.mark.exhaustive
def test_errors_are_at_most_half_the_coarse_step(rows, columns, bits, group, dtype, seed):
    check_errors(rows, columns, bits, group, dtype, seed)


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group", "dtype"),
    [(5, 300, 4, 128, "float32"), (2, 130, 8, 512, "bfloat16"), (1, 1, 4, 2, "bfloat16"), (3, 257, 8, 2, "float32")],
)
def test_errors_of_some_shapes_are_at_most_half_the_coarse_step(rows, columns, bits, group, dtype):
    for seed in range(4):
        check_errors(rows, columns, bits, group, dtype, seed)


def check_errors(rows, columns, bits, group, dtype, seed):
    x = jax.random.t(jax.random.key(seed), 3, (rows, columns)).astype(dtype)
    payload, back = there_and_back(x, bits, group)
    assert payload.codes.shape == (rows, codes_in_row(columns, group) * bits // 8)
    values, ranges, back = (np.asarray(leaf, np.float32) for leaf in (x, payload.ranges, back))
    ranges = ranges.repeat(group, 1)[:, :columns]
    assert np.all(np.abs(values) <= ranges), "a range is rounded up"
    knee = knee_for(bits, group)
    step = max(float(knee.centre / knee.codes), float((1 - knee.centre) / (most(bits) - knee.codes)))
    assert np.all(np.abs(back - values) <= ranges * (step / 2 + 2**-15))
    assert np.all((back == 0) | (np.sign(back) == np.sign(values)))


@pytest.mark.parametrize("bits", (4, 8))
def test_uniform_quantization_is_a_bend_on_the_diagonal(bits):
    top = most(bits)
    x = jnp.arange(-top, top + 1, dtype=jnp.float32)[None]
    codes = unpacked(quantized(x, bits=bits, group=256, knee=Knee(1 / top, 1.0)).codes, bits)
    assert np.array_equal(codes[0, : x.size], x[0])


@pytest.mark.parametrize("bits", (4, 8))
def test_codes_are_packed_without_loss(bits):
    codes = jnp.arange(-most(bits) - 1, most(bits) + 1, dtype=jnp.int8)[None]
    assert np.array_equal(unpacked(packed(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_stays_visible(bits, group):
    """All that shares a range with it is NaN, nothing else."""
    x = jnp.ones((3, 512)).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf).at[1, 200].set(-jnp.inf)
    payload, back = there_and_back(x, bits, group)
    bad = np.any(~np.isfinite(np.asarray(x).reshape(-1, group)), 1)
    assert np.array_equal(np.isnan(back), bad.repeat(group).reshape(x.shape))
    assert np.allclose(back[~np.isnan(back)], 1, atol=1e-4)
    codes = np.asarray(unpacked(payload.codes.reshape(-1, group * bits // 8), bits)).reshape(x.shape)
    assert np.array_equal(codes == -most(bits) - 1, ~np.isfinite(x))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_too_large_stays_visible(group):
    """A range beyond 2^126 has no reciprocal on every device: never zeros instead of it."""
    _, back = there_and_back(jnp.full((3, 130), 1e38), 8, group)
    assert np.all(np.isnan(back))
    _, back = there_and_back(jnp.full((3, 130), 2.0**126), 8, group)
    assert np.allclose(back, 2.0**126, rtol=1 / 128)


@pytest.mark.parametrize("value", (0.0, 1.5, -3.0, 1e-30, 1e30, 1e-44))
@pytest.mark.parametrize("group", GROUPS)
def test_rows_of_one_value(value, group):
    """The largest magnitude is hit up to the range's rounding; nothing becomes NaN."""
    _, back = there_and_back(jnp.full((3, 130), value), 8, group)
    assert np.allclose(back, value, rtol=1 / 128, atol=1e-37)


def test_empty_rows():
    payload, back = there_and_back(jnp.zeros((0, 128)), 8, 128)
    assert payload.codes.shape == (0, 128) and back.shape == (0, 128)


def test_ranges_are_rounded_up_to_bfloat16():
    x = jnp.array([0.0, 1.0, 1.0 + 2**-20, 3.14159, 1e-38])
    up = np.asarray(rounded_up(x), np.float32)
    assert np.all(up >= x) and up[1] == 1.0 and up[2] == 1 + 2**-7


def test_rows_are_gathered_before():
    x = jax.random.normal(jax.random.key(0), (6, 256))
    rows = jnp.array([4, 0, 0])
    gathered, expected = quantized(x, rows=rows), quantized(x[rows])
    assert np.array_equal(gathered.codes, expected.codes) and np.array_equal(gathered.ranges, expected.ranges)


@pytest.mark.parametrize("bits", (4, 8))
def test_stochastic_rounding_has_the_right_mean(bits):
    x = jnp.linspace(-1, 1, 64).reshape(1, 64)
    total = np.zeros((1, 64))
    for seed in range(400):
        total += np.asarray(there_and_back(x, bits, 64, jnp.uint32(seed))[1])
    step = 1 / 2 / (most(bits) - {8: 82, 4: 5}[bits])
    assert np.abs(total / 400 - x).max() < 4 * step / 2 / 20  # 400 draws, deviation at most half a step


def test_random_numbers_are_spread_evenly():
    draws = np.asarray(uniform(jnp.uint32(3), 64, 1024))
    assert draws.min() >= 0 and draws.max() < 1
    assert np.abs(np.histogram(draws, 16, (0, 1))[0] / draws.size - 1 / 16).max() < 2e-3
    other = np.asarray(uniform(jnp.uint32(4), 64, 1024))
    assert abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.02


def test_a_fitted_knee_is_better_for_its_numbers():
    x = jax.random.t(jax.random.key(0), 5, (1, 4096))

    def error(knee):
        payload = quantized(x, bits=4, group=4096, knee=knee)
        return np.mean(np.square(decoded(payload, columns=4096, bits=4, group=4096, knee=knee) - x))

    assert error(jax.jit(fit_knee, static_argnums=(1, 2))(x, 4, 4096)) < error(knee_for(4, 4096))


def test_payloads_are_summed_in_order():
    x = jax.random.normal(jax.random.key(1), (3, 4, 256))
    payloads = [quantized(each) for each in x]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)
    actual = summed(together, columns=256)
    parts = [decoded(payload, columns=256) for payload in payloads]
    assert np.array_equal(actual, (parts[0] + parts[1]) + parts[2])


def test_refusals():
    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match="bits=3"):
        segment_quantize(x, bits=3, **REFERENCE)
    with pytest.raises(ValueError, match="group=7"):
        segment_quantize(x, group=7, **REFERENCE)


MOST = {8: (0.62, 0.32, 0.13), 4: (0.90, 0.40, 0.16)}
"""Of uniform quantization's error with one range for the tensor: Gaussian, Laplace, Student-t(5)."""


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_segments_of_blocks_beat_uniform_quantization(name):
    x = DISTRIBUTIONS[name](np.random.default_rng(0), 1 << 16).astype(np.float32).reshape(-1, BLOCK)
    assert relative(charged_errors(x, 4, BLOCK)) < 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", MOST)
def test_segments_beat_uniform_quantization_at_equal_total_bits(bits):
    for name, most_of_uniform in zip(DISTRIBUTIONS, MOST[bits], strict=True):
        errors = relative_errors(name, bits, numbers=1 << 18, seed=0)
        assert errors["tensor"] <= most_of_uniform, name
        assert errors["row"] < 1 and errors["block"] < 1, name
