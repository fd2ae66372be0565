"""Cores: how many this process may use, and control groups that limit those of each host."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.errors import LabError
from jhpt.core.errors import InputError

QUOTA_PERIOD = 10_000
"""Microseconds over which a CPU quota holds.  Within a period a host uses up its quota and then stands still."""

MIN_QUOTA = 1_000
"""Microseconds, the kernel's minimum (Documentation/scheduler/sched-bwc.rst)."""

MIN_CPU = MIN_QUOTA / QUOTA_PERIOD
"""The least cores of a host."""

WEIGHT = {1: ("cpu.shares", 1 << 18), 2: ("cpu.weight", 10_000)}
"""By the controller's version, the file and its largest value, with which a host gets its quota before other programs
get the core.  With the usual weight, hosts with a quota of 50 % of a core got 27 % beside three busy programs."""


@dataclass(frozen=True, kw_only=True)
class CpuController:
    """The kernel's CPU quotas: the folder of the root group, and the version of its files."""

    root: Path
    version: int

    def quota(self, cpu: float, period: int = QUOTA_PERIOD) -> dict[str, str]:
        """The files of a group that may use `cpu` cores, in the order to write them.  period: microseconds."""
        quota, (file, most) = f"{cpu * period:.0f}", WEIGHT[self.version]
        if self.version == 1:
            return {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": quota, file: str(most)}
        return {"cpu.max": f"{quota} {period}", file: str(most)}

    def limit(self, group: str, cpu: float, period: int = QUOTA_PERIOD) -> None:
        """Sets the quota of a group.  period: microseconds.

        Raises: LabError where the kernel refuses it, or has no such group.
        """
        for name, value in self.quota(cpu, period).items():
            try:
                (self.root / group / name).write_text(value)
            except OSError as error:
                raise LabError(f"cpu={cpu:g}: `{value}` cannot be written to {name} of {group}: {error}") from error

    def cores(self, groups: str) -> float:
        """Cores that a process may use by the text of its /proc/PID/cgroup: no group has more than those above it.

        In a container the path may be that on the host, of which only the root, the container's group, is visible.
        """
        folder = self.root / self._group(groups).lstrip("/")
        return min(self._most(group) for group in (folder, *folder.parents) if group.is_relative_to(self.root))

    def _group(self, groups: str) -> str:
        for line in groups.splitlines():
            number, controllers, path = line.split(":", maxsplit=2)
            if "cpu" in controllers.split(",") if self.version == 1 else number == "0":
                return path
        return "/"

    def _most(self, group: Path) -> float:
        """Cores of a group; without a limit, as in the root group of a machine, infinitely many."""
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if self.version == 1 else ("cpu.max",)
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except OSError:
            return math.inf
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def cpu_controller(mounts: str, root: Path = Path("/")) -> CpuController | None:
    """The CPU controller in the text of /proc/mounts, whose paths are below `root`.  It belongs to one hierarchy only,
    of version 1 or 2."""
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split()
        folder = root / path.lstrip("/")
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(root=folder, version=1)
        if kind == "cgroup2" and "cpu" in (folder / "cgroup.controllers").read_text().split():
            return CpuController(root=folder, version=2)
    return None


def here() -> CpuController | None:
    """The controller as this process sees it."""
    return cpu_controller(Path("/proc/mounts").read_text())


def seen_by(process: int) -> CpuController | None:
    """The controller as another process sees it."""
    return cpu_controller(Path("/proc", str(process), "mounts").read_text(), Path("/proc", str(process), "root"))


def cores() -> float:
    """Cores that this process may use: those that it may run on, or fewer by the quota of a container or service."""
    controller, processors = here(), len(os.sched_getaffinity(0))
    return min(processors, controller.cores(Path("/proc/self/cgroup").read_text())) if controller else processors


def shortest_period(cpu: float) -> int:
    """Microseconds of the shortest period of a quota of `cpu` cores, down to which the kernel goes.

    For measurements of idle time: how long a host stands still then hardly depends on when in a period it was asked.
    More switches leave hosts less of their quota, so other seconds are not taken with it.
    """
    return math.ceil(MIN_QUOTA / cpu)


def check_cpu(cpu: float) -> None:
    """Raises: InputError for a quota that the kernel cannot express."""
    if not MIN_CPU <= cpu < math.inf:
        raise InputError(f"cpu={cpu:g}: a host needs at least {MIN_CPU:g} cores, and not infinitely many")


def check_cores(hosts: int, cpu: float, cores: float, needed: float | None = None) -> None:
    """Raises: InputError for hosts that take more than these cores.  needed: by all hosts; None: `cpu` by each."""
    needed = hosts * cpu if needed is None else needed
    if needed <= cores * (1 + 1e-9):
        return
    share = math.floor(cores / hosts * 1000) / 1000  # down, so that it is accepted
    advice = f"let it use {needed:g}"
    if share >= MIN_CPU:
        advice += f", or use cpu={share:g} or less"
    elif cores >= MIN_CPU:
        advice += f", or emulate at most {int(cores / MIN_CPU)} hosts, with cpu={MIN_CPU:g}"
    raise InputError(
        f"hosts={hosts} with cpu={cpu:g} take {needed:g} cores, and this process may use {cores:g} (of the machine's, "
        f"by its affinity and by quotas, such as a container's): {advice}"
    )


def core_of(rank: int, hosts: Sequence[float]) -> int | None:
    """The core on which all threads of a host run; None for hosts of more than a core, or more than the cores hold.

    hosts: cores of each.

    The kernel hands out a quota in slices to the cores on which a group runs (Documentation/scheduler/sched-bwc.rst),
    and threads that wake each other on two cores leave a part of it unused.  On four hosts of half a core, beside other
    programs, a layer took 2.3 times its processor time where hosts moved between two cores, and 2.0 where they did not.
    """
    cores = sorted(os.sched_getaffinity(0))
    fullest = max(sum(hosts[core :: len(cores)]) for core in range(len(cores)))
    return cores[rank % len(cores)] if fullest <= 1 + 1e-9 else None


def make_groups(groups: Mapping[str, float]) -> None:
    """Makes control groups of these names, with so many cores each.

    Raises: LabError where there are no quotas.
    """
    controller = here()
    if controller is None:
        raise LabError("no control group hierarchy with the cpu controller is mounted, which a quota needs")
    if controller.version == 2:
        (controller.root / "cgroup.subtree_control").write_text("+cpu")
    for group, cpu in groups.items():
        (controller.root / group).mkdir()
        controller.limit(group, cpu)


def joined(group: str, line: Sequence[str]) -> list[str]:
    """A command that runs `line` in a control group."""
    controller = here()
    assert controller is not None, "the group has been made"
    # A shell joins the group and becomes the command.  Python code between fork and exec is not safe with threads.
    return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(controller.root / group / "cgroup.procs"), *line]
