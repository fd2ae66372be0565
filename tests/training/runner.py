"""A training run in a process of its own, which can be told to die: `python -m tests.training.runner SPEC.json`."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.faults.moments import die_at


def main(path: str) -> None:
    """SPEC: {preset, overrides, out, kill_after: step or null, kill_when: one of `MOMENTS`, processes: {...},
    plan: its file, or none}.

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
        die_at(spec["kill_after"], spec["kill_when"])
    result = train(
        spec["preset"],
        out=spec["out"],
        overrides=spec["overrides"],
        plan=spec.get("plan"),
        processes=Processes(**spec.get("processes", {})),
    )
    outcome = {"step": result.step, "losses": result.losses, "interrupted": result.interrupted}
    print(json.dumps(outcome), flush=True)


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
