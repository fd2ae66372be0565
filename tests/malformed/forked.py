"""Runs cases in processes that are forked from one which has imported everything and started no device.

Each has a folder, an output and a limit of its own; a fork costs milliseconds where an import costs seconds.

    python -m tests.malformed.forked FOLDER NAMES    a line of JSON for each case that did not end as it should, then
                                                     one with the number of cases that ran and their largest figures
"""

import ctypes
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jhpt import cli
from jhpt.core.errors import Exit
from tests.malformed.case import Case, Mount, Valid, make_valid
from tests.malformed.cases import CASES

SECONDS, BYTES = 20.0, 2 << 30
"""Limits of a case: seconds of the processor, and bytes in memory with Python, jax and all else that is imported."""

HANGS = 60.0
"""Seconds of the clock, which goes on while other programs have the processor; a case that waits has no other limit."""

LONGEST_MESSAGE = 10_000
"""Characters."""

DOCUMENTED = {Exit.DONE, Exit.INPUT, Exit.NOT_HERE, Exit.DAMAGED, Exit.STORAGE}

PAUSE = 0.005
"""Seconds between looks at the processes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended.

    faults: what should not have been; none if it ended as it should.  seconds: of the processor.  waited: of the clock.
    """

    name: str
    faults: list[str]
    arguments: list[str]
    seconds: float
    waited: float
    bytes: int
    output: str


@dataclass(kw_only=True)
class Running:
    """A case that runs."""

    name: str
    case: Case
    place: Path
    before: dict[str, tuple]
    started: float
    pid: int
    bytes: int = 0
    seconds: float = 0.0
    killed: bool = False

    def look(self) -> Outcome | None:
        """The outcome, if it has ended; ends it if it is beyond a limit."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.bytes = max(self.bytes, usage.ru_maxrss << 10)
            self.seconds = usage.ru_utime + usage.ru_stime
            return self._outcome(os.waitstatus_to_exitcode(status))
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        ticks = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        self.seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        self.bytes = max(self.bytes, pages * os.sysconf("SC_PAGE_SIZE"))
        waited = time.monotonic() - self.started
        if not self.killed and (self.bytes > BYTES or self.seconds > SECONDS or waited > HANGS):
            self.killed = True
            os.kill(self.pid, signal.SIGABRT)  # faulthandler writes where it was
            time.sleep(0.2)
            os.killpg(self.pid, signal.SIGKILL)
        return None

    def _outcome(self, status: int) -> Outcome:
        waited = time.monotonic() - self.started
        output = "".join((self.place / name).read_text(errors="replace") for name in ("out", "error"))
        return Outcome(
            name=self.name,
            faults=list(self._faults(status, waited, output)),
            arguments=self.case.arguments,
            seconds=self.seconds,
            waited=waited,
            bytes=self.bytes,
            output=output if len(output) < 6000 else f"{output[:2000]} ... {output[-4000:]}",
        )

    def _faults(self, status: int, waited: float, output: str) -> Iterator[str]:
        if self.seconds > SECONDS:
            yield f"took {self.seconds:.1f} s"
        if waited > HANGS:
            yield f"ended only after {waited:.1f} s"
        if self.bytes > BYTES:
            yield f"took {self.bytes / 2**30:.1f} GiB"
        if status not in DOCUMENTED:
            yield f"status {status}"
        if "Traceback" in output or "panicked" in output:
            yield "a traceback"
        if any((self.place / "cache").rglob("crashes/*")):
            yield "a crash file"
        if left := [path.name for path in (self.place / "tmp").iterdir()]:
            yield f"temporary files are left: {left}"
        if status and (changed := _changes(self.before, contents(self.place / "here"))):
            yield f"refused, and written: {changed[:5]}"
        if status and not re.search(r"\w+ \w+", output):
            yield "refused without a message"
        if status and len(output) > LONGEST_MESSAGE + 4 * sum(
            map(len, self.case.arguments)
        ):  # flags may be shown as they are
            yield f"a message of {len(output):,} characters"


def contents(folder: Path) -> dict[str, tuple]:
    """Everything that lies in a folder; links are not followed, and nothing is opened."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            changed = 0 if os.path.isdir(path) else status.st_mtime_ns
            found[os.path.relpath(path, folder)] = (status.st_mode, status.st_ino, status.st_nlink, changed)
    return found


