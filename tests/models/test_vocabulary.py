"""Logits that are stored in 16 bits: everything after the rounding is what it is in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.gpt import GPTConfig
from jhpt.models.family import Objective, Rows
from jhpt.models.gpt import GPT
from jhpt.models.hooks import Hooks
from jhpt.models.vocabulary import project_to_vocabulary, token_nll

OBJECTIVE = Objective(z_loss=0.0, mask_fraction=0.15, tokens=None)

HOOKS = pytest.mark.parametrize("hooks", [Hooks(), Hooks(alone=True)], ids=["plain", "alone"])


@HOOKS
def test_the_loss_of_rounded_logits_is_in_float32(hooks):
    logits = 4 * jax.random.normal(jax.random.key(0), (3, 5, 64), jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 64)

    def loss(logits):
        nll, log_z = token_nll(logits, targets, hooks)
        assert nll.dtype == log_z.dtype == jnp.float32
        return jnp.sum(nll) + 0.1 * jnp.sum(jnp.square(log_z))

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    exact, wide = jax.jit(jax.value_and_grad(loss))(logits.astype(jnp.float32))
    assert value == exact
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), wide, rtol=2**-8, atol=1e-7)


def test_products_are_summed_in_float32_and_rounded_once():
    x, table = (
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed, shape in ((0, (7, 512)), (1, (128, 512)))
    )
    wide, stored = (
        project_to_vocabulary(x, table, 100, jnp.bfloat16, Hooks(), dtype) for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(stored, wide.astype(jnp.bfloat16))
    assert np.all(np.isneginf(stored[:, 100:].astype(jnp.float32)))


@pytest.mark.parametrize(("hooks", "tied"), [(Hooks(), True), (Hooks(alone=True), False)], ids=["plain", "alone"])
def test_gradients_differ_by_a_rounding(hooks, tied):
    rows = Rows(jax.random.randint(jax.random.key(2), (2, 17), 0, 60))
    results = []
    for stored in ("float32", "same"):
        config = GPTConfig(vocab_size=60, d_model=32, max_length=16, num_heads=2, tied=tied, logits_dtype=stored)
        model = GPT(config=config, dtype=jnp.bfloat16, hooks=hooks)
        params = model.init_embedding_and_head(jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, 16, 32), jnp.bfloat16)
        assert model.logits(params, x).dtype == jnp.float32

        def loss(params, x, model=model):
            return model.loss(params, x, rows, jax.random.key(0), OBJECTIVE).loss

        results.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x))
    for one, other in zip(*(jax.tree.leaves(each) for each in results), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(one)
    assert not all(
        np.array_equal(one, other) for one, other in zip(*(jax.tree.leaves(each) for each in results), strict=True)
    )
