"""What only a GPU can show; run with `pytest -m gpu -n 0` there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.models.attention import attention

pytestmark = pytest.mark.gpu

CASES = {
    "gpt2": dict(heads=12, kv_heads=12, width=64, causal=True, padded=False),
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

    def loss(q, k, v, implementation):
        out = attention(q, k, v, causal=case["causal"], lengths=lengths, implementation=implementation)
        # Rows of padding queries are arbitrary.
        rows = jnp.arange(256)[None] < (jnp.full(2, 256) if lengths is None else lengths)[:, None]
        return jnp.sum(jnp.where(rows[..., None, None], out.astype(jnp.float32) * mix.astype(jnp.float32), 0.0))

    fast = jax.jit(jax.grad(lambda *x: loss(*x, "cudnn"), argnums=(0, 1, 2)))(q, k, v)
    exact = jax.jit(jax.grad(lambda *x: loss(*x, "xla"), argnums=(0, 1, 2)))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    for a, b in zip(fast, exact, strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() <= 2**-5 * np.abs(b).max()
