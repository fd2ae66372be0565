"""Products in 8 bits: what they are, how far from the product they are, and where models use them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from jhpt.core.catalogue import FLOAT8_CAPABILITY
from jhpt.core.errors import InputError
from jhpt.core.families.gpt import GPTConfig
from jhpt.models.family import build
from jhpt.models.products import (
    ERRORS,
    OPERANDS,
    check_products,
    obstacle_to_8_bits,
    plain_product,
    product_in_8_bits,
    scaled,
)
from tests.covers import quick_and_exhaustive
from tests.models.test_models import BERT, GPTS, random_params, tokens

pytestmark = pytest.mark.usefixtures("strict")

UNIT = {OPERANDS: 2.0**-4, ERRORS: 2.0**-3}
"""Half a unit in the last of 4 and 3 digits."""

LEAST = {OPERANDS: 2.0**-10, ERRORS: 2.0**-17}
"""Half of the smallest number of each."""

NUMPY = {OPERANDS: ml_dtypes.float8_e4m3fn, ERRORS: ml_dtypes.float8_e5m2}


def normal(rng, *shape):
    return rng.normal(size=shape)


def with_outliers(rng, *shape):
    return rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 1e3, 1.0)


def over_many_sizes(rng, *shape):
    return rng.normal(size=shape) * 10.0 ** rng.uniform(-8, 0, shape)


def nearly_empty(rng, *shape):
    return rng.normal(size=shape) * (rng.random(shape) < 0.02)


def zeros(rng, *shape):
    return np.zeros(shape)


ENTRIES = (normal, with_outliers, over_many_sizes, nearly_empty, zeros)
SIZES = (1.0, 1e-20, 1e15, 448.0, 2.0**-9)


def scale_of(x, dtype):
    """By its definition, in float64."""
    largest = np.abs(x).max()
    if largest == 0:
        return 1.0
    return max(2.0 ** (np.floor(np.log2(largest / float(ml_dtypes.finfo(NUMPY[dtype]).max))) + 1), 2.0**-126)


def rounded(x, dtype):
    """x as 8 bits and a scale say it, in float64."""
    scale = scale_of(x, dtype)
    return (x / scale).astype(np.float32).astype(NUMPY[dtype]).astype(np.float64) * scale


def most(x, dtype):
    """The bound of `products`: how far the numbers in 8 bits are from x at most, entry by entry."""
    return np.maximum(UNIT[dtype] * np.abs(x), LEAST[dtype] * scale_of(x, dtype))


def float64(x):
    return np.asarray(x, np.float64)


def operands(entries, size, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, kernel = size * entries(rng, 2, 8, 48), entries(rng, 48, 3, 16) / size
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


@pytest.mark.parametrize("dtype", [OPERANDS, ERRORS])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entries", ENTRIES)
def test_an_operand_is_rounded_within_its_bound(entries, size, dtype):
    x, _ = operands(entries, size)
    numbers, scale = scaled(x, dtype)
    product = float64(numbers) * float(scale)
    assert numbers.dtype == dtype and float(scale) == scale_of(float64(x), dtype)
    np.testing.assert_array_equal(product, rounded(float64(x), dtype))
    assert np.all(np.abs(product - float64(x)) <= most(float64(x), dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entries", ENTRIES)
def test_a_product_is_within_its_bound(entries, size):
    """|x^ w^ - x w| <= sum of |x| E_w + E_x |w| + E_x E_w, and what float32 sums lose: 48 2^-24 sum of |x^| |w^|."""
    x, kernel = operands(entries, size)
    actual = product_in_8_bits(x, kernel)
    x, kernel = float64(x), float64(kernel)
    off_x, off_kernel = most(x, OPERANDS), most(kernel, OPERANDS)
    total = np.tensordot(np.abs(x) + off_x, np.abs(kernel) + off_kernel, 1)
    bound = total - np.tensordot(np.abs(x), np.abs(kernel), 1) + 48 * 2.0**-24 * total
    assert actual.dtype == jnp.float32 and actual.shape == (2, 8, 3, 16)
    assert np.all(np.abs(actual - np.tensordot(x, kernel, 1)) <= bound)
    # And it is no further from the product of the rounded operands than float32 is.
    exact = np.tensordot(rounded(x, OPERANDS), rounded(kernel, OPERANDS), 1)
    assert np.all(np.abs(actual - exact) <= 48 * 2.0**-24 * total)


def test_of_normal_numbers_it_is_four_percent_off():
    """Each operand by 2.6 %: the root of 2 of that."""
    x, kernel = operands(normal, 1.0)
    exact = float64(plain_product(x, kernel))
    assert np.linalg.norm(product_in_8_bits(x, kernel) - exact) == pytest.approx(0.037 * np.linalg.norm(exact), rel=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("entries", ENTRIES)
def test_gradients_are_products_of_rounded_operands_and_errors(entries, dtype):
    x, kernel = operands(entries, 1.0, dtype)
    error = jnp.asarray(1e-6 * np.random.default_rng(1).normal(size=(2, 8, 3, 16)), dtype)
    actual = jax.vjp(product_in_8_bits, x, kernel)[1](error)
    x, kernel, error = (rounded(float64(a), kind) for a, kind in ((x, OPERANDS), (kernel, OPERANDS), (error, ERRORS)))
    expected = np.einsum("bshe,dhe->bsd", error, kernel), np.einsum("bsd,bshe->dhe", x, error)
    tolerance = 2e-6 if dtype == jnp.float32 else 2.0**-8
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert np.abs(float64(one) - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_powers_of_two_go_through_unchanged(dtype):
    x, kernel = operands(with_outliers, 1.0, dtype)
    larger = product_in_8_bits(x * jnp.asarray(2.0**40, dtype), kernel * jnp.asarray(2.0**-60, dtype))
    np.testing.assert_array_equal(float64(larger) * 2.0**20, float64(product_in_8_bits(x, kernel)))


def test_what_else_is_there_changes_no_digit():
    """As long as numbers are at least 2^-6 of the scale: rows beside a row that is 1,000 times as large."""
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.uniform(1, 2, (4, 48)), jnp.float32), jnp.asarray(rng.normal(size=(48, 8)), jnp.float32)
    beside = jnp.concatenate([x, 1000 * x])
    np.testing.assert_allclose(
        product_in_8_bits(beside, kernel)[:4], product_in_8_bits(x, kernel), rtol=1e-5, atol=1e-5
    )
    assert scaled(beside, OPERANDS).scale > 256 * scaled(x, OPERANDS).scale


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_seen(bad):
    """So that the step is skipped."""
    x, kernel = operands(normal, 1.0)
    for y in (product_in_8_bits(x.at[0, 0, 0].set(bad), kernel), product_in_8_bits(x, kernel.at[0, 0, 0].set(bad))):
        assert np.isnan(y).all()
    y, backward = jax.vjp(product_in_8_bits, x, kernel)
    assert all(np.isnan(one).all() for one in backward(y.at[0, 0, 0, 0].set(bad)))


def test_operands_below_float32_are_zero():
    x = jnp.full((4, 48), 1e-30, jnp.float32)
    assert not product_in_8_bits(x, x.T).any()
    assert np.isfinite(scaled(jnp.full(3, 1e-45, jnp.float32), OPERANDS).scale)


# In models.


def dots(jaxpr):
    """Operands' dtypes of every product, functions called inside included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(var.aval.dtype.name for var in equation.invars)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from dots(inner)


