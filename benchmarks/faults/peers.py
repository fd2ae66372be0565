"""Two processes, of which one is killed, stopped, stuck, refuses or never comes: how soon the other ends, and how."""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.faults.injected import moment, prepare
from benchmarks.faults.setups import SETUPS, settings_of
from benchmarks.faults.zygote import LIVE, LONGEST, ended, run, start
from jhpt.core.errors import Exit

STALL = 5.0
"""`peers.stall_seconds` and `peers.heartbeat_seconds`."""

WAIT = 5.0
"""`--wait`."""

LIMITS = {"killed": 15.0, "stopped": STALL + 10, "stuck": STALL + 10, "refused": 5.0, "absent": WAIT + 5}
"""Seconds after which the other process must have ended."""

POINTS = {
    "connecting": "connecting",
    "compiling": "compiling",
    "stepping": "in step 5.",
    "saving": "saving step 4",
    "restoring": "restoring step 2",
}
"""What `injected.prepare` waits for, by phase."""

ENDLESS = {"train.steps": 100_000, "checkpoint.every": 4, "evaluation.every": 100_000}
SETTINGS = {"peers.heartbeat_seconds": STALL, "peers.stall_seconds": STALL, "peers.wait_seconds": WAIT}


@dataclass(frozen=True, kw_only=True)
class Met:
    """One trial.  victim: the process that met the fault; seconds: until the other one ended, with this status and
    message; held: whether both are what is promised."""

    fault: str
    phase: str
    victim: int
    seconds: float
    status: int
    message: str
    held: bool


Trial = tuple[str, str, int]
"""(fault, phase, victim)."""


def tried(quick: bool) -> list[Trial]:
    """All faults in all phases on each of the two processes, or one of each claim."""
    faults = ("killed", "stopped", "stuck", "refused")
    if quick:
        return [("absent", "connecting", 1), ("killed", "stepping", 1), ("stuck", "stepping", 1)]
    every = [(fault, phase, victim) for fault in faults for phase in POINTS for victim in (0, 1)]
    return [*every, ("absent", "connecting", 0), ("absent", "connecting", 1)]


def peers(
    folder: Path, chosen: Sequence[Trial], at_once: int = 2, changes: Mapping[str, object] = MappingProxyType({})
) -> Iterator[Met]:
    """Injects these faults, so many runs at a time; those that restore do so in copies of a run that is at step 2.

    changes: of the settings.
    """
    home, setup = folder / "peers", SETUPS["two processes"]
    home.mkdir()
    settings = {**settings_of(setup, folder), **SETTINGS, **changes}
    if any(phase == "restoring" for _, phase, _ in chosen):
        status, _ = run(setup, settings | {"train.steps": 2}, home / "begun", LIVE, log=folder / "peers.log")
        if status:
            raise RuntimeError(f"the run of two processes ended with status {status}; see {folder / 'peers.log'}")
    for first in range(0, len(chosen), at_once):
        begun = [_begin(home, settings | ENDLESS, *trial) for trial in chosen[first : first + at_once]]
        try:
            while begun:
                for each in list(begun):
                    if (met := _met(each)) is not None:
                        begun.remove(each)
                        yield met
                time.sleep(0.01)
        finally:
            for pid in (pid for each in begun for pid in each.pids):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A trial under way.  pids, logs: of its two processes; started: a time."""

    trial: Trial
    pids: Sequence[int]
    logs: Sequence[Path]
    started: float


def _begin(home: Path, settings: Mapping[str, object], fault: str, phase: str, victim: int) -> _Begun:
    place = home / f"{fault}-{phase}-{victim}"
    if phase == "restoring":
        shutil.copytree(home / "begun", place)
    logs = [place.with_name(f"{place.name}-{process}.log") for process in range(2)]

    def before(process: int) -> None:
        if process == victim and fault == "absent":
            os._exit(0)
        if process == victim:
            prepare(fault, POINTS[phase])

    started = time.time()
    pids = start(SETUPS["two processes"], settings, place, before, logs=logs)
    return _Begun(trial=(fault, phase, victim), pids=pids, logs=logs, started=started)


def _met(begun: _Begun) -> Met | None:
    """The outcome, once the other process has ended; None: it still runs."""
    fault, phase, victim = begun.trial
    status = ended(begun.pids[1 - victim])
    now = time.time()
    if status is None:
        if now - begun.started > LONGEST:
            os.kill(begun.pids[1 - victim], signal.SIGKILL)
        return None
    time.sleep(0.5 if fault in ("stuck", "refused") else 0.0)  # it ends by itself, too
    if fault not in ("absent", "killed"):
        os.kill(begun.pids[victim], signal.SIGKILL)
    os.waitpid(begun.pids[victim], 0)
    since = begun.started if fault == "absent" else moment(begun.logs[victim].read_text())
    lines = [line for line in begun.logs[1 - victim].read_text().splitlines() if line]
    message, came = lines[-1] if lines else "", since is not None
    if since is None:
        since, message = begun.started, f"ended before the fault: {message}"
    named = f"missing: {victim}" if fault == "absent" and victim else f"process {victim}"
    seconds, expected = now - since, Exit.INPUT if fault == "refused" else Exit.PEER
    held = came and status == expected and named in message and seconds < LIMITS[fault]
    return Met(fault=fault, phase=phase, victim=victim, seconds=seconds, status=status, message=message, held=held)
