"""The commands that run in hosts: starting them, waiting for them and ending them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
"""Seconds between two polls of the hosts."""

TAIL_LINES = 30
"""Lines of a host's stderr in an error message."""


@dataclass(frozen=True, kw_only=True)
class HostResult:
    """The result of one host's command: its exit status, negative for a signal, None if it had to be ended; its
    output."""

    rank: int
    status: int | None
    stdout: str
    stderr: str


class HostError(RuntimeError):
    """A host's command failed, and the others were killed.  `results`: those of all hosts until then."""

    def __init__(self, message: str, results: Sequence[HostResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class HostTimeout(HostError):
    """Not every host ended in time; all were killed."""


def start(
    line: Sequence[str], rank: int, folder: Path, env: Mapping[str, str], core: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts one host's command, on one core if it is given.  Its output goes to files, since pipes would have to be
    read, and children may keep them open."""
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
        )
    if core is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(process.pid, {core})  # what it executes and starts later inherits this
    return process


def environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """This process's variables, without proxies, which no host can reach, and `more`."""
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return variables | dict(more or {})


def wait(running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """The status of every host once all have ended, one has failed or time is up; None for one that still runs."""
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in running]
        if all(status == 0 for status in statuses) or any(statuses) or time.monotonic() > deadline:
            return statuses
        time.sleep(POLL_S)


def kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run, and waits for all."""
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        process.wait()


def result(rank: int, status: int | None, folder: Path) -> HostResult:
    """The result of a command whose output `start` has directed to this folder."""
    out, err = ((folder / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return HostResult(rank=rank, status=status, stdout=out, stderr=err)


def raise_failures(results: Sequence[HostResult], timeout_s: float) -> None:
    """Raises: HostError if a host failed, otherwise HostTimeout if one was still running."""
    failed = [result for result in results if result.status]
    late = [result for result in results if result.status is None]
    if failed:
        raise HostError("\n".join(_failure(result, len(results)) for result in failed), results)
    if late:
        raise HostTimeout("\n".join(_delay(result, len(results), timeout_s) for result in late), results)


def _failure(result: HostResult, hosts: int) -> str:
    status = result.status or 0
    end = (
        f"was ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
    )
    return f"host {result.rank} of {hosts} {end}{_tail(result.stderr)}"


def _delay(result: HostResult, hosts: int, timeout_s: float) -> str:
    return f"host {result.rank} of {hosts} was still running after {timeout_s:g} s{_tail(result.stderr)}"


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()[-TAIL_LINES:]
    return "; its stderr ends:" + "".join(f"\n    {line}" for line in lines) if lines else "; its stderr is empty"
