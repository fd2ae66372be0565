"""The MLP of a GPU that runs a whole model: the same function as the plain one, and nothing more is saved."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jhpt.models.hooks import Hooks
from jhpt.models.layers import MLPHalf
from jhpt.models.repeated import plus
from jhpt.sharding.recompute import save_named

ALONE = Hooks(alone=True)
SHAPE = 2, 64, 32


def half(hooks, *, activation="gelu", dtype=jnp.float32, bias=True, hidden=256, products="same"):
    return MLPHalf(SHAPE[-1], hidden, activation, dtype, hooks, 0.5, bias, products)


def loss_and_gradients(mlp, params, x, mix):
    def loss(params, x):
        part, bias = mlp.apply({"params": params}, x, None, None)
        out = part if bias is None else plus(part, bias)
        return jnp.sum(out.astype(jnp.float32) * mix)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


def case(mlp):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], SHAPE, mlp.dtype)
    params = mlp.init(keys[1], x, None, None)["params"]
    leaves, tree = jax.tree.flatten(params)
    spread = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys[2:], leaves[:2], strict=False)]
    return jax.tree.unflatten(tree, spread + leaves[2:]), x, jax.random.normal(keys[3], SHAPE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu_exact"},
        {"activation": "swiglu", "bias": False},
        {"activation": "swiglu"},
        {"bias": False},
        {"products": "float8"},
    ],
    ids=str,
)
def test_is_the_plain_one(changes):
    plain = half(Hooks(), **changes)
    arguments = case(plain)
    one, other = loss_and_gradients(plain, *arguments), loss_and_gradients(half(ALONE, **changes), *arguments)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="kernels are interpreted from jax 0.11.2 on")
@pytest.mark.parametrize("bias", [True, False])
def test_with_the_kernel(bias):
    """In bfloat16, as near to float32 as without the kernel."""
    exact = half(Hooks(), bias=bias)
    params, x, mix = case(exact)
    x = x.astype(jnp.bfloat16)
    expected = loss_and_gradients(exact, params, x.astype(jnp.float32), mix)
    plain = loss_and_gradients(half(Hooks(), bias=bias, dtype=jnp.bfloat16), params, x, mix)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        hooks = replace(ALONE, kernels="mosaic")
        actual = loss_and_gradients(half(hooks, bias=bias, dtype=jnp.bfloat16), params, x, mix)

    def distances(results):
        pairs = zip(jax.tree.leaves(results[1]), jax.tree.leaves(expected[1]), strict=True)
        return [np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b) for a, b in pairs]

    for one, other in zip(distances(actual), distances(plain), strict=True):
        assert one <= 1.1 * other <= 0.02


@pytest.mark.parametrize("hooks", [Hooks(), ALONE], ids=["plain", "alone"])
def test_saves_the_activations_input_alone(hooks):
    """Beside x and the parameters."""
    mlp = half(hooks)
    params, x, _ = case(mlp)
    layer = save_named(["mlp_hidden"])(lambda params, x: mlp.apply({"params": params}, x, None, None)[0])
    saved = jax.tree.leaves(jax.vjp(layer, params, x)[1])
    given = {leaf.shape for leaf in jax.tree.leaves((params, x))}
    assert [leaf.shape for leaf in saved if leaf.shape not in given] == [(*SHAPE[:2], 256)]
