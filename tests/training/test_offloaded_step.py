"""Training with blocks on the host is training: the same gradients, norms, losses and parameters, step after step."""

import itertools
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.core.plan import Offload
from jhpt.core.plan_check import check_plan
from jhpt.models.family import Rows
from jhpt.sharding.offload.stream import GRADIENT, RESIDENT, WEIGHTS
from jhpt.training import setup as training_setup
from jhpt.training.clipping import clipping
from jhpt.training.layered import Layered
from jhpt.training.offloaded_step import offloaded_training
from jhpt.training.offloaded_training import MEAN, SAVED, SQUARES, update_in_backward
from jhpt.training.optimizer import learning_rate
from jhpt.training.setup import prepare
from jhpt.training.step import RandomStream, init_state, make_train_step, random_key
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import by_path, laid_out, on_host, piped, random_params

STEPS, BATCH, BLOCKS = 5, 16, 4
PRESETS = ("gpt-tiny", "bert-tiny")


@pytest.fixture
def made(tiny, monkeypatch):
    """(setup, plain step, plain state, hosted training) of a model on so many data ranks."""
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)  # a loop compiles faster

    def make(preset, ranks, clip_norm=1.0, clip="global", micro_batches=1, dropout=0.0, **offload):
        overrides = {
            "model.dropout": dropout,
            "model.num_layers": BLOCKS,
            "train.steps": STEPS,
            "optimizer.clip_norm": clip_norm,
            "optimizer.clip": clip,
        }
        plan = piped([BLOCKS + 2], 1, data=ranks, batch=BATCH, micro_batches=micro_batches)
        prepared = prepare(tiny(preset, **overrides))
        setup = laid_out(prepared, plan)
        config, execution = setup.config, setup.training
        plain = make_train_step(
            lambda params, windows, key: execution.gradients(params, Rows(windows), key),
            setup.optimizer,
            partial(learning_rate, config.optimizer, STEPS),
            seed=config.seed,
            max_bad_steps=config.train.max_bad_steps,
            clip=clipping(config.optimizer, execution),
        )
        params = jax.tree.map(jnp.asarray, random_params(setup))
        settings = Offload(update_in_backward=config.optimizer.update_in_backward, **offload)
        offloaded = laid_out(prepared, plan.model_copy(update={"offload": settings}))
        state = init_state(params, setup.optimizer, clip=clipping(config.optimizer, execution))
        state = jax.device_put(state, setup.layout.shardings(state))
        return setup, jax.jit(plain), state, offloaded_training(offloaded)

    return make


def windows_of(setup):
    """Of every step."""
    rows = [setup.train_windows[index] for index in range(STEPS * BATCH)]
    return [jax.device_put(np.stack(rows[at * BATCH : (at + 1) * BATCH]), setup.layout.batch) for at in range(STEPS)]


def offloaded_step(training, **options):
    """Compiled, in place."""
    return jax.jit(lambda state, windows: training.step(state, Rows(windows)), donate_argnums=0, **options)


FUSED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
"""Loops are fused as for users: as `conftest` has XLA compile, a loop and its unrolled form differ in their bits."""

AS_EVER = FUSED | {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_opt_preset": "CPU_OPT_PRESET_DEFAULT",
}
"""All that XLA does unless tests tell it otherwise."""


def start(training, state):
    """Its rows on the host, as if it were loaded."""
    there, place = on_host(state), training.blocks.execution.layout.replicated

    def read(like):
        def leaf(wanted, numbers):
            return ... if wanted is ... else numbers if wanted.sharding is None else jax.device_put(numbers, place)

        return jax.tree.map(leaf, like, there)

    embedding_and_head = {name: part for name, part in state.params.items() if name != "blocks"}
    return training.loaded(read, jax.eval_shape(lambda: embedding_and_head))


def flushed(training):
    """To the state of any run, as if it were saved."""
    flush = jax.jit(training.flushed, compiler_options=FUSED)

    def whole(leaf):
        return np.stack([leaf.layer(at) for at in range(BLOCKS)]) if isinstance(leaf, Layered) else leaf

    return lambda state: jax.tree.map(whole, training.saved(flush(state)))


