"""Models are what their definitions say, see only what they may, and have the size that `core.families` predicts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.load import load_config
from jhpt.core.presets import PRESETS
from jhpt.models.context import Context
from jhpt.models.family import build
from jhpt.models.hooks import Hooks
from jhpt.models.layers import dropout, layer_keys
from tests.covers import quick_and_exhaustive
from tests.models import naive

pytestmark = pytest.mark.usefixtures("strict")

SHAPE = dict(vocab_size=200, num_layers=2, d_model=48, num_heads=6, max_length=16)
GPTS = {
    "gpt2": GPTConfig(**SHAPE),
    "llama": GPTConfig(
        **SHAPE,
        num_kv_heads=2,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=False,
        d_ff=80,
    ),
    "mixed": GPTConfig(**SHAPE, num_kv_heads=1, positions="rotary", norm="layernorm", activation="swiglu"),
}
BERT = BERTConfig(**SHAPE)


def random_params(model, seed=0):
    """Every leaf random: zero biases and unit scales would hide mistakes."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.0, 0.3, s.shape), s.dtype), shapes)


def tokens(rows=3, length=16, seed=1):
    return np.random.default_rng(seed).integers(0, 200, (rows, length))


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(actual, expected, tolerance=2e-5):
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", GPTS)
def test_gpt_is_its_float64_definition(name):
    model = build(GPTS[name])
    params, ids = random_params(model), tokens()
    logits = jax.jit(model.apply)(params, ids)
    assert np.all(np.isneginf(logits[..., 200:]))
    for row, expected in zip(logits, (naive.gpt(GPTS[name], float64(params), i) for i in ids), strict=True):
        close(row[:, :200], expected)


def test_bert_is_its_float64_definition():
    model = build(BERT)
    params, ids, lengths = random_params(model), tokens(), np.array([16, 9, 1], np.int32)
    types = (np.arange(16) > 6).astype(np.int32) * np.ones((3, 1), np.int32)
    x = jax.jit(model.encode)(params, ids, context=Context(lengths=lengths, types=types))
    logits, pooled = model.logits(params, x), model.pool(params, x)
    for row in range(3):
        expected, vector = naive.bert(BERT, float64(params), ids[row], types[row], lengths[row])
        close(logits[row, : lengths[row], :200], expected[: lengths[row]])
        close(pooled[row], vector)


def test_a_classifier_is_its_float64_definition():
    """A linear layer on what `naive.bert` pools; its embedding and blocks are those of pre-training."""
    model, whole = build(BERTConfig(**SHAPE, task="classify", num_classes=3)), random_params(build(BERT))
    params = random_params(model)
    ids, lengths = tokens(), np.array([16, 9, 1], np.int32)
    types = (np.arange(16) > 6).astype(np.int32) * np.ones((3, 1), np.int32)
    logits = jax.jit(model.apply)(params, ids, context=Context(lengths=lengths, types=types))
    for row in range(3):
        _, pooled = naive.bert(BERT, float64(params | {"head": whole["head"]}), ids[row], types[row], lengths[row])
        close(logits[row], naive.linear(pooled, float64(params["head"]["classifier"])))


@pytest.mark.parametrize("name", quick_and_exhaustive([*GPTS, "bert"], ["llama", "bert"]))
def test_gradients_are_slopes_of_the_float64_definition(name):
    """<gradient, direction> against a central difference of the definition."""
    config = BERT if name == "bert" else GPTS[name]
    model = build(config)
    params, ids = random_params(model), tokens(rows=1)
    mix = np.random.default_rng(5).normal(size=(16, 200))

    def loss(params):
        return jnp.sum(model.apply(params, ids)[0, :, :200] * jnp.asarray(mix, jnp.float32))

    def definition(params):
        if name == "bert":
            return np.sum(naive.bert(config, params, ids[0], np.zeros(16, int), 16)[0] * mix)
        return np.sum(naive.gpt(config, params, ids[0]) * mix)

    gradient = jax.jit(jax.grad(loss))(params)
    for seed in range(3):
        direction = float64(random_params(model, seed=10 + seed))
        slope = sum(np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (float64(gradient), direction)), strict=True))
        ahead, behind = (
            definition(jax.tree.map(lambda p, d, e=e: p + e * d, float64(params), direction)) for e in (1e-6, -1e-6)
        )
        assert slope == pytest.approx((ahead - behind) / 2e-6, rel=2e-4)


@pytest.mark.parametrize("name", quick_and_exhaustive(GPTS, ["mixed"]))
def test_gradients_of_gpt_do_not_reach_future_positions(name):
    """d (logits[i] projected at random) / d x[j] is exactly 0 for j > i, and not for j <= i."""
    model = build(GPTS[name])
    params = random_params(model)
    x = jax.random.normal(jax.random.key(2), (1, 8, 48))
    mix = jax.random.normal(jax.random.key(3), (200,))

    def projected(x):
        for index in range(2):
            x = model.block(naive.layer(params["blocks"], index), x)
        return model.logits(params, x)[0, :, :200] @ mix

    reach = np.abs(jax.jit(jax.jacrev(projected))(x)[:, 0]).max(-1)
    assert np.all(reach[np.triu_indices(8, 1)] == 0)
    assert np.all(reach[np.tril_indices(8)] > 0)


@pytest.mark.parametrize("name", GPTS)
def test_future_tokens_do_not_change_past_logits(name):
    model = build(GPTS[name])
    params, ids = random_params(model), tokens()
    logits = jax.jit(model.apply)(params, ids)[..., :200]
    for cut in (1, 7, 15):
        changed = ids.copy()
        changed[:, cut:] = (changed[:, cut:] + 1 + tokens(3, 16 - cut, seed=cut) % 100) % 200
        other = jax.jit(model.apply)(params, changed)[..., :200]
        np.testing.assert_array_equal(other[:, :cut], logits[:, :cut])
        assert np.all(np.abs(other[:, cut:] - logits[:, cut:]).max(-1) > 0)


