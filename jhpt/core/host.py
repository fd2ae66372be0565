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
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
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
    return min([machine, *_limits(cgroups, membership)])


def _limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """The limits, as far as they can be read, of this process' groups and of all groups above them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, file = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        # Inside a container the path may be that on the host, whose groups are not visible; then the root counts.
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            yield from _limit(folder / file)
            if folder == root:
                break


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():  # "max": none
        yield int(text)
