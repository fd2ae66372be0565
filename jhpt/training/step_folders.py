"""The folders of a run's checkpoints: which there are, which are whole, which are kept.

checkpoints/500/            a step: written under another name, renamed when its manifest is on the disk
checkpoints/500.writing/    one that is being written, or was when a process was killed
checkpoints/500.damaged/    one that was found to be damaged, kept for whoever wants to look
checkpoints/pinned.json     steps that are kept whatever comes after them
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jhpt.core.config import CheckpointConfig
from jhpt.core.errors import Exit, InputError
from jhpt.core.manifest import MANIFEST, manifest_faults, to_disk, write_manifest, write_to_disk
from jhpt.core.text_files import read_text

FOLDER = "checkpoints"
"""Where the checkpoints are in a run directory."""

RECORD = "record.json"
"""The record in a step's folder (`training.record.Record`)."""

OLD_RECORD = "record/metadata"
"""Where earlier versions wrote it."""

PINNED = "pinned.json"
WRITING, DAMAGED, LEFT = ".writing", ".damaged", ".left"

Say = Callable[[str], None]


class Damaged(InputError):
    """No checkpoint of a run is whole, or what was restored is not what was saved."""

    status = Exit.DAMAGED


def steps_in(folder: Path) -> list[int]:
    """The steps that have been written to the end, in ascending order; some may have been damaged since."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def before_manifests(place: Path) -> bool:
    """Whether this step was written by a version that kept no manifests."""
    return (place / OLD_RECORD).is_file() and not (place / RECORD).exists() and not (place / MANIFEST).exists()


def faults_of(place: Path) -> list[str]:
    """What is wrong with the folder of a step, a line for each file; unknown, so nothing, if it has no manifest because
    it is older than these."""
    return [] if before_manifests(place) else manifest_faults(place)


def newest_whole(folder: Path, say: Say, *, set_aside: bool = False) -> int | None:
    """The newest step whose files are what was written; None: there are no steps.

    Args:
      set_aside: whether damaged steps that are newer are renamed, so that training goes on without them.

    Raises:
      Damaged: there are steps, and none is whole.  Then nothing is renamed.
    """
    damaged: dict[int, list[str]] = {}
    for step in reversed(steps_in(folder)):
        if faults := faults_of(folder / str(step)):
            damaged[step] = faults
            continue
        for newer, faults in damaged.items():
            aside = f", and now called {_set_aside(folder / str(newer), DAMAGED).name}" if set_aside else ""
            say(f"warning: checkpoint {folder / str(newer)} is damaged ({_few(faults)}){aside}; step {step} is taken")
        return step
    if not damaged:
        return None
    newest, faults = next(iter(damaged.items()))
    raise Damaged(
        f"no checkpoint in {folder} is whole ({newest}/{faults[0]}); put back a copy, as checkpoint.mirror keeps one, "
        "or start anew with another --out"
    )


def _few(faults: list[str]) -> str:
    more = f" and {len(faults) - 2} more" if len(faults) > 2 else ""
    return ", ".join(faults[:2]) + more


def check_step(folder: Path, step: int) -> None:
    """Refuses to go on from a step that is not there, or is damaged.

    Raises:
      InputError: with the steps that there are.
    """
    steps = steps_in(folder)
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise InputError(f"--resume-step {step}: {folder} has no such checkpoint; there are: {known}")
    if faults := faults_of(folder / str(step)):
        raise Damaged(f"--resume-step {step}: {folder / str(step)} is damaged ({_few(faults)}); take another step")


def leave_behind(folder: Path, step: int, say: Say) -> None:
    """Gives all steps after this one another name."""
    for later in steps_in(folder):
        if later > step:
            say(f"note: checkpoint {later} is left behind, as {_set_aside(folder / str(later), LEFT)}")


def _set_aside(place: Path, suffix: str) -> Path:
    """Renames a step so that it does not count any more; returns its new place."""
    names = (place.with_name(f"{place.name}{suffix}{number or ''}") for number in range(10**6))
    aside = next(name for name in names if not name.exists())
    place.rename(aside)
    to_disk(place.parent)
    return aside


def commit(writing: Path, place: Path) -> None:
    """Gives a step that has been written its manifest and then its name.  Until the last line it does not exist."""
    write_manifest(writing)
    writing.rename(place)
    to_disk(place.parent)


def remove_unfinished(folder: Path) -> None:
    """Removes steps that a killed process was writing."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if WRITING in path.name or "orbax-checkpoint-tmp" in path.name:
            shutil.rmtree(path, ignore_errors=True)


def rotate(folder: Path, config: CheckpointConfig) -> None:
    """Removes all but the newest `keep` steps, those that `keep_every` divides, and pinned ones."""
    for step in _superseded(folder, config):
        place = folder / str(step)
        going = place.with_name(f"{place.name}{WRITING}")  # never half a step under the name of a whole one
        place.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _superseded(folder: Path, config: CheckpointConfig) -> Iterator[int]:
    kept = pinned(folder)
    for step in steps_in(folder)[: -config.keep]:
        if step not in kept and not (config.keep_every and step % config.keep_every == 0):
            yield step


def pinned(folder: Path) -> set[int]:
    """The steps that are never removed."""
    try:
        return {int(step) for step in json.loads(read_text(folder / PINNED))}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return set()


def pin(folder: Path, step: int) -> None:
    """Keeps this step for good."""
    write_to_disk(folder / PINNED, json.dumps(sorted(pinned(folder) | {step})))


def copy_step(place: Path, elsewhere: Path) -> None:
    """Copies a step to another folder and checks the copy, which replaces one of the same step.

    Raises:
      OSError: the copy could not be written, or differs.
    """
    elsewhere.mkdir(parents=True, exist_ok=True)
    remove_unfinished(elsewhere)
    writing, copy = elsewhere / f"{place.name}{WRITING}", elsewhere / place.name
    shutil.copytree(place, writing)
    if faults := manifest_faults(writing):
        shutil.rmtree(writing, ignore_errors=True)
        raise OSError(f"the copy of {place} in {elsewhere} differs: {_few(faults)}")
    if copy.exists():
        shutil.rmtree(copy)
    writing.rename(copy)
    to_disk(elsewhere)
