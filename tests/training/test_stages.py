"""Plans whose stages have devices of their own train as others do: the same losses, skipped steps, evaluations and
checkpoints, which other plans go on from."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jhpt
from jhpt.core.ports import free_port
from jhpt.training.compile import compile_step
from jhpt.training.loop import _batches
from jhpt.training.programs import global_batch
from jhpt.training.stages_setup import prepare_run
from tests.conftest import tiny_overrides
from tests.sharding.plans import on_host
from tests.sharding.stages.plans import general
from tests.training.test_not_finite import GRADIENT_ALONE, LOSS, ROW, bad_parts
from tests.training.test_resume import final_state, losses, same_bits

PLAN = general([2, 1], [2, 1], [1, 1, 1], batch=15, micro_batches=3)
"""Five rows on two replicas with room for three each; the tied table is on both stages."""

BY_SPEED = general([3], [2], [1, 1, 1], batch=15, micro_batches=3, samples=(4, 1))

SETTINGS = {
    "model.num_layers": 1,
    "data.batch_size": 15,
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


OPTIONS = {
    "recomputation": ({}, {"recompute": True}),
    "adafactor": ({"optimizer.name": "adafactor"}, {}),
    "muon": ({"optimizer.name": "muon"}, {}),
    "lion": ({"optimizer.name": "lion"}, {}),
    "8-bit moments": ({"optimizer.moments": "int8"}, {}),
}
"""By what is set: changes of the configuration and of the plan."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIONS)
def test_under_other_settings_losses_are_those_of_one_device(corpus, tmp_path, name):
    changes, of_plan = OPTIONS[name]
    settings = tiny_overrides(corpus) | SETTINGS | changes
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings | {"parallel.data": 1})
    stages = jhpt.train("gpt-tiny", out=tmp_path / "stages", overrides=settings, plan=PLAN.model_copy(update=of_plan))
    assert stages.losses == pytest.approx(one.losses, rel=1e-4)


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
        resumed(stages, tmp_path / "to samples by speed", plan=BY_SPEED),
        resumed(stages, tmp_path / "from stages", overrides={"parallel.tensor": 2, "parallel.data": 1}),
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


def test_three_processes_go_on_where_one_has_begun(runs, tmp_path):
    """Two of them are the replicas of the first stage, and the third is the second stage."""
    _, stages = runs
    shutil.copytree(stages.run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    port, workers = free_port(), []
    for rank in range(3):
        processes = {"coordinator": f"127.0.0.1:{port}", "process_id": rank, "num_processes": 3}
        spec = {"preset": None, "overrides": {}, "out": str(tmp_path / "run"), "processes": processes}
        file = tmp_path / f"{rank}.json"
        file.write_text(json.dumps(spec))
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.runner", str(file)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for worker in workers:
            out, error = worker.communicate(timeout=240)
            assert worker.returncode == 0, error
            found = json.loads(out.splitlines()[-1])["losses"]
            assert {int(step): loss for step, loss in found.items()} == pytest.approx(stages.losses, rel=1e-5)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert losses(tmp_path / "run", "validation_loss") == pytest.approx(stages.validation_losses, rel=1e-5)
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
