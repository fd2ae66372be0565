"""How much memory this host has for its programs."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
