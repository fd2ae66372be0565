"""Hosts are started with a task, and what they found is read."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.emulated.task import Launch
from benchmarks.netlab import Lab

HOSTS, CPU = 4, 0.5
"""Hosts, and the cores of each."""

PLACE = f"{HOSTS} emulated hosts of {CPU:g} cores"
"""Of a claim."""

COMPILING = 2.0
"""Cores that a host may use while nothing is measured."""


def launch(module: str, task: Callable[..., Launch], *, devices: int = 1, limit_s: float) -> list[dict[str, Any]]:
    """Rows of one launch of all hosts.

    Args:
      module: what every host runs (`benchmarks.emulated.worker`).
      task: makes the task, of tag, cpu and folder.
      devices: of a host.
      limit_s: seconds for everything.
    """
    # What begins with the tag is removed with the lab, also when this process is killed.
    with Lab(hosts=HOSTS, cpu=CPU) as lab, tempfile.TemporaryDirectory(prefix=f"{lab.tag}-") as folder:
        lab.quota(COMPILING)
        own = task(tag=lab.tag, cpu=CPU, folder=folder)
        return rows_of(lab, own, ["-m", module], devices=devices, limit_s=limit_s)


def rows_of(lab: Lab, task: Launch, program: Sequence[str], *, devices: int, limit_s: float) -> list[dict[str, Any]]:
    """What the lab's hosts leave of a task.  program: as Python's command line names it."""
    lab.run(
        lambda rank, hosts, coordinator: [sys.executable, *program, str(rank), str(hosts), coordinator, task.text()],
        timeout_s=limit_s,
        env={
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            # One thread computes: with two, a host would use up its quota in half the time and then stand still longer.
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        },
    )
    return task.result()
