"""`jhpt launch`: starts the processes of a run, and starts them again from its last good step when one of them fails.

What an attempt has come to is decided by pure functions over the exit statuses (`after`); no jax is imported here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from jhpt.core.errors import Exit, InputError
from jhpt.core.ports import free_port
from jhpt.flags import without
from jhpt.training.step_folders import FOLDER, steps_in

FINAL = {Exit.DIVERGED, Exit.INPUT, Exit.NOT_HERE, Exit.DAMAGED, Exit.MEMORY, Exit.INTERRUPTED}
"""Statuses that another attempt would end with, too, or that somebody asked for."""

FRUITLESS = 3
"""Attempts in a row that bring no new checkpoint, after which it gives up."""

LONGEST_PAUSE = 60.0
"""Seconds."""

GRACE = 3.0
"""Seconds that processes have to leave by themselves, once one of them has failed."""

LOGS = ".launch"
"""Folder in the run directory with the output of all processes but the first."""

GO_BACK = "--resume-step"
"""The flag of `jhpt train` that goes back to a checkpoint, once."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is launched.

    arguments: those of `jhpt train` without `--out`.  pause: seconds before the first restart, doubled with each that
    follows without progress.  fewest: processes that it may go on with if one fails again and again.
    """

    arguments: tuple[str, ...]
    out: Path
    processes: int
    fewest: int
    max_restarts: int
    pause: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended.

    failed: the process that ended first with another status than 0, None: all ended well.  status: of this process;
    negative: the signal that ended it.  step: of the newest checkpoint then.
    """

    failed: int | None = None
    status: int = Exit.DONE
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Next:
    """What follows an attempt: the exit status of the launcher, or another attempt after a pause, and why."""

    status: int | None
    processes: int = 0
    pause: float = 0.0
    reason: str = ""


def after(launch: Launch, attempts: Sequence[Attempt], processes: int) -> Next:
    """What follows the last of these attempts, which had so many processes."""
    last = attempts[-1]
    if last.failed is None:
        return Next(status=Exit.DONE)
    how = f"process {last.failed} {ending(last.status)}"
    if last.status in FINAL:
        return Next(status=last.status, reason=how)
    fruitless = _fruitless(attempts)
    if fruitless >= 2 and processes > launch.fewest and len({attempt.failed for attempt in attempts[-2:]}) == 1:
        return Next(
            status=None, processes=processes - 1, pause=launch.pause, reason=f"{how} again; going on without it"
        )
    status = last.status if last.status > 0 else 128 - last.status
    if fruitless >= FRUITLESS:
        return Next(status=status, reason=f"{how}; {fruitless} attempts in a row brought no new checkpoint")
    if len(attempts) > launch.max_restarts:
        return Next(status=status, reason=f"{how}; all of --max-restarts {launch.max_restarts} are used up")
    pause = min(launch.pause * 2**fruitless, LONGEST_PAUSE)
    return Next(status=None, processes=processes, pause=pause, reason=how)


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """How many of the last attempts brought no new checkpoint.  The first one has nothing to compare with."""
    steps = [-1 if attempt.step is None else attempt.step for attempt in attempts]
    count = 0
    for before, step in zip(reversed([-1, *steps[:-1]]), reversed(steps), strict=True):
        if step > before:
            break
        count += 1
    return count


def ending(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    names = {int(exit): exit.name.lower().replace("_", " ") for exit in Exit}
    return f"ended with status {status}" + (f" ({names[status]})" if status in names else "")


def command_of(launch: Launch, process: int, processes: int, port: int) -> list[str]:
    """The command line of one process.  It ends when this one is killed (`jhpt.launched`)."""
    words = [sys.executable, "-m", "jhpt.launched", str(os.getpid()), "train", *launch.arguments]
    words += ["--out", str(launch.out)]
    if processes > 1:
        words += ["--coordinator", f"127.0.0.1:{port}", "--process-id", str(process), "--num-processes", str(processes)]
    return words


def environment_of(environment: Mapping[str, str], gpus: int, process: int, processes: int) -> dict[str, str]:
    """The environment of one process: GPUs are shared out in equal, contiguous parts.

    Raises:
      InputError: the processes cannot have as many GPUs each.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(gpus)]
    if not devices or environment.get("JAX_PLATFORMS") == "cpu":
        return dict(environment)
    if len(devices) % processes:
        raise InputError(f"--processes {processes} cannot share {len(devices)} GPUs evenly; use a divisor of these")
    share = len(devices) // processes
    mine = devices[process * share : (process + 1) * share]
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(mine)}


def launched(launch: Launch, say: Say) -> int:
    """Runs attempts until one is the last; returns the exit status."""
    attempts: list[Attempt] = []
    processes, steps = launch.processes, steps_in(launch.out / FOLDER)
    while True:
        if steps_in(launch.out / FOLDER) != steps:  # it has gone back, or on
            launch = replace(launch, arguments=tuple(without(GO_BACK, launch.arguments)))
        attempt = _attempt(launch, processes, say)
        attempts.append(attempt)
        following = after(launch, attempts, processes)
        if following.status is not None:
            if following.reason:
                say(f"jhpt launch: {following.reason}")
            return following.status
        where = "from the start" if attempt.step is None else f"from step {attempt.step}"
        say(f"jhpt launch: {following.reason}; starting again {where} in {following.pause:g} s")
        time.sleep(following.pause)
        processes = following.processes


def _attempt(launch: Launch, processes: int, say: Say) -> Attempt:
    """Starts all processes and waits for them; where one fails, the others are ended."""
    logs, port, gpus = launch.out / LOGS, free_port(), len(list(Path("/dev").glob("nvidia[0-9]*")))
    running: list[subprocess.Popen[bytes]] = []
    with _Forwarding(running):
        for process in range(processes):
            command = command_of(launch, process, processes, port)
            running.append(_start(command, environment_of(os.environ, gpus, process, processes), logs, process))
        failed = _first_failure(running)
        if failed is not None:
            _end(running)
    step = next(reversed(steps_in(launch.out / FOLDER)), None)
    if failed is None:
        return Attempt(step=step)
    if failed and (line := _last_line(logs, failed)):
        say(f"process {failed}: {line}")
    return Attempt(failed=failed, status=running[failed].returncode, step=step)


def _start(command: Sequence[str], environment: Mapping[str, str], logs: Path, process: int) -> subprocess.Popen[bytes]:
    """Starts a process.  The output of the first one is this terminal's, that of the others goes to a file."""
    with nullcontext() if process == 0 else _log(logs, process) as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it once, through this process
        )


def _log(folder: Path, process: int) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"process-{process}.log").open("ab")


def _last_line(folder: Path, process: int) -> str:
    with suppress(OSError):
        lines = (folder / f"process-{process}.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")
    return ""


def _first_failure(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all have ended well, or one has not; which one, None: all have."""
    while True:
        statuses = [process.poll() for process in running]
        for number, status in enumerate(statuses):
            if status:
                return number
        if None not in statuses:
            return None
        time.sleep(0.05)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits a little, because processes that lose a peer say so and leave; then ends those that are left."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(0.05)
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


class _Forwarding:
    """Passes signals on to the processes while it is entered."""

    def __init__(self, running: Sequence[subprocess.Popen[bytes]]):
        self._running = running
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in FORWARDED:
            self._before[number] = signal.signal(number, self._forward)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _forward(self, number: int, frame: object) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)
