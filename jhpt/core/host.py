"""This host: how much memory it has for its programs, and how it is told from others.

A process is told from those of other hosts without any network.  Three things are compared: the host name, the boot id
of the kernel, and the network namespace:

    machine   host name and boot id       its processes share memory
    host      machine and namespace       its processes share links between devices, and the way to other hosts

Containers of one kernel have host names of their own, unless they are told otherwise, and each has its limit of memory.
Emulated hosts (`benchmarks/netlab`) share host name, kernel and memory, but each has a network namespace.
"""

import hashlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS, MEMBERSHIP, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
BOOT_ID, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


def machine_identity(boot_id: Path = BOOT_ID) -> int:
    """64 bits that are the same for the processes of one machine, and for no others.

    boot_id: the kernel's file; where there is none, the host name alone counts.
    """
    return _digest(_machine(boot_id))


def host_identity(boot_id: Path = BOOT_ID, network: Path = NETWORK) -> int:
    """64 bits that are the same for the processes of one host, and for no others.

    network: stands for this process' network namespace by its inode; where there is none, the machine is the host.
    """
    try:
        inode = network.stat().st_ino
    except OSError:
        inode = 0
    return _digest(f"{_machine(boot_id)} {inode}")


def _machine(boot_id: Path) -> str:
    try:
        return f"{platform.node()} {boot_id.read_text().strip()}"
    except OSError:
        return platform.node()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes that the machine has, or that its container may use if that is less.

    Args:
      cgroups: where the kernel mounts control groups, version 1 or 2.
      membership: the file that lists the groups of this process, in lines of `number:controllers:/path`.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (limit for group in _groups(cgroups, membership) for limit in _number(group.limit))
    return min([machine, *limits])


def available_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, memory: Path = MEMORY) -> int:
    """Bytes of `host_memory` that nobody uses now, or that the kernel would give back at once (cached files).

    memory: the kernel's account of the machine (`/proc/meminfo`).  What it or a group does not tell limits nothing.
    """
    rooms = list(_machine_room(memory))
    for group in _groups(cgroups, membership):
        for limit, used in zip(_number(group.limit), _number(group.used), strict=False):
            rooms.append(limit - used + _field(group.statistics, group.cached))
    return max(min([host_memory(cgroups, membership), *rooms]), 0)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The files of a control group: its limit, what it uses, and its statistics, in which a line has cached bytes."""

    limit: Path
    used: Path
    statistics: Path
    cached: str


def _groups(cgroups: Path, membership: Path) -> Iterator[_Group]:
    """This process' groups and all groups above them, as far as they can be read."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / "memory" if controllers else cgroups
        # Inside a container the path may be that on the host, whose groups are not visible; then the root counts.
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
            limit, used = (folder / f"memory.{name}" for name in names)
            cached = "total_inactive_file" if controllers else "inactive_file"
            yield _Group(limit=limit, used=used, statistics=folder / "memory.stat", cached=cached)
            if folder == root:
                break


def _machine_room(memory: Path) -> Iterator[int]:
    kibibytes = _field(memory, "MemAvailable:")
    if kibibytes:
        yield 1024 * kibibytes


def _field(file: Path, name: str) -> int:
    """The number after this word at the start of a line; 0 where there is none."""
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():  # "max": none
        yield int(text)
