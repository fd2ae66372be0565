"""`jhpt bench train`: its competitors do the same work, and each sample is one competitor's."""

import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.bench import minimal, train
from jhpt.bench.results import Row, print_rows
from jhpt.core.load import load_config
from jhpt.measure import timer
from jhpt.models.family import Rows
from jhpt.training.data.batches import shuffled, training_batches
from jhpt.training.programs import global_batch
from jhpt.training.setup import prepare
from tests.conftest import tiny_overrides


@pytest.fixture(scope="module")
def setup(corpus):
    changes = {"parallel.data": 1, "model.dropout": 0.0, "data.batch_size": 4}
    changes |= {"model.d_model": 16, "model.num_heads": 4, "model.d_ff": 32, "data.sequence_length": 16}
    return prepare(load_config("gpt-tiny", tiny_overrides(corpus) | changes))


def as_minimal(params):
    """Parameters of the model as the minimal loop names and arranges them: 3 x heads instead of heads x 3."""
    blocks, head, embedding = (params[name] for name in ("blocks", "head", "embedding"))
    qkv = blocks["attention"]["qkv"]
    kernel, bias = jnp.swapaxes(qkv["kernel"], -3, -2), jnp.swapaxes(qkv["bias"], -3, -2)
    matrices = {
        "qkv": (kernel.reshape(*kernel.shape[:2], -1), bias.reshape(len(bias), -1)),
        "out": tuple(blocks["attention"]["projection"][part] for part in ("kernel", "bias")),
        "up": tuple(blocks["mlp"]["up"][part] for part in ("kernel", "bias")),
        "down": tuple(blocks["mlp"]["down"][part] for part in ("kernel", "bias")),
    }
    norms = {"norm1": blocks["attention_norm"], "norm2": blocks["mlp_norm"]}
    return {
        "tokens": embedding["tokens"],
        "positions": embedding["positions"],
        "norm": head["norm"]["scale"],
        "norm_bias": head["norm"]["bias"],
        "blocks": {name: kernel for name, (kernel, _) in matrices.items()}
        | {f"{name}_bias": bias for name, (_, bias) in matrices.items()}
        | {name: norm["scale"] for name, norm in norms.items()}
        | {f"{name}_bias": norm["bias"] for name, norm in norms.items()},
    }


def test_the_minimal_loop_has_the_same_loss_and_gradients(setup):
    """Of a batch of the benchmark, from the same parameters: it neither leaves out work nor does other work."""
    (windows,) = train._ready_batches(setup, 1)
    params = jax.jit(setup.model.init)(jax.random.key(0))
    # Biases and norms begin as constants, under which some mistakes do not show.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, moved)
    stored = setup.layout.stored(params)
    of_jhpt = jax.jit(lambda params, windows, key: setup.training.gradients(params, Rows(windows), key))
    theirs, sums = of_jhpt(stored, global_batch(setup, windows), jax.random.key(0))
    loss = partial(minimal.loss, setup.config.model, setup.model.dtype, setup.attention.implementation, 1)
    with jax.numpy_rank_promotion("allow"):
        value, gradients = jax.jit(jax.value_and_grad(loss))(as_minimal(params), jnp.asarray(windows))
    np.testing.assert_allclose(float(value), float(sums.loss / sums.tokens), rtol=1e-5)
    expected = as_minimal(theirs)
    assert jax.tree.structure(expected) == jax.tree.structure(gradients)
    for ours, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(other), rtol=1e-4, atol=1e-6)


def test_the_minimal_step_updates_as_adamw_does(setup):
    """Every parameter moves by the learning rate in the first step, and only matrices and tables decay."""
    model = setup.config.model
    step, state = minimal.make_step(model, setup.model.dtype, setup.attention.implementation, 1)
    before = jax.tree.map(np.array, state[0])
    (windows,) = train._ready_batches(setup, 1)
    with jax.numpy_rank_promotion("allow"):
        (after, _), loss = step(state, jnp.asarray(windows))
    assert float(loss) == pytest.approx(np.log(model.vocab), abs=0.2)
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        new = np.asarray(after["blocks"][path[-1].key] if len(path) > 1 else after[path[-1].key])
        decay = 1e-4 * leaf if leaf.ndim > 2 or path[-1].key in ("tokens", "positions") else 0.0
        moved = np.abs(new - leaf + decay)
        assert moved.max() <= 1.001e-3, path
        assert path[-1].key == "positions" or moved.max() >= 0.9e-3, path  # rows beyond the sequence have no gradient


def test_trials_of_all_competitors_run_the_same_steps_and_nothing_else(setup, monkeypatch):
    """Three steps of the same batches; a competitor that sleeps would fail here."""

    def never(*_):
        raise AssertionError("a competitor sleeps")

    seen = {"jhpt": [], "minimal": []}

    def made(*_):
        def step(state, windows):
            seen["minimal"].append(np.asarray(windows))
            return state, jnp.zeros(())

        return step, 0

    def fitted(block, step, state, **_):
        first, last = int(state.step), block.config.train.steps
        size = block.config.data.batch_size
        batches = training_batches(shuffled(block.train_windows, block.config.seed), size, slice(0, size), first)
        seen["jhpt"] += [next(batches) for _ in range(last - first)]
        return SimpleNamespace(step=last), None

    monkeypatch.setattr(time, "sleep", never)
    monkeypatch.setattr(minimal, "make_step", made)
    monkeypatch.setattr(train, "compile_step", lambda setup: SimpleNamespace(init=lambda: SimpleNamespace(step=0)))
    monkeypatch.setattr(train, "fit", fitted)
    competitors = train._competitors(setup, 3)
    for name in seen:
        competitors[name]()()
    assert len(seen["jhpt"]) == len(seen["minimal"]) == 3
    for one, other in zip(seen["jhpt"], seen["minimal"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_sample_is_of_the_competitor_that_ran(monkeypatch):
    """A clock that only competitors move: none is charged for another, and the order turns every other round."""
    now, order = [0.0], []

    def taking(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds
            return jnp.zeros(())

        return call

    monkeypatch.setattr(timer.time, "perf_counter", lambda: now[0])
    samples = timer.interleaved({"slow": taking("slow", 3.0), "fast": taking("fast", 1.0)}, 4, warmup=1)
    assert samples == {"slow": [3.0] * 4, "fast": [1.0] * 4}
    assert order == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow"]


def test_tables_divide_by_the_first_competitor(capsys):
    rows = [
        Row(setup="s", competitor=name, samples_s=samples, tokens=100, flops=1.0)
        for name, samples in (("jhpt", [0.5, 0.5]), ("minimal", [1.0, 1.0]))
    ]
    print_rows("bench", rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if " s " in line]
    assert "1.000" in lines[0] and "2.000" in lines[1] and "time / jhpt" not in lines[0]
