"""Clipping: each kind against its formula, and norms of layers under any plan."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jhpt.core.config import OptimizerConfig
from jhpt.models.family import Rows, Sums
from jhpt.training import setup as training_setup
from jhpt.training.clipping import Clipping, clipping
from jhpt.training.optimizer import learning_rate, make_optimizer
from jhpt.training.setup import prepare
from jhpt.training.step import init_state, make_train_step
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import by_path, compiled, laid_out, mixed, on_host, piped, random_params, spread, stored

BLOCKS = 4


def group_of(path):
    """Whether it is of blocks."""
    return path.startswith("blocks/")


def norms_of(tree):
    """(of every block, of all the rest), in float64."""
    leaves = by_path(tree)
    blocks = sum((leaf**2).reshape(len(leaf), -1).sum(1) for path, leaf in leaves.items() if group_of(path))
    rest = sum((leaf**2).sum() for path, leaf in leaves.items() if not group_of(path))
    return np.sqrt(blocks), np.sqrt(rest)


PLANS = {
    "one device": piped([BLOCKS + 2], 1),
    "zero 3, tensor": piped([BLOCKS + 2], 1, data=2, tensor=2, zero=3),
    "hybrid": piped([BLOCKS + 2], 1, data=4, zero=2, zero_ranks=2, micro_batches=2),
    "pipeline": piped(spread(BLOCKS, 2), 2, data=2, zero=1, micro_batches=2),
    "uneven, bare exit": piped(spread(BLOCKS, 3, "bare exit"), 3, tensor=2, micro_batches=2),
    "interleaved": piped(spread(BLOCKS, 4), 2, micro_batches=2, schedule="interleaved"),
    "mixed degrees": mixed([2, 2, 4, 4, 1, 1], devices=4),
}


@pytest.mark.parametrize(
    ("preset", "plan"),
    quick_and_exhaustive(
        itertools.product(["gpt-tiny", "bert-tiny"], PLANS),
        [
            ("gpt-tiny", "zero 3, tensor"),
            ("gpt-tiny", "mixed degrees"),
            ("gpt-tiny", "interleaved"),
            ("bert-tiny", "uneven, bare exit"),
        ],
    ),
)
def test_layers_are_clipped_alike_under_any_plan(tiny, preset, plan):
    """A gradient of any size, cut by limit / max(limit, sqrt(n) |group|); tied tables of pipelines count once."""
    config = tiny(preset, **{"model.num_layers": BLOCKS, "model.num_heads": 4, "optimizer.clip": "layer"})
    setup = laid_out(prepare(config), PLANS[plan])
    gradients = random_params(setup, seed=3)
    blocks, rest = norms_of(gradients)
    limit = float(np.median(blocks)) * np.sqrt(BLOCKS + 1)
    rule = clipping(config.optimizer.model_copy(update={"clip_norm": limit}), setup.training)
    clipped = compiled(lambda tree: rule.clipped(tree, jnp.float32(0), None), stored(setup, gradients))
    clipped = by_path(on_host(setup.layout.model_tree(jax.tree.map(jnp.asarray, clipped), setup.training.tied)))
    part = limit / np.sqrt(BLOCKS + 1)
    for path, leaf in by_path(gradients).items():
        norm = blocks.reshape(-1, *(1,) * (leaf.ndim - 1)) if group_of(path) else rest
        np.testing.assert_allclose(clipped[path], leaf * part / np.maximum(norm, part), rtol=2e-6, err_msg=path)
    assert np.sqrt(sum((leaf**2).sum() for leaf in clipped.values())) <= limit * (1 + 1e-6)


def quadratic_steps(clip, gradients, limit=0.5):
    """Norms and parameters of a run that is given these gradients, one after the other."""
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant", clip_norm=limit, clip=clip)
    rule = Clipping(limit=limit, kind=clip)
    optimizer = make_optimizer(config)

    def gradient(params, windows, key):
        return {"kernel": windows}, Sums(jnp.sum(windows), jnp.sum(windows), jnp.float32(1))

    rate = partial(learning_rate, config, 100)
    step = jax.jit(make_train_step(gradient, optimizer, rate, seed=0, max_bad_steps=9, clip=rule))
    state, steps = init_state({"kernel": jnp.ones(3)}, optimizer, clip=rule), []
    for vector in gradients:
        state, metrics = step(state, jnp.asarray(vector, jnp.float32))
        steps.append((float(metrics.grad_norm), np.asarray(state.params["kernel"]), state.norm))
    return steps


def test_previous_takes_the_norm_of_the_last_step_that_was_taken():
    """The first whole; after one that is skipped the norm before it still holds."""
    rows = np.random.default_rng(0).normal(size=(6, 3))
    rows[3, 1] = np.nan
    params, last = {"kernel": jnp.ones(3)}, 0.0
    reference = optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.1)
    moments = reference.init(params)
    for at, (norm, kernel, saved) in enumerate(quadratic_steps("previous", rows)):
        if at != 3:
            clipped = {"kernel": jnp.asarray(rows[at] * 0.5 / max(0.5, last), jnp.float32)}
            updates, moments = reference.update(clipped, moments, params)
            params, last = optax.apply_updates(params, updates), np.linalg.norm(rows[at])
            assert norm == pytest.approx(last, rel=1e-6)
        assert float(saved) == pytest.approx(last, rel=1e-6)
        np.testing.assert_allclose(kernel, params["kernel"], rtol=1e-5)


def test_only_previous_keeps_a_norm():
    for clip, saved in (("global", False), ("previous", True)):
        assert (quadratic_steps(clip, np.ones((1, 3)))[0][2] is not None) == saved
    assert Clipping(limit=None, kind="previous").first is None


@pytest.mark.parametrize("stages", quick_and_exhaustive([1, 2], [1]))
def test_a_step_clipped_by_layers_is_a_step_of_clipped_gradients(tiny, monkeypatch, stages):
    """Of training itself: the same parameters as optax makes of the gradient, clipped as the formula says."""
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)  # a loop compiles faster
    config = tiny(**{"model.num_layers": BLOCKS, "optimizer.clip": "layer", "optimizer.clip_norm": 0.3})
    setup = laid_out(prepare(config), piped(spread(BLOCKS, stages), stages, batch=4, micro_batches=stages))
    rows = jax.random.randint(jax.random.key(1), (4, 33), 0, 256)
    gradients = lambda params, windows, key: setup.training.gradients(params, Rows(windows), key)  # noqa: E731
    rule, rate = clipping(config.optimizer, setup.training), lambda step: jnp.float32(1e-2)
    step = make_train_step(gradients, setup.optimizer, rate, seed=0, max_bad_steps=1, clip=rule)
    params = stored(setup, random_params(setup))
    state = init_state(params, setup.optimizer, clip=rule)
    after, _ = compiled(step, state, rows)

    def reference(state):
        grads, _ = gradients(state.params, rows, jax.random.key(0))
        tree = setup.layout.model_tree(grads, setup.training.tied)
        blocks = jax.tree.map(lambda leaf: (leaf**2).reshape(BLOCKS, -1).sum(1), tree["blocks"])
        norm = jnp.sqrt(sum(jax.tree.leaves(blocks)))
        rest = optax.tree.norm({name: part for name, part in tree.items() if name != "blocks"})
        part = 0.3 / (BLOCKS + 1) ** 0.5
        cut = lambda leaf, norm: leaf * (part / jnp.maximum(norm, part)).reshape(-1, *(1,) * (leaf.ndim - 1))  # noqa: E731
        clipped = {
            name: jax.tree.map(lambda leaf: leaf * part / jnp.maximum(rest, part), each) for name, each in tree.items()
        }
        clipped["blocks"] = jax.tree.map(lambda leaf: cut(leaf, norm), tree["blocks"])
        whole = setup.layout.model_tree(state.params, setup.training.tied)
        directions, _ = setup.optimizer.update(clipped, setup.optimizer.init(whole), whole)
        return jax.tree.map(lambda p, d: p - 1e-2 * d, whole, directions)

    expected = by_path(compiled(reference, state))
    actual = by_path(on_host(setup.layout.model_tree(jax.tree.map(jnp.asarray, after.params), setup.training.tied)))
    moved = by_path(random_params(setup))
    for path, leaf in expected.items():
        if not path.endswith("qkv/bias"):  # keys' have no gradient but rounding
            np.testing.assert_allclose(actual[path] - moved[path], leaf - moved[path], atol=2e-4, err_msg=path)
