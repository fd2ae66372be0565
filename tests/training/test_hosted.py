"""Training with blocks on the host is training: the same gradients, norms, losses and parameters, step after step."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.sharding.hosted import HostedBlocks
from jhpt.sharding.streamed import GRADIENT, RESIDENT
from jhpt.training.hosted import KEPT, HostedTraining
from jhpt.training.keys import Stream, stream_key
from jhpt.training.optimizer import DECAYED, learning_rate
from jhpt.training.parts import Rows
from jhpt.training.setup import prepare
from jhpt.training.step import init_state, make_train_step
from tests.sharding.plans import by_path, laid_out, on_host, piped, random_params

STEPS, BATCH, BLOCKS = 5, 16, 4
MODELS = {"gpt-tiny": {"model.dropout": 0.1}, "bert-tiny": {}}


@pytest.fixture
def made(tiny):
    """(setup, plain step, plain state, hosted training) of a model on so many data ranks."""

    def make(preset, ranks, ahead=1, clip_norm=1.0, resident=0, **settings):
        overrides = MODELS[preset] | {"model.num_layers": BLOCKS, "train.steps": STEPS} | settings
        plan = piped([BLOCKS + 2], 1, data=ranks, batch=BATCH)
        setup = laid_out(prepare(tiny(preset, **overrides)), plan)
        config = setup.config
        rules = {"seed": config.seed, "clip_norm": clip_norm, "max_bad_steps": config.train.max_bad_steps}
        rate = partial(learning_rate, config.optimizer, STEPS)
        execution = setup.training
        plain = make_train_step(
            lambda params, windows, key: execution.gradients(params, Rows(windows), key),
            setup.optimizer,
            rate,
            norm=execution.norm,
            **rules,
        )
        params = jax.tree.map(jnp.asarray, random_params(setup))
        layer = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], params["blocks"]))
        blocks = HostedBlocks(
            execution=execution,
            layer=layer,
            decays=lambda path: path.split("/")[-1] in DECAYED,
            ahead=ahead,
            resident=resident,
        )
        training = HostedTraining(blocks=blocks, config=config.optimizer, learning_rate=rate, **rules)
        return setup, jax.jit(plain), init_state(params, setup.optimizer), training

    return make


def windows_of(setup):
    """Of every step."""
    rows = [setup.train_windows[index] for index in range(STEPS * BATCH)]
    return [jax.device_put(np.stack(rows[at * BATCH : (at + 1) * BATCH]), setup.layout.batch) for at in range(STEPS)]


def hosted_step(training):
    """Compiled, in place."""
    return jax.jit(lambda state, windows: training.step(state, Rows(windows)), donate_argnums=0)


def start(training, state):
    """Its rows on the host."""
    return training.placed(jax.jit(training.hosted)(state))


def flushed(training):
    """To the state of any run."""
    flush, convert = jax.jit(training.flushed), jax.jit(training.train_state)
    return lambda state: convert(flush(state))


def tree_of(training, name, rows):
    """Rows of this name as a tree of stacked leaves."""
    return on_host(training.blocks.blocks(name, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), rows)))


@pytest.mark.parametrize(
    ("preset", "ranks", "clip_norm", "resident"),
    [("gpt-tiny", 1, 0.5, 0), ("gpt-tiny", 4, None, 1), ("bert-tiny", 1, None, 3), ("bert-tiny", 4, 0.5, 0)],
)
def test_steps_are_those_of_a_plain_run(made, preset, ranks, clip_norm, resident):
    """Over five of them: losses to 1e-6, norms to 1e-5, parameters to 0.05 of the learning rate a step."""
    setup, plain, state, training = made(preset, ranks, clip_norm=clip_norm, resident=resident)
    hosted, step = start(training, state), hosted_step(training)
    for windows in windows_of(setup):
        state, expected = plain(state, windows)
        hosted, found = step(hosted, windows)
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        assert float(found.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-5)
        assert float(found.learning_rate) == float(expected.learning_rate)
    kinds = {name: leaf.sharding.memory_kind for name, leaf in hosted.rows.items()}
    assert all((kind == "pinned_host") != name.startswith(RESIDENT) for name, kind in kinds.items())
    assert len(kinds) == len((*KEPT, GRADIENT)) * (2 if resident else 1)
    again = flushed(training)(hosted)
    assert int(again.step) == STEPS and int(again.optimizer[0].count) == int(state.optimizer[0].count)
    most = setup.config.optimizer.learning_rate * STEPS
    params, sizes = by_path(again.params), {path: np.sqrt(nu) for path, nu in by_path(state.optimizer[0].nu).items()}
    largest = max(size.max() for size in sizes.values())
    for path, leaf in by_path(state.params).items():
        # Biases of keys have no gradient but rounding, which Adam divides by its own size.
        noise = sizes[path] < 1e-7 * largest
        assert np.where(noise, 0, np.abs(params[path] - leaf)).max() <= 0.05 * most, path
        assert np.abs(params[path] - leaf).max() <= 2 * most, path
        assert not noise.any() or path.endswith("qkv/bias") or "blocks/" not in path, path
    for path, leaf in by_path(state.optimizer[0].mu).items():
        assert np.allclose(by_path(again.optimizer[0].mu)[path], leaf, atol=1e-5 * max(1e-3, np.abs(leaf).max())), path


@pytest.mark.parametrize(("preset", "ranks"), [("gpt-tiny", 4), ("bert-tiny", 1)])
def test_gradients_are_those_of_a_plain_run(made, preset, ranks):
    """To 1e-6 of the largest entry."""
    setup, _, state, training = made(preset, ranks)
    windows = windows_of(setup)[0]
    key = stream_key(setup.config.seed, Stream.STEP, jnp.int32(0))
    expected = jax.jit(lambda params: setup.training.gradients(params, Rows(windows), key)[0])(state.params)
    hosted, _ = hosted_step(training)(start(training, state), windows)
    found = by_path(tree_of(training, GRADIENT, hosted.rows))
    largest = max(np.abs(leaf).max() for leaf in by_path(expected).values())
    for path, leaf in by_path(expected["blocks"]).items():
        assert np.abs(found[path] - leaf).max() <= 1e-6 * largest, path


def test_how_far_ahead_blocks_are_fetched_changes_no_bit(made):
    runs = []
    for ahead in (0, 1, 2):
        setup, _, state, training = made("gpt-tiny", 4, ahead=ahead)
        hosted, step = start(training, state), hosted_step(training)
        for windows in windows_of(setup)[:3]:
            hosted, metrics = step(hosted, windows)
        rows = [tree_of(training, name, hosted.rows) for name in (*KEPT, GRADIENT)]
        runs.append(on_host((rows, hosted.ends, hosted.optimizer, metrics)))
    for other in runs[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, other, runs[0]))


def test_a_flushed_run_goes_on_bit_for_bit(made):
    """As one saved and loaded does: flushed, turned into the state of any run and back."""
    setup, _, state, training = made("gpt-tiny", 4)
    step, windows = hosted_step(training), windows_of(setup)
    hosted, other = start(training, state), start(training, state)
    saved = flushed(training)
    for at, batch in enumerate(windows):
        hosted, _ = step(hosted, batch)
        if at == 2:
            other = start(training, on_host(saved(other)))
        other, _ = step(other, batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, on_host(saved(hosted)), on_host(saved(other))))


def test_a_bad_step_leaves_everything_as_it_was(made):
    setup, _, state, training = made("gpt-tiny", 4)
    step, windows = hosted_step(training), windows_of(setup)
    hosted, _ = step(start(training, state), windows[0])
    saved = flushed(training)
    before = on_host(saved(hosted))
    poisoned = jax.tree.map(lambda leaf: leaf, hosted.ends)
    poisoned["embedding"]["positions"] = poisoned["embedding"]["positions"] * jnp.nan
    bad, metrics = step(type(hosted)(**{**vars(hosted), "ends": poisoned}), windows[1])
    assert int(metrics.skipped) == int(metrics.bad_steps) == 1
    after = on_host(saved(bad))
    assert jax.tree.all(jax.tree.map(np.array_equal, after.params["blocks"], before.params["blocks"]))
    assert jax.tree.all(jax.tree.map(np.array_equal, after.optimizer[0].mu["blocks"], before.optimizer[0].mu["blocks"]))
    assert int(after.optimizer[0].count) == int(before.optimizer[0].count) == 1
    assert set(KEPT) < set(bad.rows)


def test_what_is_not_built_is_refused(made):
    setup, _, _, training = made("gpt-tiny", 4)
    plans = {
        "pipeline stages": piped([3, 3], 2, batch=BATCH),
        "tensor parallelism": piped([6], 1, tensor=2, batch=BATCH),
        "several micro-batches": piped([6], 1, data=2, batch=BATCH, micro_batches=2),
        "zero=3": piped([6], 1, data=2, batch=BATCH, zero=3),
    }
    with pytest.raises(InputError, match="a divisor of 4"):
        replace(training.blocks, resident=2)
    for name, plan in plans.items():
        with pytest.raises(InputError, match=name):
            HostedBlocks(
                execution=laid_out(setup, plan).training, layer=training.blocks.layer, decays=lambda path: False
            )
