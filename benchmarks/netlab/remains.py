"""The remains of a lab: finding and removing everything in the kernel and the file system under its tag."""

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
"""A tag holds the number of the process that made the lab and its start time, because the kernel reuses the numbers of
processes.  No two living labs have the same tag."""

POLL_S, KILL_S = 0.02, 10.0
"""Seconds between two tries, and seconds that the kernel has to end a killed process."""

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
    """Removes the labs of processes that are gone and could not remove them."""
    for tag in tags():
        if maker(tag) is None:
            remove(tag)


def remove(tag: str) -> None:
    """Kills the processes in a lab's hosts and removes all of the lab, also temporary folders named by its tag."""
    empty(tag)
    for namespace in NAMESPACES.glob(f"{tag}-*"):
        until_gone(namespace, partial(call, "ip", "netns", "delete", namespace.name))
    for group in groups(tag):
        until_gone(group, group.rmdir)
    for folder in (SETTINGS, Path(gettempdir())):
        for files in folder.glob(f"{tag}-*"):
            shutil.rmtree(files, ignore_errors=True)


def tags() -> set[str]:
    """The tags of all labs of which anything exists."""
    controller = here()
    folders = [NAMESPACES, SETTINGS, Path(gettempdir()), *([controller.root] if controller else [])]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return {match[0] for name in names if (match := TAG.match(name))}


def groups(tag: str) -> list[Path]:
    """The control groups of a lab."""
    controller = here()
    return list(controller.root.glob(f"{tag}-*")) if controller else []


def until_gone(path: Path, delete: Callable[[], object]) -> None:
    """Repeats `delete` while it fails: the kernel takes a moment to forget a group's last process, and another process
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
    """Kills the processes of a lab until there are none, also those of other sessions and of dead parents."""
    deadline = time.monotonic() + KILL_S
    while alive := processes(tag):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(alive)} of {tag} outlive SIGKILL")
        time.sleep(POLL_S)


def processes(tag: str) -> set[int]:
    """The processes in a namespace or a control group of a lab."""
    inside = set()
    for group in groups(tag):
        with contextlib.suppress(OSError):  # gone by now
            inside |= set(map(int, (group / "cgroup.procs").read_text().split()))
    namespaces = {identity(path) for path in NAMESPACES.glob(f"{tag}-*")} - {None}
    for folder in Path("/proc").glob("[0-9]*") if namespaces else ():
        if identity(folder / "ns" / "net") in namespaces:
            inside.add(int(folder.name))
    return inside


def identity(namespace: Path) -> tuple[int, int] | None:
    """The namespace of a file, equal for all files of one namespace; None if the file is gone."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
