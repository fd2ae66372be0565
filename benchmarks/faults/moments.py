"""Moments of a save, at which a process kills itself."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOMENTS = {
    "writing": ("Checkpoints", "save", False),
    "files": ("step_folders", "write_manifest", True),
    "manifest": ("step_folders", "write_manifest", False),
    "named": ("checkpoint", "rotate", True),
    "rotated": ("checkpoint", "rotate", False),
    "written": ("Checkpoints", "save", False),
}
"""What is patched, and whether it dies before that or after.

writing: while the files are written; files: they are; manifest: it is, too; named: the step has its name; rotated: old
steps are gone; written: all is done.
"""


def die_at(step: int, moment: str) -> None:
    """Lets this process die by SIGKILL at this moment (`MOMENTS`) of the save of a step."""
    from jhpt.training import checkpoint, step_folders  # a process that only starts others needs no jax

    place, name, before = MOMENTS[moment]
    owner: Any = {"Checkpoints": checkpoint.Checkpoints, "checkpoint": checkpoint, "step_folders": step_folders}[place]
    function: Callable[..., Any] = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        due = step == (arguments[1] if name == "save" else step_of(arguments[0]))
        if due and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments)
        if due and moment == "written":
            arguments[0].settle()
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def step_of(folder: Path) -> int:
        """The folder is that of a step which is being written, or that of all steps."""
        return int(folder.stem) if folder.suffix else max(step_folders.steps_in(folder))

    setattr(owner, name, dying)
