"""Resumed equals uninterrupted: bit for bit on the same mesh, closely on another."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jhpt
from benchmarks.faults.moments import MOMENTS
from jhpt.core.errors import OutOfMemory
from jhpt.core.load import load_config
from jhpt.training import loop
from jhpt.training.metrics import read_metrics
from jhpt.training.programs import global_batch
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive

SETTINGS = {"train.steps": 20, "checkpoint.every": 5, "evaluation.every": 10, "checkpoint.keep": 4}
SHORT = {
    "parallel.data": 1,
    "model.num_layers": 1,
    "optimizer.schedule": "constant",  # a program does not depend on the number of steps
}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """(settings, result) of a run of seven steps to compare others to.  Copy its directory, do not change it."""
    settings = tiny_overrides(corpus) | SHORT | {"model.dropout": 0.1, "train.steps": 7, "evaluation.every": 3}
    settings |= {"checkpoint.every": 1, "checkpoint.keep": 2, "checkpoint.keep_every": 3}
    return settings, jhpt.train("gpt-tiny", out=tmp_path_factory.mktemp("finished") / "run", overrides=settings)


def forgotten(run_dir: Path, *steps: int) -> Path:
    """Without these checkpoints, as if the run had been killed before it saved them."""
    for step in steps:
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    return run_dir


def run(folder: Path, corpus, **changes):
    """Starts `tests.training.runner`; the caller waits for it."""
    folder.mkdir(exist_ok=True)
    overrides = tiny_overrides(corpus) | SETTINGS | {"parallel.data": 1} | changes.pop("overrides", {})
    spec = {"preset": "gpt-tiny", "out": str(folder / "run"), "overrides": overrides} | changes
    file = folder / "spec.json"
    file.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "tests.training.runner", str(file)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error.decode()
    return json.loads(out.decode().splitlines()[-1])


def final_state(run_dir: Path, step: int):
    """Leaves of a checkpoint by path, as saved."""
    manager = ocp.CheckpointManager(run_dir / "checkpoints")
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    manager.close()
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def same_bits(first, second):
    assert first.keys() == second.keys() and len(first) > 20
    for path, leaf in first.items():
        assert leaf.tobytes() == second[path].tobytes(), path


def losses(run_dir: Path, name="loss"):
    return {record["step"]: record[name] for record in read_metrics(run_dir) if name in record}


KILLED = {
    "gpt": {"preset": "gpt-tiny"},
    "gpt-in-hybrid-shards": {
        "preset": "gpt-tiny",
        "overrides": {"parallel.data": 4, "parallel.zero": 3, "parallel.zero_ranks": 2},
    },
    "bert-with-dropout": {"preset": "bert-tiny", "overrides": {"model.dropout": 0.1}},
    "gpt-in-a-pipeline": {
        "preset": "gpt-tiny",
        "overrides": {"parallel.pipe": 2, "parallel.data": 2, "parallel.micro_batches": 4, "model.dropout": 0.1},
    },
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KILLED)
def test_kill_and_resume_is_bitwise_equal_to_one_go(tmp_path, corpus, name):
    """20 steps at once; 10 + kill -9 once the checkpoint is written, and 10 + kill -9 while it is being written."""
    changes = KILLED[name]
    whole = run(tmp_path / "whole", corpus, **changes)
    killed = [run(tmp_path / when, corpus, kill_after=10, kill_when=when, **changes) for when in ("written", "writing")]
    finish(whole)
    expected = final_state(tmp_path / "whole" / "run", 20)
    for process, when in zip(killed, ("written", "writing"), strict=True):
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        result = finish(run(tmp_path / when, corpus, **changes))
        assert result["step"] == 20
        same_bits(final_state(tmp_path / when / "run", 20), expected)
        saved = {path.name for path in (tmp_path / when / "run" / "checkpoints").iterdir()}
        assert saved == {"5", "10", "15", "20"}  # nothing half written is left
        for name in ("loss", "validation_loss", "grad_norm"):
            assert losses(tmp_path / when / "run", name) == losses(tmp_path / "whole" / "run", name)
            assert len(losses(tmp_path / "whole" / "run", name)) == (2 if name == "validation_loss" else 20)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("when", quick_and_exhaustive(MOMENTS, ["manifest"]))
def test_killed_while_it_saves_a_run_resumes_bit_for_bit(tmp_path, corpus, finished, when):
    """The shortest of the above: one process is killed, and this one does the rest."""
    settings, whole = finished
    process = run(tmp_path, corpus, overrides=settings, kill_after=4, kill_when=when)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    result = jhpt.train(out=tmp_path / "run")
    assert result.losses == whole.losses and set(whole.losses) == set(range(1, 8))
    assert result.validation_losses == whole.validation_losses and set(whole.validation_losses) == {3, 6, 7}
    assert losses(tmp_path / "run", "grad_norm") == losses(whole.run_dir, "grad_norm")
    same_bits(final_state(tmp_path / "run", 7), final_state(whole.run_dir, 7))
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"3", "6", "7"}


def test_a_step_is_saved_before_it_is_evaluated_and_evaluated_when_the_run_resumes(tmp_path, finished, monkeypatch):
    """An evaluation that fails loses neither the step nor, in the end, its own record."""
    settings, whole = finished

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
        patch.setattr(loop, "evaluate", fail)
        jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=settings)
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir() and not (tmp_path / "run" / "checkpoints" / "4").exists()
    result = jhpt.train(out=tmp_path / "run")
    assert result.validation_losses == whole.validation_losses and set(result.validation_losses) == {3, 6, 7}
    assert result.losses == whole.losses and set(result.losses) == set(range(1, 8))
    again = jhpt.train(out=tmp_path / "run", overrides={"train.steps": 8})
    assert set(again.validation_losses) == {3, 6, 7, 8}
    assert [record["step"] for record in read_metrics(tmp_path / "run") if "validation_loss" in record] == [3, 6, 7, 8]


def test_a_signal_saves_and_stops(tmp_path, finished, monkeypatch):
    """SIGTERM, which a scheduler sends before it takes the machine away."""
    noticed, batches = [], []

    def batch_and_signal(*arguments):
        batches.append(1)
        if len(batches) == 3:
            signal.raise_signal(signal.SIGTERM)
        return global_batch(*arguments)

    monkeypatch.setattr(loop, "global_batch", batch_and_signal)
    handler = signal.signal(signal.SIGTERM, lambda *_: noticed.append(1))
    try:
        changes = {"train.steps": 100, "checkpoint.every": 100, "evaluation.every": 100}
        result = jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=finished[0] | changes)
        assert not noticed
        signal.raise_signal(signal.SIGTERM)
        assert noticed  # a run that is over leaves signals alone
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert result.interrupted and result.step == 3 and not result.validation_losses
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


@pytest.mark.exhaustive
def test_sigterm_saves_and_stops(tmp_path, corpus):
    """Sent from outside to a process of its own."""
    process = run(tmp_path / "stopped", corpus, overrides={"train.steps": 100_000, "checkpoint.every": 100_000})
    metrics = tmp_path / "stopped" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert result["interrupted"] and 3 < result["step"] < 100_000
    assert (tmp_path / "stopped" / "run" / "checkpoints" / str(result["step"])).is_dir()


def mesh(data, tensor, zero=0):
    return {"parallel.data": data, "parallel.tensor": tensor, "parallel.zero": zero}


@pytest.mark.exhaustive
def test_a_run_resumes_on_another_mesh(tmp_path, corpus):
    """Ten steps on 4 x 2 with ZeRO-3, then on 2 x 4 with ZeRO-1, on one device, and for reference on 4 x 2 again."""
    settings = tiny_overrides(corpus) | {"train.steps": 10, "checkpoint.every": 10}
    first = tmp_path / "first"
    jhpt.train("gpt-tiny", out=first, overrides=settings | mesh(4, 2, zero=3))
    results = {}
    for name, layout in {"same": mesh(4, 2, 3), "turned": mesh(2, 4, 1), "single": mesh(1, 1)}.items():
        shutil.copytree(first, tmp_path / name)
        results[name] = jhpt.train("gpt-tiny", out=tmp_path / name, overrides=settings | layout | {"train.steps": 20})
    for name in ("turned", "single"):
        for step in range(11, 21):
            assert results[name].losses[step] == pytest.approx(results["same"].losses[step], rel=1e-4)


PLANS = {
    "pipe 4, ZeRO-1": {"pipe": 4, "data": 2, "zero": 1, "micro_batches": 4},
    "pipe 2, interleaved, ZeRO-3": {"pipe": 2, "data": 2, "tensor": 2, "zero": 3, "micro_batches": 2, "chunks": 2},
    "one device": {"data": 1},
    "pipe 3, uneven, gpipe": {"pipe": 3, "data": 1, "micro_batches": 4, "schedule": "gpipe"},
    "hybrid, ZeRO-2": {"data": 4, "zero": 2, "zero_ranks": 2, "micro_batches": 2},
    "hybrid, ZeRO-2, in wider groups": {"data": 8, "zero": 2, "zero_ranks": 4, "micro_batches": 2},
    "ZeRO-3 over all": {"data": 4, "zero": 3},
    "pipe 4 again": {"pipe": 4, "data": 2, "zero": 1, "micro_batches": 4},
}


def test_a_run_resumes_under_another_plan_and_under_its_own_again(tmp_path, corpus):
    """From a checkpoint of one device in a pipeline that shards everything, and from the pipeline's on one device."""
    settings = tiny_overrides(corpus) | SHORT | {"model.num_layers": 2, "train.steps": 4, "checkpoint.every": 1}
    settings |= {"checkpoint.keep": 4, "data.validation_fraction": 0.0}
    alone = jhpt.train("gpt-tiny", out=tmp_path / "alone", overrides=settings)
    folder = forgotten(shutil.copytree(tmp_path / "alone", tmp_path / "run"), 3, 4)
    piped = {"parallel.pipe": 2, "parallel.data": 4, "parallel.zero": 3, "parallel.zero_ranks": 2}
    there = jhpt.train(out=folder, overrides=piped | {"train.steps": 3})
    assert there.step == 3 and "the plan has changed" in (folder / "train.log").read_text()
    recorded = read_metrics(folder)
    back = jhpt.train("gpt-tiny", out=folder, overrides=settings)
    assert back.losses == pytest.approx(alone.losses, rel=1e-4) and set(back.losses) == {1, 2, 3, 4}
    assert recorded[-1]["step"] == 3 and read_metrics(folder)[: len(recorded)] == recorded, "step 3 is the pipeline's"