@pytest.mark.parametrize("config", quick_and_exhaustive([*GPTS.values(), BERT], [GPTS["llama"], BERT]))
def test_four_products_of_a_block_are_in_8_bits(config):
    """And so are both gradients of each; attention's two, and their gradients, are not."""
    model = build(config.model_copy(update={"matmul_dtype": "float8"}))
    blocks = jax.eval_shape(model.init, jax.random.key(0))["blocks"]
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks)
    x = jax.ShapeDtypeStruct((2, 16, config.d_model), jnp.float32)
    products = list(
        dots(jax.make_jaxpr(jax.grad(lambda layer, x: jnp.sum(model.block(layer, x)), (0, 1)))(layer, x).jaxpr)
    )
    assert products.count(("float8_e4m3fn", "float8_e4m3fn")) == 4
    assert products.count(("float8_e5m2", "float8_e4m3fn")) == products.count(("float8_e4m3fn", "float8_e5m2")) == 4
    assert products.count(("float32", "float32")) == len(products) - 12 == 6


@pytest.mark.parametrize("name", quick_and_exhaustive(GPTS, ["llama"]))
def test_a_model_in_8_bits_is_near_itself(name):
    plain, few = build(GPTS[name]), build(GPTS[name].model_copy(update={"matmul_dtype": "float8"}))
    params, ids = random_params(plain), tokens()
    assert jax.tree.structure(jax.eval_shape(few.init, jax.random.key(0))) == jax.tree.structure(params)
    one, other = (float64(jax.jit(model.apply)(params, ids))[..., :200] for model in (plain, few))
    assert 1e-3 < np.linalg.norm(other - one) / np.linalg.norm(one) < 0.15


# What is refused.


def test_only_devices_that_multiply_in_8_bits_do():
    few = GPTConfig(matmul_dtype="float8")
    for platform, capability, reason in (
        ("cpu", None, "the device is a cpu"),
        ("rocm", None, "the device is a rocm"),
        ("gpu", 8.0, "compute capability 8.0 is below 8.9"),
        ("cuda", None, "compute capability None is below 8.9"),
    ):
        assert obstacle_to_8_bits(platform, capability) == reason
        with pytest.raises(InputError, match=f"{reason}; use model.matmul_dtype=same"):
            check_products(few, platform, capability)
        check_products(GPTConfig(), platform, capability)
    for capability in (FLOAT8_CAPABILITY, 9.0, 12.0):
        check_products(few, "gpu", capability)


def test_there_is_no_other_way():
    with pytest.raises(ValidationError, match="'same' or 'float8'"):
        GPTConfig(matmul_dtype="float4")
