"""Runs in processes that are forked from one which has imported everything and started no device.

That saves the seconds that every import of jax takes.
"""

import atexit
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.faults.moments import die_at
from benchmarks.faults.setups import SetUp
from jhpt.core.ports import free_port

FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""The same results, compiled in a third of the time."""

Result = TypeVar("Result")

LONGEST = 300.0
"""Seconds after which a run is given up."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """When a run dies: after so many seconds, or at a moment of the save of a step; neither: it does not."""

    seconds: float | None = None
    step: int = 0
    moment: str | None = None


LIVE = Death()


def prepare() -> None:
    """Imports what a run needs.  Call it once, before the first run."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = FAST
    import jhpt.training.run  # noqa: F401


def begin(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begins work in a process of its own; what is returned waits for the result.

    Raises:
      EOFError: when waiting, if the process ended without one.
    """
    forked = get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    forked.Process(target=lambda: theirs.send(work())).start()
    theirs.close()
    result: Callable[[], Result] = ours.recv
    return result


Before = Callable[[int], None]
"""Called in a new process with its number, before it begins the run."""


def run(
    setup: SetUp, settings: Mapping[str, object], out: Path, death: Death = LIVE, *, log: Path
) -> tuple[int, float]:
    """(exit status of the run, or the negative signal, seconds); all its processes die at once."""
    started = time.monotonic()

    def before(process: int) -> None:
        if death.moment is not None:
            die_at(death.step, death.moment)

    pids = start(setup, settings, out, before, logs=[log] * setup.processes)
    status = waited(pids, deadline=LONGEST if death.seconds is None else death.seconds)
    return status, time.monotonic() - started


def start(
    setup: SetUp,
    settings: Mapping[str, object],
    out: Path,
    before: Before = lambda process: None,
    *,
    logs: Sequence[Path],
) -> list[int]:
    """Starts the processes of a run; a log for each."""
    port = free_port() if setup.processes > 1 else 0
    return [
        _fork(log, before, process, partial(_train, setup, settings, out, process, port))
        for process, log in enumerate(logs)
    ]


def waited(pids: Sequence[int], *, deadline: float) -> int:
    """The exit status of a run, or the negative signal; its processes are killed once one was, or after `deadline`
    seconds."""
    left, statuses, started = set(pids), {}, time.monotonic()
    while left:
        for pid in list(left):
            if (status := ended(pid)) is not None:
                left.discard(pid)
                statuses[pid] = status
        if any(status < 0 for status in statuses.values()) or time.monotonic() - started > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return end_of_all([statuses[pid] for pid in pids])


def end_of_all(ends: Sequence[int]) -> int:
    """How a run ended whose processes ended like this: a signal counts before what the others left with because of
    it."""
    return next(iter(sorted(status for status in ends if status)), 0)


def ended(pid: int) -> int | None:
    """The exit status of a process, or the negative signal; None: it still runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _fork(log: Path, before: Before, process: int, train: Callable[[], int]) -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of its threads, of which there are none before a device is used
        pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        with log.open("ab") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        before(process)
        status = train()
        atexit._run_exitfuncs()  # processes take leave of each other
    except BaseException:  # the traceback is what a campaign looks for
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(setup: SetUp, settings: Mapping[str, object], out: Path, process: int, port: int) -> int:
    import jax

    from jhpt.core.errors import JhptError
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    jax.config.update("jax_num_cpu_devices", setup.devices)
    joined: dict[str, Any] = {}
    if setup.processes > 1:
        joined = {"coordinator": f"127.0.0.1:{port}", "process_id": process, "num_processes": setup.processes}
    try:
        train("gpt-tiny", out=out, overrides=settings, processes=Processes(**joined))
    except JhptError as error:
        print(f"REFUSED: {error}")
        return int(error.status)
    return 0
