"""The step: schedules, accumulation, skipping of what is not finite, and that it can learn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from jhpt.core.config import OptimizerConfig
from jhpt.core.load import load_config
from jhpt.models.family import Rows, Sums, build
from jhpt.models.hooks import Hooks
from jhpt.models.vocabulary import token_nll
from jhpt.sharding.model_parts import ModelParts
from jhpt.training.clipping import Clipping
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.optimizer import decay_mask, learning_rate, make_optimizer
from jhpt.training.parts import make_parts
from jhpt.training.setup import prepare
from jhpt.training.step import init_state, make_train_step
from tests.covers import quick_and_exhaustive


def rates(steps=11, **settings):
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1, **settings)
    return [float(learning_rate(config, steps, jnp.asarray(step))) for step in range(steps)]


def test_schedules_at_points_worked_out_by_hand():
    warm = [0.5, 1.0, 1.5, 2.0]  # 2 (step + 1) / 4
    for schedule, middle, end in (("cosine", 1.1, 0.2), ("linear", 1.1, 0.2), ("constant", 2.0, 2.0)):
        values = rates(schedule=schedule)
        np.testing.assert_allclose(values[:4], warm, rtol=1e-6)
        np.testing.assert_allclose([values[4], values[7], values[10]], [2.0, middle, end], rtol=1e-5)


def test_wsd_decays_in_the_last_steps():
    """Of 11 steps, 0.4 are 4: steps 7 to 10 decay from 2 to a tenth of it, and two thirds of the way 10 steps later."""
    values = rates(schedule="wsd", decay_fraction=0.4)
    np.testing.assert_allclose(values[:7], [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(values[7:], [1.55, 1.1, 0.65, 0.2], rtol=1e-5)
    np.testing.assert_allclose(rates(21, schedule="wsd")[17:], [2.0, 2.0, 1.1, 0.2], rtol=1e-5)  # 2 of 21 steps
    np.testing.assert_allclose(rates(schedule="wsd", decay_fraction=0.01)[9:], [2.0, 0.2], rtol=1e-5)  # one at least


def test_decay_acts_on_matrices_and_tables_only():
    for preset in ("gpt-tiny", "llama-8b", "bert-tiny"):
        shapes = jax.eval_shape(build(load_config(preset).model).init, jax.random.key(0))
        for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(shapes)):
            keys = [key.key for key in path]
            expected = keys[-1] not in ("scale", "bias") and "norm" not in keys and keys[0] != "pooler"
            assert decays is expected, keys


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("columns", [7, 12])
@pytest.mark.parametrize("size", [4.0, 300.0])
def test_token_nll_is_minus_log_softmax(alone, columns, size):
    """With its gradients, also where padding fills half of a row and where exponentials of logits would overflow."""
    real = columns // 2  # padding may fill more than one of the parts that are read beside each other
    logits = (jax.random.normal(jax.random.key(0), (3, 5, columns)) * size).at[..., real:].set(-jnp.inf)
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, real)
    errors = jax.random.normal(jax.random.key(2), (2, 3, 5))
    (nll, log_z), pull = jax.vjp(lambda logits: token_nll(logits, targets, Hooks(alone=alone)), logits)
    exact = np.asarray(logits, np.float64)[..., :real]
    expected_z = scipy.special.logsumexp(exact, axis=-1)
    picked = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_z, expected_z, rtol=1e-6)
    np.testing.assert_allclose(nll, expected_z - picked, rtol=1e-5, atol=1e-6 * size)
    (gradient,) = pull(tuple(errors))
    of_nll, of_z = (np.asarray(error, np.float64)[..., None] for error in errors)
    expected = (of_nll + of_z) * scipy.special.softmax(exact, axis=-1) - of_nll * np.eye(real)[np.asarray(targets)]
    np.testing.assert_allclose(gradient[..., :real], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(gradient[..., real:], 0)


def test_a_loss_of_numbers_that_are_not_finite_is_not_finite():
    """A run that has diverged must say so, whichever way its loss is computed."""
    for number in (jnp.nan, jnp.inf):
        for column in range(8):
            logits = jnp.zeros((1, 8)).at[0, column].set(number)
            for alone in (False, True):
                nll, _ = token_nll(logits, jnp.array([3]), Hooks(alone=alone))
                assert not jnp.isfinite(nll[0])


def whole(parts: ModelParts, params, rows, keys) -> Sums:
    """Entry, all blocks, exit."""
    context = parts.context(rows, keys)
    x = parts.embed(params, rows, context)
    for layer in range(2):
        x = parts.block(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]), x, (context, layer))
    return parts.head_loss(params, x, rows, context)


def test_z_loss_adds_the_squared_log_partition(tiny):
    config = tiny()
    model = build(config.model)
    params = model.init(jax.random.key(0))
    rows = Rows(jax.random.randint(jax.random.key(1), (2, 33), 0, 256))
    keys = jax.random.split(jax.random.key(0))
    plain, weighted = (
        jax.jit(partial(whole, make_parts(model, config.data, ByteTokenizer(), z, train=True)))(params, rows, keys)
        for z in (0.0, 0.5)
    )
    log_z = jax.nn.logsumexp(jax.jit(model.apply)(params, rows.windows[:, :-1]), axis=-1)
    np.testing.assert_allclose(weighted.loss, plain.loss + 0.5 * jnp.sum(log_z**2), rtol=1e-5)
    np.testing.assert_array_equal(weighted.nll, plain.nll)
    assert plain.tokens == 64


@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny"])
def test_rows_count_by_their_weight_and_add_up(tiny, preset):
    """Sums of a batch are the sums of its rows, each with its own key; weights scale loss and tokens alike."""
    config = tiny(preset, **{"model.dropout": 0.3})
    model = build(config.model)
    parts = make_parts(model, config.data, ByteTokenizer(), 0.1, train=True)
    params = model.init(jax.random.key(0))
    windows = jax.random.randint(jax.random.key(1), (3, 33 if preset == "gpt-tiny" else 32), 0, 256)
    weights, keys = jnp.array([1.0, 0.0, 0.25]), jax.random.split(jax.random.key(2), 3)
    run = jax.jit(lambda rows, keys: whole(parts, params, rows, keys))
    together = run(Rows(windows, weights), keys)
    alone = [run(Rows(windows[row : row + 1]), keys[row : row + 1]) for row in range(3)]
    assert together.correct is None
    for name in ("loss", "nll", "tokens"):
        expected = sum(weight * getattr(sums, name) for weight, sums in zip(weights, alone, strict=True))
        np.testing.assert_allclose(getattr(together, name), expected, rtol=1e-5)


LLAMA = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.positions": "rotary", "model.num_kv_heads": 2}


@pytest.mark.parametrize(
    ("preset", "changes"), [("gpt-tiny", {}), ("gpt-tiny", LLAMA), ("bert-tiny", {})], ids=["gpt2", "llama", "bert"]
)
def test_alone_on_a_gpu_a_model_has_the_same_gradients(tiny, preset, changes):
    """The shortest computations for a single GPU are used there alone, so elsewhere no run would notice a mistake."""
    config = tiny(preset, **changes)
    windows = jax.random.randint(jax.random.key(1), (3, 33 if preset == "gpt-tiny" else 32), 0, 256)
    rows, keys = Rows(windows, jnp.array([1.0, 0.0, 0.25])), jax.random.split(jax.random.key(2), 3)

    def gradients(alone):
        model = build(config.model, hooks=Hooks(alone=alone))
        parts = make_parts(model, config.data, ByteTokenizer(), 0.1, train=True)
        params = model.init(jax.random.key(0))
        return jax.jit(jax.value_and_grad(lambda params: whole(parts, params, rows, keys).loss))(params)

    (loss, shared), (its, alone) = gradients(False), gradients(True)
    assert its == pytest.approx(float(loss), rel=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(shared))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * largest)


def toy_loss(params, windows):
    """Quadratic in the parameters; a window that starts with -1 makes the loss infinite, with -2 only the gradient."""
    w = params["kernel"]
    loss = jnp.sum((w - 1.0) ** 2)
    loss = loss + jnp.where(windows[0, 0] == -1, jnp.inf, 0.0)
    # sqrt is 0 at 0 and its slope infinite; times 0 the gradient is not a number while the loss is finite.
    return loss + jnp.sqrt(jnp.sum(w) * 0.0 + jnp.where(windows[0, 0] == -2, 0.0, 1.0))


def toy_gradients(params, windows, key):
    loss, gradient = jax.value_and_grad(toy_loss)(params, windows)
    tokens = float(windows.size)
    return gradient, Sums(loss * tokens, loss * tokens, jnp.asarray(tokens))


def toy_step(max_bad_steps=3, clip_norm=1.0, norm=optax.tree.norm, **settings):
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant", **settings)
    optimizer = make_optimizer(config)
    state = init_state({"kernel": jnp.zeros(3)}, optimizer)
    step = make_train_step(
        toy_gradients,
        optimizer,
        lambda step: learning_rate(config, 100, step),
        seed=0,
        max_bad_steps=max_bad_steps,
        clip=Clipping(limit=clip_norm, norm=norm),
    )
    return jax.jit(step), state


def windows(first=0):
    return jnp.zeros((2, 2), jnp.int32).at[0, 0].set(first)


@pytest.mark.parametrize("bad", [-1, -2], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_whole(bad):
    step, state = toy_step()
    state, _ = step(state, windows())
    skipped, metrics = step(state, windows(bad))
    assert not (np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm))
    assert (metrics.bad_steps, skipped.bad_steps, skipped.step) == (1, 1, 2)
    jax.tree.map(np.testing.assert_array_equal, (skipped.params, skipped.optimizer), (state.params, state.optimizer))
    recovered, metrics = step(skipped, windows())
    assert metrics.bad_steps == 0
    assert np.all(recovered.params["kernel"] != state.params["kernel"])


def test_a_long_run_of_bad_steps_freezes_the_state_for_good():
    step, state = toy_step(max_bad_steps=2)
    for _ in range(2):
        state, metrics = step(state, windows(-1))
    assert metrics.bad_steps == 2
    later, metrics = step(state, windows())
    assert metrics.bad_steps == 3
    np.testing.assert_array_equal(later.params["kernel"], state.params["kernel"])


def test_update_is_adamw_with_clipping():
    """Against optax.adamw behind a clip, three steps."""
    step, state = toy_step(clip_norm=0.5, weight_decay=0.1)
    reference = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.1))
    params = {"kernel": jnp.zeros(3)}
    moments = reference.init(params)
    for _ in range(3):
        grads = jax.grad(lambda p: jnp.sum((p["kernel"] - 1.0) ** 2))(params)
        updates, moments = reference.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, windows())
        np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(state.params["kernel"], params["kernel"], rtol=1e-6)


def test_the_norm_is_that_of_gradients_as_they_are_stored():
    """What is stored twice is counted once, if the norm says so."""
    step, state = toy_step(norm=lambda gradients: 10 * optax.tree.norm(gradients), clip_norm=0.5)
    _, metrics = step(state, windows())
    np.testing.assert_allclose(metrics.grad_norm, 10 * 2 * 3**0.5, rtol=1e-6)


@pytest.mark.parametrize("preset", quick_and_exhaustive(["gpt-tiny", "bert-tiny"], ["bert-tiny"]))
def test_eight_sequences_can_be_learnt_by_heart(tiny, preset):
    """To below 0.05 nats per token; BERT sees other masks at each step and is held to the same."""
    config = tiny(
        preset,
        **{
            "optimizer.learning_rate": 5e-3,
            "optimizer.warmup_steps": 20,
            "optimizer.weight_decay": 0.0,
            "model.dropout": 0.0,
            "model.num_layers": 1,
            "data.batch_size": 8,
            "parallel.data": 1,
        },
    )
    setup = prepare(config)
    step = make_train_step(
        lambda params, windows, key: setup.training.gradients(params, Rows(windows), key),
        setup.optimizer,
        lambda step: learning_rate(config.optimizer, 400, step),
        seed=0,
        max_bad_steps=1,
        clip=Clipping(limit=config.optimizer.clip_norm),
    )
    rows = jax.random.randint(jax.random.key(3), (8, 33 if preset == "gpt-tiny" else 32), 0, 200)
    state = init_state(setup.model.init(jax.random.key(0)), setup.optimizer)
    run = jax.jit(lambda state, rows: jax.lax.scan(lambda s, _: step(s, rows), state, length=400))
    _, metrics = run(state, rows)
    assert metrics.loss[-1] < 0.05
