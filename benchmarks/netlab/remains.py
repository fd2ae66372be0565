"""What there is of a lab: all that the kernel and the file system keep under its tag, found again and removed."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from benchmarks.netlab.errors import LabError
from benchmarks.netlab.links import NAMESPACES, SETTINGS, call
from benchmarks.netlab.quotas import here

TAG = re.compile(r"jhpt-lab-(\d+)-(\d+)-\d+")
"""With the process that made the lab, and when it started: the kernel gives a number of a process to another one later.
No two living labs have the same."""

POLL_S, KILL_S = 0.02, 10.0
"""Seconds between two tries, and that the kernel has to end a killed process."""

_numbers = itertools.count()


def new_tag() -> str:
    """A tag that no other lab has."""
    return f"jhpt-lab-{os.getpid()}-{started(os.getpid())}-{next(_numbers)}"


def maker(tag: str) -> int | None:
    """The process that made a lab; None if it is gone."""
    match = TAG.fullmatch(tag)
    assert match is not None, tag
    process, start = map(int, match.groups())
    return process if started(process) == start else None


def started(process: int) -> int | None:
    """When a process started, in ticks since the machine did (proc_pid_stat(5)).  None if it is gone, even if its
    parent has not asked for its status: in a container without an init process nobody ever does."""
    try:
        text = Path("/proc", str(process), "stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name of its program may have blanks and parentheses
    return None if state in "ZX" else int(fields[18])


def remove_dead() -> None:
    """Removes the labs of processes that are gone, which had no time to do it."""
    for tag in tags():
        if maker(tag) is None:
            remove(tag)


def remove(tag: str) -> None:
    """Kills what runs in a lab's hosts and removes whatever there is of it: temporary folders named by its tag, too."""
    empty(tag)
    for namespace in NAMESPACES.glob(f"{tag}-*"):
        until_gone(namespace, partial(call, "ip", "netns", "delete", namespace.name))
    for group in groups(tag):
        until_gone(group, group.rmdir)
    for folder in (SETTINGS, Path(gettempdir())):
        for files in folder.glob(f"{tag}-*"):
            shutil.rmtree(files, ignore_errors=True)


def tags() -> set[str]:
    """Every lab of which there is anything."""
    controller = here()
    folders = [NAMESPACES, SETTINGS, Path(gettempdir()), *([controller.root] if controller else [])]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return {match[0] for name in names if (match := TAG.match(name))}


def groups(tag: str) -> list[Path]:
    """The control groups of a lab."""
    controller = here()
    return list(controller.root.glob(f"{tag}-*")) if controller else []


def until_gone(path: Path, delete: Callable[[], object]) -> None:
    """Deletes again while it fails: the kernel takes a moment to forget a group's last process, and another process
    may be removing the same dead lab."""
    deadline = time.monotonic() + KILL_S
    while path.exists():
        try:
            delete()
        except (LabError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def empty(tag: str) -> None:
    """Kills every process of a lab until there is none: those of other sessions and of dead parents too."""
    deadline = time.monotonic() + KILL_S
    while found := processes(tag):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(found)} of {tag} outlive SIGKILL")
        time.sleep(POLL_S)


def processes(tag: str) -> set[int]:
    """Whoever is in a namespace or a control group of a lab."""
    found = set()
    for group in groups(tag):
        with contextlib.suppress(OSError):  # gone by now
            found |= set(map(int, (group / "cgroup.procs").read_text().split()))
    namespaces = {identity(path) for path in NAMESPACES.glob(f"{tag}-*")} - {None}
    for folder in Path("/proc").glob("[0-9]*") if namespaces else ():
        if identity(folder / "ns" / "net") in namespaces:
            found.add(int(folder.name))
    return found


def identity(namespace: Path) -> tuple[int, int] | None:
    """What a file of a namespace stands for: the same for all of its files; None if there is no such file any more."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
