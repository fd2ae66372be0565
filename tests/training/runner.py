"""A training run in a process of its own, which can be told to die: `python -m tests.training.runner SPEC.json`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """SPEC: {preset, overrides, out, kill_after: step or null, kill_when: "written" | "writing", processes: {...}}.

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
    """A run."""
    from jhpt.training import checkpoint
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    save = checkpoint.Checkpoints.save

    def save_and_die(self, step, state, record):
        save(self, step, state, record)
        if step == spec.get("kill_after"):
            if spec["kill_when"] == "written":
                self._manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)

    if spec.get("kill_after"):
        checkpoint.Checkpoints.save = save_and_die
    result = train(
        spec["preset"], out=spec["out"], overrides=spec["overrides"], processes=Processes(**spec.get("processes", {}))
    )
    outcome = {"step": result.step, "losses": result.losses, "interrupted": result.interrupted}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
