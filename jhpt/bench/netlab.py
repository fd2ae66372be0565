"""Emulated hosts: one command on several network namespaces of this machine, joined by links of a known rate.

    with Lab(hosts=4, bits_per_s=500e6, cpu=0.5) as lab:
        results = lab.run(lambda rank, hosts, coordinator: ["python", "worker.py", str(rank)], timeout_s=60)
        lab.limit(100e6)  # the same hosts on slower links

A host is a namespace with one interface, `eth0`, at 10.77.0.(rank + 1).  The far ends are the ports of a bridge, the
switch, which lives in a namespace of its own; no namespace reaches the machine's own network, so that the addresses
are free in every lab.  A token bucket limits what a host sends, another at its port of the switch what it receives.
A CPU quota keeps a host that waits from lending its time to the others: without one, hosts that share cores hide each
other's idle time, and with it what a plan gains or loses by waiting.

All of a lab's state is the kernel's, found again by names that start with the lab's tag.  So a process that knows the
tag may limit the links, one that runs in a host included (`Lab(hosts=4, tag=tag).limit(100e6)`), and what a killed run
has left is removed when the next lab is entered.

How near it comes to `2 (n - 1) / n bytes / rate`, for 4 MiB of float32 reduced over four hosts of half a core each, on
two cores: 511 ms for 503 at 100 Mbit/s, 104 for 101 at 500, 53 for 50 at 1000, 28 for 25 at 2000.  Without a limit it
takes 10 to 16 ms, the processor's; where other programs want both cores too, 35 at 2000.  Links have no delay of their
own: a message goes and comes back in 50 microseconds.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType

from jhpt.core.errors import InputError

NETWORK = "10.77.0"
MAX_HOSTS = 250
"""One network of 24 bits."""

PORT = 5599
"""Of the coordinator; every lab has all ports to itself."""

MTU = 9000
"""Bytes, the jumbo frames of clusters: 66 bytes of headers are 0.7 % of a full one, against 4.4 % of one of 1500."""

PACKET = 1 << 15
"""Bytes that TCP hands to a link at a time, to be cut into frames; and as many of a connection wait in a link's queue.
The rest waits in the connection, so that the few bytes with which a peer says that it is ready do not wait behind it:
a queue is first come, first served, where network cards take turns.  With the kernel's own figures, 64 KiB and 4 MiB,
passing 1 MiB round a ring at 500 Mbit/s took 24.8 ms instead of 17.2 (16.8 by the rate); with half of this one, an
all-reduce at 2 Gbit/s took 38 ms instead of 28, for want of processor time."""

TCP = {"tcp_congestion_control": "reno", "tcp_limit_output_bytes": PACKET}
"""Reno is in every kernel, and without losses it leaves the rate to the link.  A machine's default may look for a rate
of its own: with BBR passing 1 MiB at 2 Gbit/s took 5.9 ms instead of 4.3."""

BURST_S = 1e-3
"""Seconds of sending that an idle link saves up: little of a transfer worth measuring, and more than a timer of a busy
machine comes late, which is rate lost."""

QUEUE = 1 << 26
"""Bytes a link holds back before it drops: more than the windows of the connections to a host, so that nothing is
lost.  Fabrics of clusters have flow control; a packet sent again after 200 ms would be all that a benchmark sees."""

QUOTA_PERIOD = 10_000
"""Microseconds over which a CPU quota holds: how long a host may run ahead, or stand still at the end of its share."""

MIN_QUOTA = 1_000
"""Microseconds, the kernel's least (Documentation/scheduler/sched-bwc.rst)."""

WEIGHT = {1: ("cpu.shares", 1 << 18), 2: ("cpu.weight", 10_000)}
"""By the controller's version, the file and its largest figure: what a host has left of its quota it gets before other
programs do.  With the usual weight, beside three busy programs, hosts got 27 % of a core where 50 % were theirs."""

POLL_S, KILL_S = 0.02, 10.0
"""Seconds between two looks at the hosts, and that the kernel has to end a killed process."""

TAIL_LINES = 30
"""Of a host's stderr, in an error."""

NAMESPACES, SETTINGS = Path("/run/netns"), Path("/etc/netns")
"""Where ip(8) keeps namespaces, and the files that replace those of /etc inside one."""

TAG = re.compile(r"jhpt-lab-(\d+)-\d+")
"""With the process that made the lab; no two living labs have the same."""

Command = Callable[[int, int, str], Sequence[str]]
"""`(rank, hosts, "address:port" of the coordinator) -> arguments`."""

_numbers = itertools.count()


