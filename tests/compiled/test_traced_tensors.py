"""Named tensors as they are traced are those that the planner reckons with."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jhpt.core.catalogue import device_named
from jhpt.core.load import load_config
from jhpt.models.family import build
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.parts import KeyedContext, make_parts
from tests.compiled.traced_tensors import traced_tensors

SMALL = {"model.attention": "xla", "model.dtype": "bfloat16", "model.num_layers": 1, "data.sequence_length": 64}
MODELS = {
    "gpt": ("gpt-tiny", {}),
    "llama": (
        "gpt-tiny",
        {"model.num_kv_heads": 2, "model.positions": "rotary", "model.activation": "swiglu", "model.norm": "rmsnorm"},
    ),
    "bert": ("bert-tiny", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_has_the_tensors_of_the_analytic_profile(name):
    preset, changes = MODELS[name]
    config = load_config(preset, SMALL | changes)
    model = build(config.model, dtype=jnp.bfloat16)
    block = make_parts(model, config.data, ByteTokenizer(), 0.0, train=True).block
    params = jax.eval_shape(model.init, jax.random.key(0))["blocks"]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    x = jax.ShapeDtypeStruct((3, config.data.sequence_length, config.model.d_model), jnp.bfloat16)
    at = KeyedContext(jax.random.split(jax.random.key(2), 3)), jnp.int32(3)
    expected = analytic_profile(config, device_named("h100")).kinds["block"].tensors
    sharded = [tensor.name for tensor in expected if tensor.sharded]
    traced = traced_tensors(block, params, x, at, sharded=sharded)
    # One device sums nothing; what weight passes read is the profile's own.
    assert traced == tuple(tensor.model_copy(update={"summed": False, "operand_bytes": 0.0}) for tensor in expected)


def test_branches_and_calls():
    """a -> b, c -> d, with a product that b and c share, and e, which is only added."""

    @jax.jit
    def joined(b, c, w):
        return checkpoint_name(jnp.tanh(b + c) @ w, "d")

    def layer(w, x, keys):
        a = checkpoint_name(x @ w, "a")
        shared = jnp.sin(a) @ w
        b, c = checkpoint_name(jnp.sin(shared), "b"), checkpoint_name(shared @ w, "c")
        d = joined(b, c, w)
        return x + checkpoint_name(jnp.square(d) @ w, "e")

    x, w = jnp.ones((2, 3, 8)), jnp.ones((8, 8))
    traced = {tensor.name: tensor for tensor in traced_tensors(layer, w, x, None, sharded=("a",))}
    product = 2.0 * 3 * 8 * 8
    assert [tensor.inputs for tensor in traced.values()] == [(), ("a",), ("a",), ("b", "c"), ("d",)]
    assert [tensor.flops / product for tensor in traced.values()] == [1, 1, 2, 1, 1]
    assert {tensor.bytes for tensor in traced.values()} == {3 * 8 * 4.0}
    assert [name for name, tensor in traced.items() if tensor.read] == ["a", "b", "c", "d"]
    assert [name for name, tensor in traced.items() if tensor.sharded] == ["a"]
