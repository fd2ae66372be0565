"""A process that meets a fault when it comes to a certain point: `python -m benchmarks.faults.injected FAULT POINT
ARGUMENTS`, with the arguments of `jhpt train`."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jhpt.cli import main
from jhpt.core.errors import InputError
from jhpt.training.watch import Watch

MARK = " fault"
"""What follows the time at which the fault is met, on a line of the output."""

HEARD = 1.5
"""Seconds for which it waits, so that the others have heard where it is."""


def meet(fault: str) -> None:
    """The fault: "killed", "stopped", "stuck", "refused", or the name of a signal."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stuck":
        time.sleep(300)
    if fault == "refused":
        raise InputError("this cannot work; do something else")
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))


def prepare(fault: str, point: str) -> None:
    """Makes this process meet the fault at the point.

    point: "connecting", or the beginning of what a process says that it does ("compiling", "in step 5.").
    """

    def reached(doing: str) -> None:
        if doing.startswith(point):
            time.sleep(HEARD)
            print(f"{time.time()}{MARK}", flush=True)
            meet(fault)

    initialize, phase, stepping = jax.distributed.initialize, Watch.phase, Watch.stepping

    def connect(**arguments: Any) -> None:
        reached("connecting")
        initialize(**arguments)

    @contextmanager
    def entered(self: Watch, doing: str) -> Iterator[None]:
        with phase(self, doing):
            reached(doing)
            yield

    def step_begun(self: Watch, step: int) -> None:
        stepping(self, step)
        reached(f"in step {step}.")

    for owner, name, function in (
        (jax.distributed, "initialize", connect),
        (Watch, "phase", entered),
        (Watch, "stepping", step_begun),
    ):
        setattr(owner, name, function)


def moment(output: str) -> float | None:
    """The time at which the process met the fault, from its output; None: it did not come so far."""
    times = [float(line.removesuffix(MARK)) for line in output.splitlines() if line.endswith(MARK)]
    return times[0] if times else None


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
    sys.exit(main(["train", *sys.argv[3:]]))
