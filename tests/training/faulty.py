"""`jhpt train` that meets a fault at a certain point: `python -m tests.training.faulty FAULT POINT ARGUMENTS`.

POINT: "connecting", or the beginning of what a process says that it does ("compiling", "in step 5").
"""

import os
import signal
import sys
import time
from contextlib import contextmanager

import jax

from jhpt.cli import main
from jhpt.core.errors import InputError
from jhpt.training.watch import Watch


def meet(fault: str) -> None:
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
    """Puts the fault where it belongs."""

    def reached(doing: str) -> None:
        if doing.startswith(point):
            time.sleep(1.5)  # until all have heard where it is
            print(f"{time.time()} fault", flush=True)
            meet(fault)

    initialize, phase, stepping = jax.distributed.initialize, Watch.phase, Watch.stepping

    def connect(**arguments):
        reached("connecting")
        initialize(**arguments)

    @contextmanager
    def entered(self, doing):
        with phase(self, doing):
            reached(doing)
            yield

    def step_begun(self, step):
        stepping(self, step)
        reached(f"in step {step}.")

    jax.distributed.initialize, Watch.phase, Watch.stepping = connect, entered, step_begun


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
    sys.exit(main(["train", *sys.argv[3:]]))