def _changes(before: Mapping[str, tuple], after: Mapping[str, tuple]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def made(name: str, place: Path, valid: Valid) -> Case:
    """A case, with its files in the folder `here` of its place."""
    shutil.rmtree(place, ignore_errors=True)
    for folder in ("here", "tmp", "cache", "home"):
        (place / folder).mkdir(parents=True)
    return CASES[name](random.Random(name), place / "here", valid)


def made_here(name: str, folder: Path) -> Case:
    """A case, made in this process, to be run by hand in `folder`."""
    return made(name, folder / "case", valid_in(folder))


def valid_in(folder: Path) -> Valid:
    """Valid things for the cases, in a folder of their own."""
    (folder / "valid").mkdir()
    return make_valid(folder / "valid", lambda arguments: _run_valid(arguments, folder / "valid"))


def begin(name: str, place: Path, valid: Valid) -> Running:
    """Makes the files of a case and starts its command."""
    case = made(name, place, valid)
    before = contents(place / "here")
    started = time.monotonic()
    pid = _fork(case, place)
    return Running(name=name, case=case, place=place, before=before, started=started, pid=pid)


def _fork(case: Case, place: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of its threads, of which there are none before a device is used
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        for number, (name, flags) in enumerate(
            ((os.devnull, os.O_RDONLY), ("out", os.O_WRONLY | os.O_CREAT), ("error", os.O_WRONLY | os.O_CREAT))
        ):
            os.dup2(os.open(place / name, flags, 0o644), number)
        faulthandler.enable()
        os.environ |= {
            "XDG_CACHE_HOME": str(place / "cache"),
            "TMPDIR": str(place / "tmp"),
            "HOME": str(place / "home"),
        }
        os.environ |= case.environment
        mount(case.mounts)
        tempfile.tempdir = None
        os.chdir(place / "here")
        status = status_of(case.arguments)
    except BaseException:  # a traceback is what the tests look for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def mount(mounts: Sequence[Mount]) -> None:
    """Mounts them for this process alone; where it may not, it ends with the status of what cannot run here."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, bind, remount, read_only = 0x20000, 1 << 18 | 1 << 14, 1 << 12, 1 << 5, 1
    calls = [(b"none", b"/", None, private, None)] if mounts else []
    for each in mounts:
        place = bytes(each.folder)
        if each.bytes is None:
            calls += [(place, place, None, bind, None), (place, place, None, bind | remount | read_only, None)]
        else:
            calls += [(b"tmpfs", place, b"tmpfs", 0, f"size={each.bytes}".encode())]
    if mounts and (libc.unshare(new_namespace) or any(libc.mount(*call) for call in calls)):
        print("these processes may not mount anything")
        os._exit(Exit.NOT_HERE)


def status_of(arguments: list[str]) -> int:
    """The exit status; tyro exits by itself where a flag cannot be parsed."""
    try:
        return int(cli.main(arguments))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def prepare() -> None:
    """Imports what commands need.  Call it once."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "RUST_BACKTRACE": "0"}
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    import jhpt.bench.published
    import jhpt.interop.documents
    import jhpt.interop.evaluate
    import jhpt.interop.huggingface
    import jhpt.interop.load
    import jhpt.planner.api
    import jhpt.planner.report.answer
    import jhpt.training.run  # noqa: F401


def outcomes(names: Sequence[str], folder: Path, at_once: int) -> Iterator[Outcome]:
    """Runs cases, a few at a time; yields how each ended."""
    valid = valid_in(folder)
    waiting, running = list(reversed(names)), dict[int, Running]()
    while waiting or running:
        for slot in range(at_once):
            if slot not in running and waiting:
                running[slot] = begin(waiting.pop(), folder / str(slot), valid)
        for slot, one in list(running.items()):
            if (outcome := one.look()) is not None:
                del running[slot]
                yield outcome
        time.sleep(PAUSE)


def _run_valid(arguments: list[str], folder: Path) -> None:
    place = folder.parent / "making"
    for name in ("cache", "tmp", "home"):
        (place / name).mkdir(parents=True, exist_ok=True)
    if not (place / "here").exists():
        (place / "here").symlink_to(folder)
    _, status = os.waitpid(_fork(Case(arguments=arguments), place), 0)
    if status:
        raise RuntimeError(f"jhpt {arguments}: {(place / 'error').read_text()}")


def main() -> None:
    """Runs the cases that are named."""
    prepare()
    folder, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    count, slowest, longest, largest = 0, (0.0, ""), (0.0, ""), (0, "")
    for outcome in outcomes(names, folder, os.cpu_count() or 1):
        count += 1
        slowest, longest = max(slowest, (outcome.seconds, outcome.name)), max(longest, (outcome.waited, outcome.name))
        largest = max(largest, (outcome.bytes, outcome.name))
        if outcome.faults:
            print(json.dumps(asdict(outcome)), flush=True)
    print(json.dumps({"cases": count, "slowest": slowest, "longest": longest, "largest": largest}), flush=True)


if __name__ == "__main__":
    main()
