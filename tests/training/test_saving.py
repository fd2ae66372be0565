"""Checkpoints under trouble: damaged, deleted, killed between data and manifest, on a disk that is full."""

import errno
import itertools
import json
import os
import random
import shutil
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jhpt
from jhpt import cli
from jhpt.core.errors import Exit, InputError
from jhpt.core.load import load_config, to_yaml
from jhpt.training import checkpoint, step_folders
from jhpt.training.checkpoint import Checkpoints, SavingFailed, newest
from jhpt.training.metrics import MetricsWriter, read_metrics
from jhpt.training.run_dir import new_run_dir
from jhpt.training.step_folders import Damaged, steps_in
from tests.conftest import tiny_overrides

SETTINGS = {"train.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 3, "parallel.data": 1, "model.num_layers": 1}


@pytest.fixture(scope="module")
def settings(corpus):
    return tiny_overrides(corpus) | SETTINGS


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    run = tmp_path_factory.mktemp("saving") / "run"
    jhpt.train("gpt-tiny", overrides=settings, out=run)
    return run


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def parameters(run) -> dict[str, np.ndarray]:
    loaded = jhpt.load(run)
    leaves = jax.tree_util.tree_flatten_with_path(loaded.params)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def fault(rng, folder) -> None:
    """Flips a bit, or cuts off the end, of a file anywhere in a step."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    if rng.random() < 0.25 or not content:
        path.write_bytes(content[: rng.randrange(len(content))] if content else b"x")
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_bit_flips_what_is_read_is_what_was_saved(run, finished, seed):
    """A fault of the manifest itself may leave the values as they are; then either step is right."""
    fault(random.Random(seed), run / "checkpoints" / "6")
    step = newest(run, lambda line: None)
    assert step in (4, 6)
    if step == 6:
        assert same(parameters(run), parameters(finished))


def test_training_goes_on_from_the_step_before_the_damaged_one(run, finished, settings, capsys):
    data = max((run / "checkpoints" / "6").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 16
    data.write_bytes(content)
    result = jhpt.train(None, out=run)
    assert result.step == 6 and "6 is damaged" in capsys.readouterr().out
    assert same(parameters(run), parameters(finished)) and (run / "checkpoints" / "6.damaged").is_dir()


def test_a_run_goes_on_from_an_earlier_step_on_request(run, finished, capsys):
    with pytest.raises(InputError, match=r"--resume-step 3: .* there are: 2, 4, 6"):
        jhpt.train(None, out=run, resume_step=3)
    assert jhpt.train(None, out=run, resume_step=2).step == 6
    said = capsys.readouterr().out
    assert "checkpoint 4 is left behind" in said and "checkpoint 6 is left behind" in said
    assert same(parameters(run), parameters(finished)) and steps_in(run / "checkpoints") == [2, 4, 6]
    assert (run / "checkpoints" / "6.left").is_dir()


def test_an_array_that_is_not_what_was_saved_is_refused(run):
    """As if memory had failed between disk and device: the files are whole."""
    different = checkpoint.different
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "different", lambda saved, found: [*different(saved, found), "params/norm"])
        with pytest.raises(Damaged, match=r"params/norm in checkpoint .*6 is not what was saved"):
            jhpt.load(run)


def test_deleted_checkpoints_never_start_again_from_zero(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=r"has metrics of step 6 and no checkpoint"):
        jhpt.train(None, out=run)
    (run / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"has metrics of step 6 and no checkpoint"):
        jhpt.train(None, out=run)
    (run / "metrics.jsonl").unlink()
    assert jhpt.train(None, out=run).step == 6


@pytest.mark.parametrize(("reached", "refused"), [(4, False), (5, True)])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, settings, reached, refused):
    """Every second step is saved.  Up to step 4 the save of step 2 may not have ended."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(load_config("gpt-tiny", settings)))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, reached + 1)))
    if refused:
        with pytest.raises(InputError, match="has metrics of step 5"):
            jhpt.train(None, out=run)
    else:
        assert jhpt.train(None, out=run).step == 6


class FullDisk:
    """A disk on which the manifests with these numbers, from 1, cannot be written."""

    def __init__(self, monkeypatch, failing):
        self.failing, self.number, self.write = failing, 0, step_folders.write_manifest
        monkeypatch.setattr(step_folders, "write_manifest", self)

    def __call__(self, folder):
        self.number += 1
        if self.number in self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(folder)


def test_a_full_disk_does_not_end_training(tmp_path, settings, finished, monkeypatch, capsys):
    FullDisk(monkeypatch, {1, 2})
    run = tmp_path / "run"
    assert jhpt.train("gpt-tiny", overrides=settings, out=run).step == 6
    said = capsys.readouterr().out
    assert said.count("could not be written") == 2 and "No space left" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["6"]
    assert same(parameters(run), parameters(finished))


def test_files_that_fail_after_the_first_one_do_not_end_training(tmp_path, settings, finished, monkeypatch, capsys):
    """Orbax writes what it knows of a step in a thread of its own, which may fail when the step has been given up."""
    ends, numbers = ocp.AsyncCheckpointer._save_step_metadata, itertools.count(1)

    def end_on_a_full_disk(self, directory, **metadata):
        full = next(numbers) <= 2
        if full:
            shutil.rmtree(directory)
        ends(self, directory, **metadata)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp.AsyncCheckpointer, "_save_step_metadata", end_on_a_full_disk)
    run = tmp_path / "run"
    assert jhpt.train("gpt-tiny", overrides=settings, out=run).step == 6
    said = capsys.readouterr().out
    assert said.count("could not be written") == said.count("No space left") == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["6"]
    assert same(parameters(run), parameters(finished))


