"""A training run in a process of its own, which can be told to die: `python -m tests.training.runner SPEC.json`."""

import json
import os
import signal
import sys
from pathlib import Path


def main(path: str) -> None:
    """SPEC: {preset, overrides, out, kill_after: step or null, kill_when: "written" | "writing", processes: {...}}."""
    spec = json.loads(Path(path).read_text())

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

    checkpoint.Checkpoints.save = save_and_die
    result = train(
        spec["preset"], out=spec["out"], overrides=spec["overrides"], processes=Processes(**spec.get("processes", {}))
    )
    print(json.dumps({"step": result.step, "losses": result.losses, "interrupted": result.interrupted}))


if __name__ == "__main__":
    main(sys.argv[1])
