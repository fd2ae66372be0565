"""`jhpt verify`: whether what a run or a token cache holds is what was written."""

from pathlib import Path
from typing import Annotated

import tyro

from jhpt.core.errors import Exit, InputError
from jhpt.core.load import CONFIG_FILE
from jhpt.core.manifest import MANIFEST, manifest_faults

SHOWN = 5
"""Faults of a folder that are listed; the rest are counted."""


def verify_command(arguments: list[str]) -> int:
    """`jhpt verify`."""

    def verify(folder: Annotated[str, tyro.conf.Positional], /) -> int:
        """Compares the files of every checkpoint of a run, or of a token cache, with their manifest.

        Exit status 6 if anything is damaged.

        Args:
            folder: a run directory, its checkpoints, one of them, or a token cache.
        """
        places = _places(Path(folder))
        return max(_verdict(place) for place in places)

    return tyro.cli(verify, prog="jhpt verify", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def _places(folder: Path) -> list[Path]:
    """The folders that have a manifest, or should have one."""
    from jhpt.training.step_folders import FOLDER, steps_in  # other commands start without it

    inside = folder / FOLDER if (folder / CONFIG_FILE).is_file() else folder
    if steps := [inside / str(step) for step in steps_in(inside)]:
        return steps
    if (folder / MANIFEST).is_file():
        return [folder]
    raise InputError(
        f"{folder} holds no checkpoint and no token cache; give a run directory or a folder with {MANIFEST}"
    )


def _verdict(place: Path) -> Exit:
    from jhpt.training.step_folders import before_manifests

    if before_manifests(place):
        print(f"{place}: written by an earlier version, which kept no manifest; nothing to compare with")
        return Exit.DONE
    faults = manifest_faults(place)
    if not faults:
        print(f"{place}: whole")
        return Exit.DONE
    print(f"{place}: damaged")
    for fault in faults[:SHOWN]:
        print(f"  {fault}")
    if len(faults) > SHOWN:
        print(f"  and {len(faults) - SHOWN} more")
    return Exit.DAMAGED