def test_padding_of_bert_changes_nothing():
    model = build(BERT)
    params, ids, lengths = random_params(model), tokens(rows=2), jnp.array([5, 12])
    other = np.where(np.arange(16) < np.asarray(lengths)[:, None], ids, (ids + 7) % 200)
    first, second = (jax.jit(model.apply)(params, i, context=Context(lengths=lengths)) for i in (ids, other))
    for row, length in enumerate((5, 12)):
        np.testing.assert_array_equal(first[row, :length], second[row, :length])
    # Without the mask the same change is seen: the test can fail.
    first, second = (jax.jit(model.apply)(params, i) for i in (ids, other))
    assert np.abs(first[0, :5, :200] - second[0, :5, :200]).max() > 1e-3


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_count_is_exact(preset):
    config = load_config(preset).model
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.parameter_count().allocated


def matmul_flops(jaxpr, times=1):
    """2mnk summed over every dot_general of a jaxpr, loops multiplied in."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lhs = equation.invars[0].aval.shape
            total += 2 * np.prod(equation.outvars[0].aval.shape) * np.prod([lhs[d] for d in contracted]) * times
        inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for sub in value if isinstance(value, tuple | list) else [value]:
                if hasattr(sub, "jaxpr"):
                    total += matmul_flops(sub.jaxpr, inner)
                elif hasattr(sub, "eqns"):
                    total += matmul_flops(sub, inner)
    return total


@pytest.mark.parametrize("config", [*GPTS.values(), BERT], ids=[*GPTS, "bert"])
def test_flops_are_those_of_the_traced_program(config):
    """The XLA attention kernel computes the full square, so the count is compared without the causal convention."""
    config = config.model_copy(update={"vocab_size": 256})  # no padding columns
    model = build(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(params, ids):
        return jnp.sum(model.apply(params, ids))

    expected = config.flops_per_token(16, causal=False)
    forward = matmul_flops(jax.make_jaxpr(loss)(params, ids).jaxpr)
    both = matmul_flops(jax.make_jaxpr(jax.grad(loss))(params, ids).jaxpr)
    assert forward == expected.forward * 32
    assert both == expected.total * 32


def test_causal_flops_count_half_the_square():
    config = GPTS["gpt2"]
    full, causal = (config.flops_per_token(16, causal=c).forward for c in (False, True))
    assert full - causal == 2 * 2 * 2 * 48 * (16 - 17 / 2)  # 2mnk, two products, two layers, width 48


@pytest.mark.parametrize("config", [GPTS["gpt2"], BERT], ids=["gpt", "bert"])
def test_named_tensors_are_what_a_policy_can_save(config):
    model = build(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    text = str(jax.make_jaxpr(model.apply)(params, jax.ShapeDtypeStruct((2, 16), jnp.int32)))
    for name in NAMED_TENSORS:
        assert f"name={name}" in text


def row_keys(seed, rows=3):
    return jax.random.split(jax.random.key(seed), rows)


def test_dropout_needs_keys_and_is_deterministic():
    config = GPTS["gpt2"].model_copy(update={"dropout": 0.5})
    model, ids = build(config), tokens()
    params = random_params(model)
    plain = jax.jit(model.apply)(params, ids)
    np.testing.assert_array_equal(plain, jax.jit(build(GPTS["gpt2"]).apply)(params, ids))
    dropped = [jax.jit(model.apply)(params, ids, keys=row_keys(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - dropped[2])[..., :200].max() > 0.1


@pytest.mark.parametrize("config", [GPTS["gpt2"], BERT], ids=["gpt", "bert"])
def test_what_a_row_loses_depends_on_its_own_key_only(config):
    """Alone it comes out as in company; with another row's key it does not."""
    model, ids, keys = build(config.model_copy(update={"dropout": 0.5})), tokens(), row_keys(0)
    params = random_params(model)
    together = jax.jit(model.apply)(params, ids, keys=keys)[..., :200]
    for row in range(3):
        alone = jax.jit(model.apply)(params, ids[row : row + 1], keys=keys[row : row + 1])[..., :200]
        close(alone[0], together[row])
    turned = jax.jit(model.apply)(params, ids, keys=keys[::-1])[..., :200]
    assert np.abs(turned - together)[0].max() > 0.1


def test_layers_lose_different_entries():
    """Two equal layers under one key; the embedding's dropout is another one still."""
    x = jnp.ones((1, 8, 48))
    masks = [dropout(x, 0.5, layer_keys(row_keys(0, 1), layer), use, Hooks()) for layer in (0, 1) for use in (0, 1)]
    masks.append(dropout(x, 0.5, row_keys(0, 1), 0, Hooks()))
    for first, second in itertools.combinations(masks, 2):
        assert 0.3 < np.mean(np.asarray(first) != np.asarray(second)) < 0.7


@pytest.mark.parametrize("name", quick_and_exhaustive([*GPTS, "bert"], ["mixed", "bert"]))
def test_bfloat16_is_close_to_float32(name):
    config = BERT if name == "bert" else GPTS[name]
    params = jax.jit(build(config).init)(jax.random.key(0))
    exact = jax.jit(build(config).apply)(params, tokens())[..., :200]
    with jax.numpy_dtype_promotion("standard"):  # Flax promotes in its norms
        rounded = jax.jit(build(config, dtype=jnp.bfloat16).apply)(params, tokens())[..., :200]
    assert rounded.dtype == jnp.float32
    assert np.abs(exact - rounded).max() <= 2**-6 * np.abs(exact).max()
