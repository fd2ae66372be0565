"""Starts the hosts with a task and reads their results."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.emulated.task import Launch
from benchmarks.netlab import Lab

HOSTS, CPU = 4, 0.5
"""Number of hosts, and cores of each."""

PLACE = f"{HOSTS} emulated hosts of {CPU:g} cores"
"""The set-up of a claim."""

MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables with which glibc keeps the memory that a host has freed, in one heap, as `jhpt train` does
(`jhpt.training.runtime.keep_heap`), and asks the kernel for pages of 2 MiB: like the memory of a device.  With its
defaults a step of vgg took 5 % more processor time, and single passes up to twice as much, for pages to be given back
and taken again.  Pages of 4 KiB lie differently in every process: backward and forward pass of gpt's head, 8 sequences,
took 195 ms in one, 206 to 241 ms on the hosts of another, and 255 ms in a third, when a whole step took as long as
ever; now 184 to 199."""

COMPILING = 2.0
"""Cores that a host may use while nothing is measured."""


def launch(
    module: str,
    task: Callable[..., Launch],
    *,
    devices: int = 1,
    cpu: float = CPU,
    shares: tuple[float, ...] | None = None,
    limit_s: float,
) -> list[dict[str, Any]]:
    """Rows of one launch of all hosts.

    Args:
      module: the program of every host (`benchmarks.emulated.worker`).
      task: makes the task from tag, cpu, shares and folder.
      devices: how many a host has.
      cpu, shares: those of the lab.
      limit_s: seconds for the whole launch.
    """
    # Everything whose name begins with the tag is removed with the lab, also when this process is killed.
    with Lab(hosts=HOSTS, cpu=cpu, shares=shares) as lab, tempfile.TemporaryDirectory(prefix=f"{lab.tag}-") as folder:
        lab.quota(COMPILING)
        made = task(tag=lab.tag, cpu=cpu, shares=shares, folder=folder)
        return rows_of(lab, made, ["-m", module], devices=devices, limit_s=limit_s)


def rows_of(lab: Lab, task: Launch, program: Sequence[str], *, devices: int, limit_s: float) -> list[dict[str, Any]]:
    """The rows that the lab's hosts measure for a task.  program: arguments of Python."""
    lab.run(
        lambda rank, hosts, coordinator: [sys.executable, *program, str(rank), str(hosts), coordinator, task.text()],
        timeout_s=limit_s,
        env={
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            # One thread computes: with two, a host would use up its quota in half the time and then stand still longer.
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            **MEMORY,
        },
    )
    return task.result()