def why_not() -> str | None:
    """What keeps this machine from emulating hosts, as a sentence; None when a lab of one host has just worked."""
    if sys.platform != "linux":
        return "emulated hosts are network namespaces, which only Linux has"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"emulated hosts need the program {program}, of the package iproute2, which is not installed"
    if os.geteuid() != 0:
        return "emulated hosts are network namespaces, which only root may make: run it as root"
    own_address = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    try:
        with Lab(hosts=1, bits_per_s=1e9, cpu=0.5) as lab:
            (result,) = lab.run(lambda *_: [sys.executable, "-I", "-c", own_address], timeout_s=30)
    except (LabError, HostError, OSError) as error:
        return f"emulated hosts cannot be made here: {error}"
    if result.stdout.strip() != lab.address(0):
        return f"the host name resolves to {result.stdout.strip()} inside a namespace, whatever its hosts file says"
    return None


class LabError(RuntimeError):
    """The kernel or a program refused what a lab needs."""


@dataclass(frozen=True, kw_only=True)
class HostResult:
    """What one host's command left: its exit status, negative for a signal, None if it had to be ended; its output."""

    rank: int
    status: int | None
    stdout: str
    stderr: str


class HostError(RuntimeError):
    """A host's command failed, and the others were killed.  `results` holds what all had written by then."""

    def __init__(self, message: str, results: Sequence[HostResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class HostTimeout(HostError):
    """Not every host ended in time; all were killed."""


def _new_tag() -> str:
    return f"jhpt-lab-{os.getpid()}-{next(_numbers)}"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Emulated hosts, which exist while it is entered.

    Attributes:
      bits_per_s: what a host's link carries each way, headers included; None does not limit it.
      cpu: cores of each host, such as 0.5; None lets all of them compete for those of the machine.  A host never gets
        more, and hardly less where other programs keep the machine busy.
      tag: what the names of all its namespaces and control groups start with.

    Raises: InputError for hosts that this machine cannot hold; entering raises LabError or OSError where `why_not`
    gives a reason.
    """

    hosts: int
    bits_per_s: float | None = None
    cpu: float | None = None
    tag: str = field(default_factory=_new_tag)

    def __post_init__(self) -> None:
        _check(self)

    def __enter__(self) -> "Lab":
        remove_dead()
        remove(self.tag)
        try:
            _make_network(self)
            _make_groups(self)
            self.limit(self.bits_per_s)
        except BaseException:
            remove(self.tag)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self.tag)

    def host(self, rank: int) -> str:
        """The name of a host's namespace and of its control group."""
        return f"{self.tag}-h{rank}"

    @property
    def switch(self) -> str:
        """The name of the bridge's namespace."""
        return f"{self.tag}-switch"

    def address(self, rank: int) -> str:
        """Where the other hosts find it."""
        return f"{NETWORK}.{rank + 1}"

    def limit(self, bits_per_s: float | None) -> None:
        """Sets the rate of every link, each way, at once; None lifts it.

        While hosts run, let them wait for each other first: the links follow one by one, in a hundredth of a second
        for four hosts, and what waits in a queue is lost where a limit is lifted.
        """
        _check_rate(bits_per_s)
        queue = queue_discipline(bits_per_s)
        for rank in range(self.hosts):
            _batch("tc", self.host(rank), [f"qdisc replace dev eth0 root {queue}"])
        _batch("tc", self.switch, [f"qdisc replace dev port{rank} root {queue}" for rank in range(self.hosts)])

    def quota(self, cpu: float | None) -> None:
        """Sets the quota of every host at once; None gives back that of `Lab.cpu`, and `cpu` may be above it: for what
        nobody measures, such as compiling."""
        assert self.cpu is not None, "a lab without quotas"
        match = TAG.fullmatch(self.tag)
        assert match is not None
        # Inside a host there are no control groups to be seen, but through the process that made the lab there are.
        controller = cpu_controller(Path("/proc", match[1], "mounts").read_text(), Path("/proc", match[1], "root"))
        assert controller is not None
        for rank in range(self.hosts):
            for name, value in controller.quota(self.cpu if cpu is None else cpu).items():
                (controller.root / self.host(rank) / name).write_text(value)

    def run(self, command: Command, *, timeout_s: float, env: Mapping[str, str] | None = None) -> list[HostResult]:
        """Runs a command on all hosts at once, and returns what they wrote, by rank.

        Args:
          command: gives the arguments of each rank.
          timeout_s: seconds for all of them together.
          env: variables besides this process's own (without proxies, which no host can reach).

        Whatever the hosts have started is killed before it returns.

        Raises: HostError as soon as a host fails, HostTimeout if one runs too long.  A process of `jax.distributed`
        that raises does not end: it waits for the others, minutes long, unless it leaves by `os._exit`.
        """
        with TemporaryDirectory(prefix=f"{self.tag}-") as folder:
            running: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(self.hosts):
                    arguments = command(rank, self.hosts, f"{self.address(0)}:{PORT}")
                    running.append(_start(self, rank, arguments, Path(folder), _environment(env)))
                statuses = _wait(running, timeout_s)
            finally:
                _kill(running)
                _empty(self.tag)
            results = [_result(rank, status, Path(folder)) for rank, status in enumerate(statuses)]
        _raise_failures(results, timeout_s)
        return results


def _check(lab: Lab) -> None:
    assert TAG.fullmatch(lab.tag), lab.tag
    if not 1 <= lab.hosts <= MAX_HOSTS:
        raise InputError(f"hosts={lab.hosts}: between 1 and {MAX_HOSTS} hosts can be emulated")
    _check_rate(lab.bits_per_s)
    if lab.cpu is None:
        return
    cores, least = len(os.sched_getaffinity(0)), MIN_QUOTA / QUOTA_PERIOD
    if lab.cpu < least:
        raise InputError(f"cpu={lab.cpu:g}: a host needs at least {least:g} cores")
    if lab.hosts * lab.cpu > cores:
        raise InputError(
            f"hosts={lab.hosts} with cpu={lab.cpu:g} take {lab.hosts * lab.cpu:g} cores, and this machine has {cores}; "
            f"use cpu={cores / lab.hosts:g} or less"
        )


def _check_rate(bits_per_s: float | None) -> None:
    if bits_per_s is not None and not 1e4 <= bits_per_s < 1e12:
        raise InputError(f"bits_per_s={bits_per_s:g}: a link's rate is between 1e4 and 1e12 bit/s")


def queue_discipline(bits_per_s: float | None) -> str:
    """What tc(8) is to put at the sending end of a link: a token bucket, or nothing."""
    if bits_per_s is None:
        return "noqueue"
    burst = max(int(bits_per_s / 8 * BURST_S), 2 * MTU)
    return f"tbf rate {bits_per_s:.0f}bit burst {burst} limit {QUEUE + burst}"


def _make_network(lab: Lab) -> None:
    for name in (lab.switch, *map(lab.host, range(lab.hosts))):
        _call("ip", "netns", "add", name)
    _batch("ip", lab.switch, ["link add switch type bridge", "link set switch up"])
    for rank in range(lab.hosts):
        own = [
            f"link add eth0 mtu {MTU} type veth peer name port{rank} mtu {MTU} netns {lab.switch}",
            f"link set eth0 gso_max_size {PACKET}",
            f"address add {lab.address(rank)}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
        ]
        _batch("ip", lab.host(rank), own)
        tune = " && ".join(f"echo {value} >/proc/sys/net/ipv4/{name}" for name, value in TCP.items())
        _call(*_inside(lab.host(rank)), "sh", "-c", tune)
        # A library that binds the address of the host name, as Gloo does, would bind the machine's loopback.
        settings = SETTINGS / lab.host(rank)
        settings.mkdir(parents=True)
        (settings / "hosts").write_text(f"{lab.address(rank)} {socket.gethostname()}\n127.0.0.1 localhost\n")
    _batch("ip", lab.switch, [f"link set port{rank} master switch up" for rank in range(lab.hosts)])


@dataclass(frozen=True, kw_only=True)
class CpuController:
    """The kernel's CPU quotas: the folder of the root group, and the version of its files."""

    root: Path
    version: int

    def quota(self, cpu: float) -> dict[str, str]:
        """The files of a group that may use `cpu` cores, in the order to write them."""
        quota, (file, most) = f"{cpu * QUOTA_PERIOD:.0f}", WEIGHT[self.version]
        if self.version == 1:
            return {"cpu.cfs_period_us": str(QUOTA_PERIOD), "cpu.cfs_quota_us": quota, file: str(most)}
        return {"cpu.max": f"{quota} {QUOTA_PERIOD}", file: str(most)}


def cpu_controller(mounts: str, root: Path = Path("/")) -> CpuController | None:
    """The CPU controller in the text of /proc/mounts, whose paths are those below `root`.  It belongs to one hierarchy
    only, of version 1 or 2."""
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split()
        folder = root / path.lstrip("/")
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(root=folder, version=1)
        if kind == "cgroup2" and "cpu" in (folder / "cgroup.controllers").read_text().split():
            return CpuController(root=folder, version=2)
    return None


def _here() -> CpuController | None:
    return cpu_controller(Path("/proc/mounts").read_text())


def _make_groups(lab: Lab) -> None:
    if lab.cpu is None:
        return
    controller = _here()
    if controller is None:
        raise LabError("no control group hierarchy with the cpu controller is mounted, which a quota needs")
    if controller.version == 2:
        (controller.root / "cgroup.subtree_control").write_text("+cpu")
    for rank in range(lab.hosts):
        group = controller.root / lab.host(rank)
        group.mkdir()
        for name, value in controller.quota(lab.cpu).items():
            (group / name).write_text(value)


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _start(
    lab: Lab, rank: int, arguments: Sequence[str], folder: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """One host's command, its output in files: nobody has to read pipes, and children may keep them open."""
    line = [*_inside(lab.host(rank)), *arguments]
    controller = _here() if lab.cpu is not None else None
    if controller:
        # A shell joins the group and becomes the command.  Python code between fork and exec is not safe with threads.
        members = controller.root / lab.host(rank) / "cgroup.procs"
        line = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(members), *line]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return own | dict(more or {})


def _wait(running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """The status of every host once all have ended, one has failed or time is up; None for one that still runs."""
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in running]
        if all(status == 0 for status in statuses) or any(statuses) or time.monotonic() > deadline:
            return statuses
        time.sleep(POLL_S)


def _result(rank: int, status: int | None, folder: Path) -> HostResult:
    out, err = ((folder / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return HostResult(rank=rank, status=status, stdout=out, stderr=err)


def _raise_failures(results: Sequence[HostResult], timeout_s: float) -> None:
    failed = [result for result in results if result.status]
    late = [result for result in results if result.status is None]
    if failed:
        raise HostError("\n".join(_failure(result, len(results)) for result in failed), results)
    if late:
        raise HostTimeout("\n".join(_delay(result, len(results), timeout_s) for result in late), results)


def _failure(result: HostResult, hosts: int) -> str:
    status = result.status or 0
    how = (
        f"was ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
    )
    return f"host {result.rank} of {hosts} {how}{_tail(result.stderr)}"


def _delay(result: HostResult, hosts: int, timeout_s: float) -> str:
    return f"host {result.rank} of {hosts} was still running after {timeout_s:g} s{_tail(result.stderr)}"


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()[-TAIL_LINES:]
    return "; its stderr ends:" + "".join(f"\n    {line}" for line in lines) if lines else "; its stderr is empty"


def remove_dead() -> None:
    """Removes the labs of processes that are gone, which had no time to do it."""
    for tag, process in _tags().items():
        if not Path("/proc", process).exists():
            remove(tag)


def remove(tag: str) -> None:
    """Kills what runs in a lab's hosts and removes whatever there is of it."""
    _empty(tag)
    for namespace in NAMESPACES.glob(f"{tag}-*"):
        _until_gone(namespace, partial(_call, "ip", "netns", "delete", namespace.name))
    for group in _groups(tag):
        _until_gone(group, group.rmdir)
    for folder in (SETTINGS, Path(gettempdir())):
        for files in folder.glob(f"{tag}-*"):
            shutil.rmtree(files, ignore_errors=True)


def _tags() -> dict[str, str]:
    """Every lab of which there is anything, and the process that made it."""
    controller = _here()
    folders = [NAMESPACES, SETTINGS, Path(gettempdir()), *([controller.root] if controller else [])]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return {match[0]: match[1] for name in names if (match := TAG.match(name))}


def _groups(tag: str) -> list[Path]:
    controller = _here()
    return list(controller.root.glob(f"{tag}-*")) if controller else []


def _until_gone(path: Path, delete: Callable[[], object]) -> None:
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


def _kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        process.wait()


def _empty(tag: str) -> None:
    """Kills every process of a lab until there is none: those of other sessions and of dead parents too."""
    deadline = time.monotonic() + KILL_S
    while processes := _processes(tag):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(processes)} of {tag} outlive SIGKILL")
        time.sleep(POLL_S)


def _processes(tag: str) -> set[int]:
    """Whoever is in a namespace or a control group of a lab."""
    found = set()
    for group in _groups(tag):
        with contextlib.suppress(OSError):  # gone by now
            found |= set(map(int, (group / "cgroup.procs").read_text().split()))
    namespaces = {_identity(path) for path in NAMESPACES.glob(f"{tag}-*")} - {None}
    for folder in Path("/proc").glob("[0-9]*") if namespaces else ():
        if _identity(folder / "ns" / "net") in namespaces:
            found.add(int(folder.name))
    return found


def _identity(namespace: Path) -> tuple[int, int] | None:
    """What a file of a namespace stands for: the same for all of its files; None if there is no such file any more."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _batch(program: str, namespace: str, lines: Sequence[str]) -> None:
    _call(program, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def _call(*line: str, text: str = "") -> None:
    """Runs a program that configures the kernel."""
    done = subprocess.run(line, input=text, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise LabError(f"`{' '.join([*line, *text.splitlines()])}` failed: {said}")
