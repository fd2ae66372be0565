"""Plans whose stages have devices of their own train as others do: the same losses, skipped steps, evaluations and
checkpoints, which other plans go on from."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jhpt
from jhpt.training.compile import compile_step
from jhpt.training.loop import _batches
from jhpt.training.programs import global_batch
from jhpt.training.stages_setup import prepare_run
from tests.conftest import tiny_overrides
from tests.sharding.plans import on_host
from tests.sharding.stages.plans import general
from tests.training.test_not_finite import GRADIENT_ALONE, LOSS, ROW, bad_parts
from tests.training.test_resume import final_state, losses, same_bits

PLAN = general([2, 1], [3, 1], [1, 1, 1], micro_batches=2)
"""Eight rows on three replicas with room for three each; the tied table is on both stages."""

SETTINGS = {
    "model.num_layers": 1,
    "optimizer.schedule": "constant",
    "train.steps": 4,
    "checkpoint.every": 2,
    "evaluation.every": 2,
    "guards.spike": "skip",
}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """The results of four steps on one device and under the plan.  Copy their folders before you change them."""
    settings, folder = tiny_overrides(corpus) | SETTINGS, tmp_path_factory.mktemp("stages")
    one = jhpt.train("gpt-tiny", out=folder / "one", overrides=settings | {"parallel.data": 1})
    return one, jhpt.train("gpt-tiny", out=folder / "stages", overrides=settings, plan=PLAN)


def test_losses_norms_and_evaluations_are_those_of_one_device(runs):
    one, stages = runs
    for name in ("losses", "validation_losses"):
        expected = getattr(one, name)
        assert expected and getattr(stages, name) == pytest.approx(expected, rel=1e-4)
    assert losses(stages.run_dir, "grad_norm") == pytest.approx(losses(one.run_dir, "grad_norm"), rel=1e-4)


def resumed(whole, run_dir, **changes):
    """The last two of the four steps once more."""
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "4")
    return jhpt.train(out=run_dir, **changes)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_resumed_it_is_bitwise_the_same_and_close_under_another_plan(runs, tmp_path):
    one, stages = runs
    same = resumed(stages, tmp_path / "same")
    assert same.losses == stages.losses and same.validation_losses == stages.validation_losses
    same_bits(final_state(tmp_path / "same", 4), final_state(stages.run_dir, 4))
    others = [
        resumed(one, tmp_path / "to stages", plan=PLAN),
        resumed(stages, tmp_path / "from stages", overrides={"parallel.tensor": 2}),
    ]
    for other in others:
        assert other.losses == pytest.approx(stages.losses, rel=1e-4)
        assert other.validation_losses == pytest.approx(stages.validation_losses, rel=1e-4)


def test_one_bad_row_leaves_the_state_of_all_stages_as_it_was(tiny):
    setup = prepare_run(tiny(**SETTINGS | {"optimizer.weights": "bfloat16_kahan"}), PLAN)
    spoilt = tuple(
        replace(one, parts={degree: bad_parts(parts) for degree, parts in one.parts.items()})
        for one in setup.training.executions
    )
    setup = replace(setup, training=replace(setup.training, executions=spoilt))
    step, batches = compile_step(setup), _batches(setup, 0)
    state, _ = step.step(step.init(), global_batch(setup, next(batches)))
    before = kept(state)
    for skipped, token in enumerate((LOSS, GRADIENT_ALONE), 1):
        rows = next(batches).copy()
        rows[ROW] = token
        state, metrics = step.step(state, global_batch(setup, rows))
        assert int(metrics.bad_steps) == skipped and {int(part.skipped) for part in state.parts} == {skipped}
        assert all(one.tobytes() == other.tobytes() for one, other in zip(before, kept(state), strict=True))
    state, metrics = step.step(state, global_batch(setup, next(batches)))
    assert int(metrics.bad_steps) == 0 and all(np.isfinite(leaf).all() for leaf in kept(state))


def kept(state):
    """What a step that is skipped has to leave alone."""
    return jax.tree.leaves([on_host((part.params, part.optimizer, part.remainder)) for part in state.parts])