@pytest.mark.exhaustive
def test_a_run_resumes_under_any_plan(tmp_path, corpus):
    """Three steps under each, from checkpoint to checkpoint, are the steps of one device in one go."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 4, "optimizer.schedule": "constant"}
    settings |= {"optimizer.learning_rate": 5e-4}  # no spike that would enlarge what is rounded differently
    settings |= {"data.validation_fraction": 0.0}
    steps = 3 * len(PLANS)
    alone = jhpt.train(
        "gpt-tiny", out=tmp_path / "alone", overrides=settings | {"parallel.data": 1, "train.steps": steps}
    )
    for number, plan in enumerate(PLANS.values(), 1):
        parallel = {f"parallel.{name}": value for name, value in plan.items()}
        result = jhpt.train(
            "gpt-tiny", out=tmp_path / "run", overrides=settings | parallel | {"train.steps": 3 * number}
        )
        assert result.step == 3 * number
    assert set(result.losses) == set(range(1, steps + 1))
    assert result.losses == pytest.approx(alone.losses, rel=1e-4)


def test_steps_logging_and_parallelism_may_change_and_a_finished_run_is_left_alone(tmp_path, finished):
    folder = shutil.copytree(finished[1].run_dir, tmp_path / "run")
    again = jhpt.train(out=folder)  # the run's own configuration
    assert again.step == 7 and again.tokens_per_s is None
    changes = {"train.steps": 10, "parallel.data": 2, "log.every": 2, "checkpoint.every": 5, "evaluation.every": 5}
    longer = jhpt.train(out=folder, overrides=changes)
    assert longer.step == 10 and set(longer.losses) == {*range(1, 8), 8, 10}
    assert load_config(folder / "config.yaml").train.steps == 10


def test_checkpoints_are_rotated(finished):
    saved = {int(path.name) for path in (finished[1].run_dir / "checkpoints").iterdir()}
    assert saved == {3, 6, 7}
