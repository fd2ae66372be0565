"""A training run in a process of its own, which can be told to die: `python -m tests.training.runner SPEC.json`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """SPEC: {preset, overrides, out, kill_after: step or null, kill_when: one of `MOMENTS`, processes: {...}}.

    Prints a line of JSON.  A list of them is done one after the other, and what is refused is a line, too.
    """
    specs = json.loads(Path(path).read_text())
    if not isinstance(specs, list):
        return execute(specs)
    from jhpt.core.errors import InputError

    for spec in specs:
        try:
            execute(spec)
        except InputError as error:
            print(json.dumps({"refused": str(error)}), flush=True)


def execute(spec: dict[str, Any]) -> None:
    """A run; or, of {spanning: a cluster, processes: {...}}, that cluster as all processes span it."""
    if "spanning" in spec:
        return span(spec)
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    if spec.get("kill_after"):
        kill_after(spec["kill_after"], spec["kill_when"])
    result = train(
        spec["preset"], out=spec["out"], overrides=spec["overrides"], processes=Processes(**spec.get("processes", {}))
    )
    outcome = {"step": result.step, "losses": result.losses, "interrupted": result.interrupted}
    print(json.dumps(outcome), flush=True)


def kill_after(step: int, when: str) -> None:
    """Lets this process die at a moment of the save of a step.  when: one of `MOMENTS`."""
    from jhpt.training import checkpoint, step_folders

    place, name, before = MOMENTS[when]
    owner = {"Checkpoints": checkpoint.Checkpoints, "checkpoint": checkpoint, "step_folders": step_folders}[place]
    function = getattr(owner, name)

    def dying(*arguments):
        due = step == (arguments[1] if name == "save" else step_of(arguments[0]))
        if due and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments)
        if due and when == "written":
            arguments[0].settle()
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def step_of(folder):
        """The folder is that of a step which is being written, or that of all steps."""
        return int(folder.stem) if folder.suffix else max(step_folders.steps_in(folder))

    setattr(owner, name, dying)


MOMENTS = {
    "writing": ("Checkpoints", "save", False),
    "files": ("step_folders", "write_manifest", True),
    "manifest": ("step_folders", "write_manifest", False),
    "named": ("checkpoint", "rotate", True),
    "rotated": ("checkpoint", "rotate", False),
    "written": ("Checkpoints", "save", False),
}
"""Moments of a save: what is patched, and whether it dies before that or after.

writing: while the files are written; files: they are; manifest: it is, too; named: the step has its name; rotated: old
steps are gone; written: all is done.
"""


def span(spec: dict[str, Any]) -> None:
    """Prints the cluster and the processes that share this machine.  Links are measured with small messages."""
    from jhpt.core.cluster import Cluster
    from jhpt.measure import network, probe
    from jhpt.training.processes import Processes, join

    join(Processes(**spec["processes"]))
    probe.SIZES = (1 << 12, 1 << 13)
    cluster = network.spanning(Cluster.model_validate(spec["spanning"]))
    print(json.dumps({"cluster": cluster.model_dump(mode="json"), "here": network.hosts().here}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
