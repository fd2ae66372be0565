"""Which checkpoints are whole, kept, copied, and set aside."""

import json
from pathlib import Path

import pytest

from jhpt.core.config import CheckpointConfig
from jhpt.core.errors import Exit
from jhpt.core.manifest import MANIFEST
from jhpt.training.step_folders import (
    Damaged,
    commit,
    copy_step,
    newest_whole,
    pin,
    remove_unfinished,
    rotate,
    steps_in,
)


def written(folder: Path, *steps: int) -> Path:
    for step in steps:
        unfinished = folder / f"{step}.writing"
        (unfinished / "state").mkdir(parents=True)
        (unfinished / "state" / "data").write_text(f"state of {step}")
        (unfinished / "record.json").write_text("{}")
        commit(unfinished, folder / str(step))
    return folder


def damage(folder: Path, step: int) -> None:
    (folder / str(step) / "state" / "data").write_text("something else")


def test_a_step_exists_once_it_has_its_name(tmp_path):
    folder = written(tmp_path, 2, 10)
    (folder / "12.writing" / "state").mkdir(parents=True)
    (folder / "14.damaged").mkdir()
    (folder / "15").write_text("a file")
    assert steps_in(folder) == [2, 10] and steps_in(folder / "nowhere") == []
    remove_unfinished(folder)
    assert not (folder / "12.writing").exists() and (folder / "14.damaged").exists()


def test_the_newest_whole_step_is_taken_and_damaged_ones_are_set_aside(tmp_path):
    folder, said = written(tmp_path, 2, 4, 6, 8), []
    damage(folder, 8)
    (folder / "6" / MANIFEST).unlink()
    assert newest_whole(folder, said.append) == 4
    assert steps_in(folder) == [2, 4, 6, 8]
    assert newest_whole(folder, said.append, set_aside=True) == 4
    assert steps_in(folder) == [2, 4] and (folder / "8.damaged").is_dir() and (folder / "6.damaged").is_dir()
    assert "8 is damaged (state/data has " in said[0] and "6 is damaged (manifest.json is missing)" in said[1]
    written(folder, 8)
    damage(folder, 8)
    assert newest_whole(folder, said.append, set_aside=True) == 4 and (folder / "8.damaged1").is_dir()


def test_if_none_is_whole_nothing_is_renamed(tmp_path):
    folder = written(tmp_path, 2, 4)
    damage(folder, 2)
    damage(folder, 4)
    with pytest.raises(Damaged, match=r"no checkpoint in .* is whole \(4/state/data") as caught:
        newest_whole(folder, lambda line: None, set_aside=True)
    assert caught.value.status == Exit.DAMAGED and steps_in(folder) == [2, 4]


def test_steps_of_earlier_versions_are_taken_as_they_are(tmp_path):
    (tmp_path / "4" / "record").mkdir(parents=True)
    (tmp_path / "4" / "record" / "metadata").write_text("{}")
    assert newest_whole(tmp_path, lambda line: None) == 4


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(keep=1), [4, 12]),
        (CheckpointConfig(keep=3), [4, 8, 10, 12]),
        (CheckpointConfig(keep=1, keep_every=6), [4, 6, 12]),
    ],
)
def test_rotation_keeps_the_newest_the_periodic_and_the_pinned(tmp_path, config, kept):
    folder = written(tmp_path, 2, 4, 6, 8, 10, 12)
    pin(folder, 4)
    rotate(folder, config)
    assert steps_in(folder) == kept and json.loads((folder / "pinned.json").read_text()) == [4]


def test_a_copy_is_whole_or_not_there(tmp_path):
    folder, elsewhere = written(tmp_path / "here", 2), tmp_path / "there" / "mirror"
    copy_step(folder / "2", elsewhere)
    assert newest_whole(elsewhere, lambda line: None) == 2
    damage(folder, 2)
    with pytest.raises(OSError, match="differs: state/data"):
        copy_step(folder / "2", elsewhere)
    assert newest_whole(elsewhere, lambda line: None) == 2
    assert [path.name for path in elsewhere.iterdir()] == ["2"]