def tree_of(training, name, rows):
    """Rows of this name as a tree of stacked leaves."""
    bucket = training.blocks.bucket
    leaves = zip(*(bucket.views(training.blocks.row(name, rows, at)) for at in range(BLOCKS)), strict=True)
    return jax.tree.unflatten(bucket.tree, [np.stack(shards) for shards in leaves])


STEPPED = [
    ("gpt-tiny", 1, 0.5, "global", 4, 0, "both"),
    ("gpt-tiny", 4, None, "global", 2, 1, "optimizer"),
    ("gpt-tiny", 1, 0.5, "layer", 2, 1, "both"),
    ("gpt-tiny", 4, 0.5, "previous", 1, 0, "both"),
    ("bert-tiny", 1, None, "global", 1, 3, "parameters"),
    ("bert-tiny", 4, 0.5, "global", 1, 0, "both"),
    ("bert-tiny", 1, 0.5, "previous", 2, 1, "parameters"),
    ("bert-tiny", 4, 0.5, "layer", 1, 3, "optimizer"),
]


@pytest.mark.parametrize(
    ("preset", "ranks", "clip_norm", "clip", "micro_batches", "resident", "kind"),
    quick_and_exhaustive(STEPPED, [STEPPED[case] for case in (0, 7)]),
)
def test_steps_are_those_of_a_plain_run(made, preset, ranks, clip_norm, clip, micro_batches, resident, kind):
    """Over five of them: losses and norms to 1e-6, means of gradients to 1e-6 of the largest, parameters to 0.05 of
    the learning rate a step."""
    setup, plain, state, training = made(
        preset,
        ranks,
        clip_norm=clip_norm,
        clip=clip,
        micro_batches=micro_batches,
        resident=resident,
        kind=kind,
        dropout=0.1 if preset == "gpt-tiny" else 0.0,
    )
    offloaded, step = start(training, state), offloaded_step(training)
    for windows in windows_of(setup):
        state, expected = plain(state, windows)
        offloaded, actual = step(offloaded, windows)
        assert float(actual.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        assert float(actual.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-6)
        assert float(actual.learning_rate) == float(expected.learning_rate)
    kinds = {name: leaf.sharding.memory_kind for name, leaf in offloaded.rows.items()}
    names = {*SAVED} if clip != "global" or clip_norm is None else {*SAVED, GRADIENT}
    moved = {"both": names, "optimizer": {MEAN, SQUARES}, "parameters": {WEIGHTS, GRADIENT} & names}[kind]
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == moved
    assert set(kinds) == {*names, *(RESIDENT + name for name in names if resident)}
    again = flushed(training)(offloaded)
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
    means, ours = by_path(state.optimizer[0].mu), by_path(again.optimizer[0].mu)
    largest = max(np.abs(leaf).max() for leaf in means.values())
    for path, leaf in means.items():
        assert np.abs(ours[path] - leaf).max() <= 1e-6 * largest, path


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "ranks"), list(itertools.product(PRESETS, (1, 4))))
def test_gradients_are_those_of_a_plain_run(made, preset, ranks):
    """In each of five steps: to 1e-6 of the largest entry."""
    setup, plain, state, training = made(preset, ranks)
    gradients = jax.jit(lambda params, windows, key: setup.training.gradients(params, Rows(windows), key)[0])
    offloaded, step = start(training, state), offloaded_step(training)
    for at, windows in enumerate(windows_of(setup)):
        key = random_key(setup.config.seed, RandomStream.STEP, jnp.int32(at))
        expected = gradients(state.params, windows, key)
        offloaded, _ = step(offloaded, windows)
        actual = by_path(tree_of(training, GRADIENT, offloaded.rows))
        largest = max(np.abs(leaf).max() for leaf in by_path(expected).values())
        for path, leaf in by_path(expected["blocks"]).items():
            assert np.abs(actual[path] - leaf).max() <= 1e-6 * largest, (at, path)
        state, _ = plain(state, windows)


