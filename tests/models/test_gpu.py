"""What only a GPU can show; run with `pytest -m gpu -n 0` there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.models.attention import attention
from jhpt.models.context import Context
from jhpt.models.products import ERRORS, OPERANDS, product_in_8_bits
from tests.models.test_products import float64, rounded

pytestmark = pytest.mark.gpu

CASES = {
    "gpt2": dict(heads=12, kv_heads=12, width=64, causal=True, padded=False),
    "gpt2, documents": dict(heads=12, kv_heads=12, width=64, causal=True, padded=False, documents=True),
    "llama, documents": dict(heads=8, kv_heads=2, width=128, causal=True, padded=False, documents=True),
    "bert, documents": dict(heads=16, kv_heads=16, width=64, causal=False, padded=False, documents=True),
    "llama": dict(heads=8, kv_heads=2, width=128, causal=True, padded=False),
    "bert": dict(heads=16, kv_heads=16, width=64, causal=False, padded=True),
}


@pytest.mark.parametrize("name", CASES)
def test_cudnn_attention_is_the_float32_one(name):
    """Values and gradients in bfloat16, as far from XLA's float32 as 8 mantissa bits allow."""
    case = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (2, 256, case["heads"], case["width"])
    kv_shape = (2, 256, case["kv_heads"], case["width"])
    q, k, v, mix = (
        jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, (shape, kv_shape, kv_shape, shape), strict=True)
    )
    lengths = jnp.array([256, 100]) if case["padded"] else None
    starts = jnp.repeat(jnp.array([[0, 3, 64, 200], [0, 1, 100, 130]]), jnp.array([3, 61, 136, 56]), axis=1)
    context = Context(
        documents=jnp.minimum(starts, jnp.arange(256)[None]) if case.get("documents") else None, lengths=lengths
    )

    def loss(q, k, v, implementation):
        out = attention(q, k, v, causal=case["causal"], context=context, implementation=implementation)
        # Rows of padding queries are arbitrary.
        rows = jnp.arange(256)[None] < (jnp.full(2, 256) if lengths is None else lengths)[:, None]
        return jnp.sum(jnp.where(rows[..., None, None], out.astype(jnp.float32) * mix.astype(jnp.float32), 0.0))

    fast = jax.jit(jax.grad(lambda *x: loss(*x, "cudnn"), argnums=(0, 1, 2)))(q, k, v)
    exact = jax.jit(jax.grad(lambda *x: loss(*x, "xla"), argnums=(0, 1, 2)))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    for a, b in zip(fast, exact, strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() <= 2**-5 * np.abs(b).max()


def test_products_in_8_bits_are_of_rounded_operands():
    """In bfloat16, and with sums as short as tensor cores keep them: 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 128, 512), (512, 2, 256), (4, 128, 2, 256)
    x, kernel, error = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))

    def both(x, kernel, error):
        y, backward = jax.vjp(product_in_8_bits, x, kernel)
        return y, *backward(error)

    actual = jax.jit(both)(x, kernel, error)
    assert all(np.isnan(one).all() for one in jax.jit(both)(x.at[0, 0, 0].set(jnp.inf), kernel, error)[::2])
    kinds = (x, OPERANDS), (kernel, OPERANDS), (error, ERRORS)
    x, kernel, error = (rounded(float64(a), kind) for a, kind in kinds)
    expected = (
        np.einsum("bsd,dhe->bshe", x, kernel),
        np.einsum("bshe,dhe->bsd", error, kernel),
        np.einsum("bsd,bshe->dhe", x, error),
    )
    for one, other in zip(actual, expected, strict=True):
        assert np.linalg.norm(float64(one) - other) <= 2.0**-8 * np.linalg.norm(other)
