"""The campaign of faults can see what it looks for: planted losses are named, and a trial kills where it says."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks.faults import flips, kills
from benchmarks.faults.flips import contents, damage, of_checkpoint
from benchmarks.faults.kills import digests_of, judged, written_at
from benchmarks.faults.moments import MOMENTS, die_at
from benchmarks.faults.setups import SETUPS, settings_of, write_text
from benchmarks.faults.zygote import end_of_all
from jhpt.core.errors import Exit
from jhpt.core.load import load_config
from jhpt.training import checkpoint, step_folders
from jhpt.training.step_folders import commit


@pytest.fixture
def run(tmp_path):
    """The checkpoints of a run, without one."""
    for step in (2, 4):
        place = tmp_path / "checkpoints" / f"{step}.writing"
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps({"digests": {"a": f"float32 {step}"}}))
        (place / "data").write_bytes(bytes(range(100)))
        commit(place, place.with_name(str(step)))
    return tmp_path


def test_what_is_whole_is_whole(run):
    assert judged(run, digests_of(run)) == ("whole", "")


def test_a_step_that_is_damaged_is_corrupt(run):
    expected = digests_of(run)
    damage(run / "checkpoints" / "4" / "data", random.Random(0))
    assert judged(run, expected)[0] == "corrupt" and "step 4: data" in judged(run, expected)[1]


def test_a_step_with_other_values_is_corrupt(run):
    expected = digests_of(run) | {4: {"a": "float32 5"}}
    assert judged(run, expected) == ("corrupt", "step 4 holds other values than the undisturbed run")


def test_a_run_that_begins_again_is_no_resumed_one(run):
    """Its values are the same, and its checkpoints are new."""
    expected, before = digests_of(run), written_at(run)
    assert judged(run, expected, before) == ("whole", "")
    for step in (2, 4):
        record = run / "checkpoints" / str(step) / "record.json"
        os.utime(record, ns=(before[step], before[step] + 1))
        assert judged(run, expected, before) == ("corrupt", f"step {step} was there and was written again, or is gone")
        os.utime(record, ns=(before[step], before[step]))
    shutil.rmtree(run / "checkpoints" / "4")
    assert judged(run, expected, before)[1].startswith("step 4")


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_changes_the_file(run, seed):
    path = run / "checkpoints" / "2" / "data"
    before = path.read_bytes()
    damage(path, random.Random(seed))
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("accepted", "same", "outcome"),
    [(True, True, "harmless"), (True, False, "undetected"), (False, False, "detected"), (False, True, "detected")],
)
def test_a_change_that_is_accepted_is_undetected(accepted, same, outcome):
    assert of_checkpoint(accepted, same) == outcome


def test_a_step_that_nobody_checks_is_undetected(run, monkeypatch):
    """Without the comparison with manifests, the campaign reports every change."""
    (run / "config.yaml").touch()
    (run / "plan.json").touch()
    (run / "metrics.jsonl").touch()
    monkeypatch.setattr(flips, "LAST", 4)
    monkeypatch.setattr(step_folders, "manifest_faults", lambda place: [])
    outcomes = set()
    for seed in range(12):
        shutil.rmtree(run / "flipped", ignore_errors=True)
        outcomes.add(flips._checkpoint(random.Random(seed), run, run / "flipped", digests_of(run), None)[2])
    assert outcomes == {"undetected", "harmless"}  # the manifest's own bytes are no values
    assert contents(run / "checkpoints" / "4").keys() == {"record.json", "data"}


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in ("writing", "written")])
def test_a_process_dies_at_the_moment_that_is_named(run, monkeypatch, moment):
    """Only at the step that is named, before or after what is patched."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((number, step_folders.steps_in(folder))))
    for owner, name in ((step_folders, "write_manifest"), (checkpoint, "rotate")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    die_at(6, moment)
    folder = run / "checkpoints"
    for step in (5, 6):
        writing = folder / f"{step}.writing"
        writing.mkdir()
        (writing / "record.json").write_text("{}")
        commit(writing, folder / str(step))
        checkpoint.rotate(folder, load_config().checkpoint)
    signals, (steps, *_) = {number for number, _ in killed}, [steps for _, steps in killed]
    assert signals == {signal.SIGKILL} and (6 in steps) == (moment in ("named", "rotated"))
    assert (4 in steps) == (moment != "rotated")


def test_the_set_ups_are_valid(tmp_path):
    write_text(tmp_path)
    for setup in SETUPS.values():
        config = load_config("gpt-tiny", settings_of(setup, tmp_path))
        assert config.train.steps == kills.LAST and config.checkpoint.every == 2


def test_a_killed_process_counts_before_those_that_left_because_of_it():
    assert end_of_all([Exit.PEER, -signal.SIGKILL]) == end_of_all([-signal.SIGKILL, Exit.PEER]) == -signal.SIGKILL
    assert end_of_all([0, 0]) == 0 and end_of_all([0, Exit.STORAGE]) == Exit.STORAGE


def test_work_goes_on_in_a_process_of_its_own():
    """What it returns comes back; if it ends without, whoever waits is told."""
    lines = """
import os
from functools import partial
from benchmarks.faults.zygote import begin

waiting = begin(partial(pow, 2, 3)), begin(partial(os._exit, 1))
print(waiting[0]())
try:
    waiting[1]()
except EOFError:
    print("nothing came")
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["8", "nothing came", ""]
