"""A layer opened up: what its forward pass keeps, and that its backward pass is autodiff's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import DataConfig
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.load import load_config
from jhpt.core.plan import SavedTensors
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.models.context import Context
from jhpt.models.family import build
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.sharding.layer_vjp import split_layer
from jhpt.sharding.recompute import save_named, save_nothing
from jhpt.sharding.sample_chunks import ChunkedSamples
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.parts import KeyedContext, make_parts
from jhpt.training.setup import layer_policy
from tests.sharding.plans import compiled

ROWS, LENGTH, WIDTH, HEADS, FFN = 2, 6, 24, 4, 40
SHAPE = dict(vocab_size=200, num_layers=1, d_model=WIDTH, num_heads=HEADS, max_length=8, d_ff=FFN)
MODELS = {
    "gpt": GPTConfig(**SHAPE, dropout=0.1),
    "llama": GPTConfig(
        **SHAPE, num_kv_heads=2, positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False
    ),
    "bert": BERTConfig(**SHAPE, dropout=0.1),
}
WRAPPED = {"everything": lambda block: block, "named": save_named(NAMED_TENSORS), "input": save_nothing}


def layer_of(name, wrapped="everything", dtype=jnp.float32):
    """(block, random parameters)"""
    block, params = block_of(MODELS[name], dtype)
    return WRAPPED[wrapped](block), params


def block_of(config, dtype=jnp.float32):
    """(the block of a model, random parameters)"""
    model = build(config, dtype=dtype)
    block = make_parts(model, DataConfig(), ByteTokenizer(), 0.0, train=True).block
    shapes = jax.eval_shape(model.init, jax.random.key(0))["blocks"]
    rng = np.random.default_rng(0)
    return block, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape[1:]), leaf.dtype), shapes)


def inputs(rows=ROWS, dtype=jnp.float32):
    """(x, (context, layer))"""
    x = jax.random.normal(jax.random.key(1), (rows, LENGTH, WIDTH), dtype)
    return x, (KeyedContext(jax.random.split(jax.random.key(2), rows)), jnp.int32(3))


def shapes_of(split):
    return sorted(saved.shape for saved in split.shapes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_that_does_not_grow_with_the_rows(name, wrapped, dtype):
    """Parameters, their casts, masks of positions and rotation tables do not; keys are told by their dtype."""
    block, params = layer_of(name, wrapped, dtype)
    few, many = (split_layer(block, params, *inputs(rows, dtype)) for rows in (2, 6))
    assert len(few.shapes) == len(many.shapes) > 0
    for two, six in zip(few.shapes, many.shapes, strict=True):
        assert (3 * two.size, two.dtype) == (six.size, six.dtype)
        assert not jax.dtypes.issubdtype(two.dtype, jax.dtypes.prng_key)
    assert {source for source, _ in few.sources} <= {"parameter", "context", "saved", "recomputed"}


@pytest.mark.parametrize("name", MODELS)
def test_save_named_keeps_named_tensors_only(name):
    """The input, which is named too, and what the products left; what follows the last one is not read again, except
    by BERT's norm."""
    config = MODELS[name]
    split = split_layer(*layer_of(name, "named"), *inputs())
    width = HEADS // config.kv_heads + 2
    gate = (2,) if name == "llama" else ()
    stream = (ROWS, LENGTH, WIDTH)
    expected = {
        "residual_in": stream,
        "qkv": (ROWS, LENGTH, config.kv_heads, width, WIDTH // HEADS),
        "attention_out": stream,
        "projection_out": stream,
        "mlp_hidden": (ROWS, LENGTH, *gate, FFN),
    } | ({"mlp_out": stream} if name == "bert" else {})
    assert expected.keys() <= set(NAMED_TENSORS)
    assert shapes_of(split) == sorted(expected.values())


@pytest.mark.parametrize("wrapped", ["named", "input"])
@pytest.mark.parametrize("name", MODELS)
def test_no_mask_of_documents_is_kept(name, wrapped):
    """It is made again from where they start, which a pipeline does not store with each block either."""
    block, params = layer_of(name, wrapped)
    x, (rows, layer) = inputs()
    apart = rows._replace(model=Context(documents=jnp.zeros((ROWS, LENGTH), jnp.int32)))
    split = split_layer(block, params, x, (apart, layer))
    assert shapes_of(split) == shapes_of(split_layer(block, params, x, (rows, layer)))
    assert ("context", len(jax.tree.leaves(rows))) in split.sources


@pytest.mark.parametrize("name", MODELS)
def test_keep_nothing_keeps_the_input_only(name):
    block, params = layer_of(name, "input")
    x, keys = inputs()
    split = split_layer(block, params, x, keys)
    assert shapes_of(split) == [x.shape]
    (saved,) = compiled(split.forward, params, x, keys)[1]
    np.testing.assert_array_equal(saved, x)


@pytest.mark.parametrize("host", [(), ("residual_in",)], ids=("device", "host"))
@pytest.mark.parametrize("name", MODELS)
def test_inputs_in_chunks_are_kept_once(name, host):
    """Of GPT's blocks, where the last chunk's input is no more than the sum of its parts; of BERT's it is their norm,
    for which both parts stay on the device.  The planner counts on that."""
    config = load_config("gpt-tiny", {"parallel.tensor": 2, "parallel.sample_chunks": 2, "memory.recompute": "full"})
    plan = plan_by_hand(config, 2).model_copy(update={"saved": SavedTensors(host=host) if host else None})
    policy = layer_policy(plan, few=True, loop=True, sums=name != "bert")
    model = build(MODELS[name], dtype=jnp.float32)
    halves = make_parts(model, DataConfig(), ByteTokenizer(), 0.0, train=True).halves
    chunked, (x, at) = ChunkedSamples(halves=halves, chunks=2, in_turn=True), inputs()
    params = layer_of(name)[1]
    split = split_layer(policy(chunked.layer), params, chunked.opened(params, x, at), at)
    of_samples = [tensor for tensor in split.shapes if len(tensor.shape) == x.ndim]
    assert {tensor.shape for tensor in of_samples} == {(ROWS // 2, LENGTH, WIDTH)}
    here = [tensor for tensor in of_samples if tensor.memory_space == jax.memory.Space.Device]
    cluster = find_cluster("h100x1x1")
    profile = analytic_profile(load_config("bert-tiny" if name == "bert" else "gpt-tiny"), cluster.nodes[0].device)
    costs = CostModel(profile, cluster)
    assert len(here) / 2 == costs.activations.input_shares(2)[bool(host)]
    assert len(of_samples) - len(here) == (2 if host else 0)
    assert all(len(tensor.shape) == 1 for tensor in split.shapes if tensor not in of_samples)


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_autodiff(name, wrapped):
    block, params = layer_of(name, wrapped)
    x, keys = inputs()
    error = jax.random.normal(jax.random.key(4), x.shape)

    def both(params, x, keys, error):
        split = split_layer(block, params, x, keys)
        y, saved = split.forward(params, x, keys)
        expected, pull = jax.vjp(lambda params, x: block(params, x, keys), params, x)
        return (y, *split.backward(params, keys, saved, error)), (expected, *pull(error))

    actual, expected = compiled(both, params, x, keys, error)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_backward_reads_the_parameters_it_is_given():
    """y = tanh(x w): the gradient of x runs through w as it is now, that of w through what was kept of x."""
    block = lambda w, x, keys: jnp.tanh(x @ w)  # noqa: E731
    x, keys = inputs()
    first, second = (jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH)) for seed in (5, 6))
    split = split_layer(block, first, x, keys)
    y, saved = split.forward(first, x, keys)
    gradient, down = split.backward(second, keys, saved, jnp.ones_like(x))
    slope = 1 - y**2
    np.testing.assert_allclose(down, slope @ second.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, jnp.einsum("bsi,bso->io", x, slope), rtol=1e-4, atol=1e-4)


def test_masks_of_positions_are_had_again():
    """What depends neither on x nor on keys is computed in the backward pass."""

    def block(w, x, keys):
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH))) / jnp.arange(1.0, LENGTH + 1)[:, None]
        return jnp.einsum("qk,bkd->bqd", seen, x) * w

    x, keys = inputs()
    w = jnp.full((1, 1, WIDTH), 2.0)
    split = split_layer(block, w, x, keys)
    assert all(shape != (LENGTH, LENGTH) for shape in shapes_of(split))
    assert "recomputed" in {source for source, _ in split.sources}
    _, saved = split.forward(w, x, keys)
    expected = jax.vjp(lambda w, x: block(w, x, keys), w, x)[1](x)
    for one, other in zip(split.backward(w, keys, saved, x), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_tensor_read_twice_is_kept_once():
    block = lambda w, x, keys: jnp.sin(x * w) + jnp.cos(x * w)  # noqa: E731
    x, keys = inputs()
    split = split_layer(block, jnp.ones((1, 1, WIDTH)), x, keys)
    saved = [index for source, index in split.sources if source == "saved"]
    assert sorted(set(saved)) == list(range(len(split.shapes)))