def test_the_last_step_is_tried_again(tmp_path, settings, finished, monkeypatch):
    monkeypatch.setattr("jhpt.training.run.SECONDS_BETWEEN_ATTEMPTS", 0.0)
    disk = FullDisk(monkeypatch, {3, 4})
    assert jhpt.train("gpt-tiny", overrides=settings, out=tmp_path / "run").step == 6
    assert disk.number == 5 and same(parameters(tmp_path / "run"), parameters(finished))


def test_a_disk_that_stays_full_ends_it_and_the_last_good_step_stays(run, settings, monkeypatch):
    monkeypatch.setattr("jhpt.training.run.SECONDS_BETWEEN_ATTEMPTS", 0.0)
    FullDisk(monkeypatch, range(100))
    with pytest.raises(SavingFailed, match=r"3 checkpoints in a row .*step 6 is whole") as caught:
        jhpt.train(None, out=run, overrides={"train.steps": 20})
    assert caught.value.status == Exit.STORAGE
    assert newest(run) == 6
    monkeypatch.undo()
    assert jhpt.train(None, out=run, overrides={"train.steps": 8}).step == 8


def test_a_slow_disk_holds_up_the_next_save_and_loses_nothing(tmp_path, settings, finished, monkeypatch):
    """The first save ends only when step 3 has been trained; the second one, of step 4, waits for it."""
    trained, write, order = threading.Event(), step_folders.write_manifest, []
    record = MetricsWriter.write

    def write_slowly(folder):
        if not order:
            assert trained.wait(60)
        order.append(folder.name.partition(".")[0])
        write(folder)

    def recorded(self, step, values):
        record(self, step, values)
        if step == 3:
            trained.set()

    monkeypatch.setattr(step_folders, "write_manifest", write_slowly)
    monkeypatch.setattr(MetricsWriter, "write", recorded)
    run = tmp_path / "run"
    assert jhpt.train("gpt-tiny", overrides=settings, out=run).step == 6
    assert order == ["2", "4", "6"] and steps_in(run / "checkpoints") == [2, 4, 6]
    assert same(parameters(run), parameters(finished))


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, settings, finished, monkeypatch):
    clock = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.chdir(tmp_path)
    first = jhpt.train("gpt-tiny", overrides=settings | {"train.steps": 4})
    assert jhpt.train(None, out=first.run_dir, overrides={"train.steps": 6}).step == 6
    assert [record["step"] for record in read_metrics(first.run_dir) if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert steps_in(first.run_dir / "checkpoints") == [2, 4, 6]
    monkeypatch.setattr(time, "time", lambda: 1_999_999_999.0)
    taken = [new_run_dir(load_config("gpt-tiny", settings)) for _ in range(2)]
    taken[0].mkdir()
    assert taken[0] == taken[1] != new_run_dir(load_config("gpt-tiny", settings))


def test_a_run_directory_that_was_deleted_is_written_again(tmp_path, settings, monkeypatch, capsys):
    run, save = tmp_path / "run", Checkpoints.save

    def save_and_delete(self, step, *rest):
        save(self, step, *rest)
        if step == 2:
            self.settle()
            shutil.rmtree(run)

    monkeypatch.setattr(Checkpoints, "save", save_and_delete)
    assert jhpt.train("gpt-tiny", overrides=settings, out=run).step == 6
    assert "was deleted; it is written again" in capsys.readouterr().out
    assert steps_in(run / "checkpoints") == [4, 6] and jhpt.train(None, out=run).step == 6


def test_a_mirror_takes_the_place_of_lost_checkpoints(tmp_path, settings, finished, capsys):
    run, mirror = tmp_path / "run", tmp_path / "elsewhere"
    kept = settings | {"checkpoint.mirror": str(mirror), "checkpoint.mirror_every": 2, "train.steps": 8}
    jhpt.train("gpt-tiny", overrides=kept, out=run)
    assert steps_in(mirror) == [4, 8]
    shutil.rmtree(mirror / "8")
    shutil.rmtree(run / "checkpoints")
    assert jhpt.train(None, out=run).step == 8
    assert "taking step 4 from checkpoint.mirror" in capsys.readouterr().out


def test_verify_names_what_is_damaged(run, capsys):
    assert cli.main(["verify", str(run)]) == Exit.DONE and capsys.readouterr().out.count(": whole") == 3
    (run / "checkpoints" / "4" / "record.json").write_text("{}")
    assert cli.main(["verify", str(run)]) == Exit.DAMAGED
    out = capsys.readouterr().out
    assert out.count(": whole") == 2 and "checkpoints/4: damaged\n  record.json has 2 bytes instead of" in out
    assert cli.main(["verify", str(run / "checkpoints" / "6")]) == Exit.DONE
    assert cli.main(["verify", str(run / "tensorboard")]) == Exit.INPUT
