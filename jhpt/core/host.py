"""How much memory this host has for its programs."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Bytes: what the machine has, or less where a container may have less.

    Args:
      cgroups: where the kernel mounts them, version 1 or 2.
      own: says which ones this process is in, lines of `number:controllers:/path`.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """Of this process' groups and all above them, that are written down where they can be read."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, file = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        # Inside a container the path may be that of the host, whose groups are not there; its own one is the root.
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