FETCHED = list(itertools.product(("global", "previous"), (1, 2)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("clip", "ahead"), FETCHED)
def test_how_far_ahead_blocks_are_fetched_changes_no_bit(made, clip, ahead):
    runs = []
    for distance in (0, ahead):
        setup, _, state, training = made("gpt-tiny", 4, ahead=distance, clip=clip)
        offloaded, step = start(training, state), offloaded_step(training, compiler_options=FUSED)
        for windows in windows_of(setup)[:3]:
            offloaded, metrics = step(offloaded, windows)
        rows = [tree_of(training, name, offloaded.rows) for name in training.names]
        runs.append(on_host((rows, offloaded.embedding_and_head, offloaded.optimizer, metrics)))
    assert jax.tree.all(jax.tree.map(np.array_equal, *runs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", ["global", "previous"])
def test_a_flushed_run_resumes_bit_for_bit(made, clip):
    """As one saved and loaded does: flushed, turned into the state of any run and back."""
    setup, _, state, training = made("gpt-tiny", 4, clip_norm=0.5, clip=clip)
    step, windows = offloaded_step(training, compiler_options=FUSED), windows_of(setup)
    offloaded, other = start(training, state), start(training, state)
    saved = flushed(training)
    for at, batch in enumerate(windows):
        offloaded, _ = step(offloaded, batch)
        if at == 2:
            other = start(training, on_host(saved(other)))
        other, _ = step(other, batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, on_host(saved(offloaded)), on_host(saved(other))))


@pytest.mark.parametrize("clip", quick_and_exhaustive(["global", "previous", "layer"], ["previous"]))
def test_a_bad_step_leaves_everything_as_it_was(made, clip):
    setup, _, state, training = made("gpt-tiny", 4, clip=clip)
    step, windows = offloaded_step(training), windows_of(setup)
    offloaded, _ = step(start(training, state), windows[0])
    saved = flushed(training)
    before = on_host(saved(offloaded))
    poisoned = jax.tree.map(lambda leaf: leaf, offloaded.embedding_and_head)
    poisoned["embedding"]["positions"] = poisoned["embedding"]["positions"] * jnp.nan
    bad, metrics = step(type(offloaded)(**{**vars(offloaded), "embedding_and_head": poisoned}), windows[1])
    assert int(metrics.skipped) == int(metrics.bad_steps) == 1
    after = on_host(saved(bad))
    assert jax.tree.all(jax.tree.map(np.array_equal, after.params["blocks"], before.params["blocks"]))
    assert jax.tree.all(jax.tree.map(np.array_equal, after.optimizer[0].mu["blocks"], before.optimizer[0].mu["blocks"]))
    assert int(after.optimizer[0].count) == int(before.optimizer[0].count) == 1
    if clip == "previous":
        assert float(after.norm) == float(before.norm) > 0


@pytest.mark.parametrize("clip", quick_and_exhaustive(["previous", "layer"], ["layer"]))
def test_blocks_step_at_once_down_to_the_first_gradient_that_is_not_finite(made, monkeypatch, clip):
    """With a finite loss: blocks behind it have stepped, it and those before it have not; the step is a bad one."""
    broken = 1

    def poisoned(*args):
        update = update_in_backward(*args)

        def after_backward(pending, rows, gradient, state):
            state, left = state
            state, rows = update.after_backward(
                pending, rows, gradient * jnp.where(left == broken, jnp.nan, 1.0), state
            )
            return (state, left - 1), rows

        first = lambda sums, pending: (update.start_backward(sums, pending), jnp.int32(BLOCKS - 1))  # noqa: E731
        last = lambda state: update.finish_backward(state[0])  # noqa: E731
        return replace(update, start_backward=first, after_backward=after_backward, finish_backward=last)

    monkeypatch.setattr("jhpt.training.offloaded_training.update_in_backward", poisoned)
    setup, _, state, training = made("gpt-tiny", 4, clip=clip)
    saved = flushed(training)
    before = on_host(saved(start(training, state)))
    offloaded, metrics = offloaded_step(training)(start(training, state), windows_of(setup)[0])
    after = on_host(saved(offloaded))
    assert int(metrics.skipped) == int(metrics.bad_steps) == 1 and np.isfinite(float(metrics.loss))
    for path, leaf in by_path(after.params["blocks"]).items():
        same = leaf == by_path(before.params["blocks"])[path]
        assert same[: broken + 1].all(), path
        assert not same[broken + 1 :].all(), path
    assert jax.tree.all(jax.tree.map(np.array_equal, after.params["embedding"], before.params["embedding"]))


def test_a_plan_whose_steps_are_not_those_of_the_configuration_is_refused(made):
    *_, training = made("gpt-tiny", 1)
    with pytest.raises(InputError, match=r"offload.update_in_backward=false.* optimizer.clip=layer"):
        replace(training, config=training.config.model_copy(update={"clip": "layer"}))


def test_what_is_not_built_is_refused():
    plans = {
        "2 pipeline stages": piped([3, 3], 2, batch=BATCH),
        "tensor parallelism": piped([6], 1, tensor=2, batch=BATCH),
        r"use offload.resident=0, 1 or 3": piped([6], 1, batch=BATCH),
    }
    for name, plan in plans.items():
        offload = Offload(resident=2 if "resident" in name else 0)
        with pytest.raises(InputError, match=name):
            check_plan(plan.model_copy(update={"offload": offload}), 6)


def test_runs_resume_wherever_blocks_live(tiny, tmp_path):
    """Saved with blocks on the host, loaded without, and the other way round: as if nothing had changed.  Killed after
    its second step and resumed with blocks where they were: the same bits in the last checkpoint."""
    options = {"model.num_layers": 2, "parallel.data": 2, "optimizer.schedule": "constant"}
    options |= {"checkpoint.every": 1, "checkpoint.keep": 9, "evaluation.every": 2, "evaluation.batches": 1}

    def run(name, offload, steps=3):
        config = tiny(**options | {"train.steps": steps, "memory.offload": offload})
        return jhpt.train(config, out=tmp_path / name)

    def killed_after(step, name):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name)
        for later in range(step + 1, 4):
            shutil.rmtree(folder / "checkpoints" / str(later))

    whole = run("whole", "both")
    killed_after(1, "moved")
    assert run("moved", "off", 2).step == 2
    moved = run("moved", "both")
    assert moved.losses == pytest.approx(whole.losses, rel=1e-6) and set(whole.losses) == {1, 2, 3}
    assert moved.validation_losses == pytest.approx(whole.validation_losses, rel=1e-6)
    assert set(whole.validation_losses) == {2, 3}

    killed_after(2, "killed")
    assert run("killed", "both").losses == whole.losses
    states = []
    for name in ("whole", "killed"):
        manager = ocp.CheckpointManager((tmp_path / name / "checkpoints").absolute())
        states.append(manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"])
        manager.close()
    assert jax.tree.all(jax.tree.map(np.array_equal, *states))


def test_a_host_without_room_is_refused(tiny, tmp_path):
    config = tiny(**{"memory.offload": "both", "memory.host_budget_bytes": "1MiB"})
    with pytest.raises(InputError, match=r"on each host, which has 1 MiB"):
        jhpt.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "clip"),
    [("gpt-tiny", "global"), ("gpt-tiny", "previous"), ("gpt-tiny", "layer"), ("bert-tiny", "global")],
)
def test_what_stays_on_the_devices_changes_no_bit(made, preset, clip):
    """After three steps, with nothing resident, every second block, or three of four; with code as users have it, for
    code that is not optimised joins a product to a sum in some loops and not in others."""
    runs = []
    for resident in (0, 1, 3):
        setup, _, state, training = made(preset, 2, clip_norm=0.5, clip=clip, resident=resident)
        offloaded, step = start(training, state), offloaded_step(training, compiler_options=AS_EVER)
        for windows in windows_of(setup)[:3]:
            offloaded, metrics = step(offloaded, windows)
        rows = [tree_of(training, name, offloaded.rows) for name in training.names]
        runs.append(on_host((rows, offloaded.embedding_and_head, offloaded.optimizer, metrics)))
    for other in runs[1:]:
        different = [path for path, leaf in by_path(other).items() if not np.array_equal(leaf, by_path(runs[0])[path])]
        assert not different
