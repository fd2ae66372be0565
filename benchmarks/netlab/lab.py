"""The lab, a context manager."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from benchmarks.netlab import links, processes, quotas
from benchmarks.netlab.errors import LabError
from benchmarks.netlab.processes import HostError, HostResult
from benchmarks.netlab.remains import TAG, empty, maker, new_tag, remove, remove_dead
from benchmarks.netlab.signals import OrderlyEnd, unbroken
from jhpt.core.errors import InputError

Command = Callable[[int, int, str], Sequence[str]]
"""`(rank, hosts, "address:port" of the coordinator) -> arguments`."""


def why_not() -> str | None:
    """The reason why this machine cannot emulate hosts, as a sentence; None after a lab of one host has worked."""
    if sys.platform != "linux":
        return "emulated hosts are network namespaces, which only Linux has"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"emulated hosts need the program {program}, of the package iproute2, which is not installed"
    if os.geteuid() != 0:
        return "emulated hosts are network namespaces, which only root may make: run it as root"
    own_address = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    try:
        with Lab(hosts=1, bits_per_s=1e9, cpu=min(0.5, quotas.cores())) as lab:
            (result,) = lab.run(lambda *_: [sys.executable, "-I", "-c", own_address], timeout_s=30)
    except (InputError, LabError, HostError, OSError) as error:
        return f"emulated hosts cannot be made here: {error}"
    if result.stdout.strip() != lab.address(0):
        return f"the host name resolves to {result.stdout.strip()} inside a namespace, whatever its hosts file says"
    return None


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Emulated hosts, which exist while it is entered.

    Attributes:
      bits_per_s: rate of a host's link in each direction, headers included; None does not limit it.
      cpu: cores of each host, such as 0.5; None lets all of them compete for those of the machine.  A host never gets
        more, and hardly less if other programs keep the machine busy.  A host of up to a core stays on one core.
      shares: of `cpu`, what each host gets, such as (1, 1, 0.5, 0.5); None: all of it.
      tag: prefix of the names of all its namespaces and control groups.  A temporary folder whose name starts with the
        tag and a hyphen is removed with the lab.

    While it is entered, in the main thread, SIGTERM and SIGHUP raise `Ended` where they would end this process and
    leave the hosts running.

    Raises: InputError for hosts that this machine cannot hold; entering raises LabError or OSError where `why_not`
    gives a reason.
    """

    hosts: int
    bits_per_s: float | None = None
    cpu: float | None = None
    shares: tuple[float, ...] | None = None
    tag: str = field(default_factory=new_tag)
    _entered: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert TAG.fullmatch(self.tag), self.tag
        if not 1 <= self.hosts <= links.MAX_HOSTS:
            raise InputError(f"hosts={self.hosts}: between 1 and {links.MAX_HOSTS} hosts can be emulated")
        links.check_rate(self.bits_per_s)
        if self.cpu is not None:
            assert self.shares is None or len(self.shares) == self.hosts, self.shares
            for cpu in self._cores(self.cpu):
                quotas.check_cpu(cpu)
            # A process that only knows the tag may be a host, whose own quota says nothing about the others.
            if maker(self.tag) == os.getpid():
                quotas.check_cores(self.hosts, self.cpu, quotas.cores(), sum(self._cores(self.cpu)))

    def __enter__(self) -> "Lab":
        self._entered.enter_context(_made(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def host(self, rank: int) -> str:
        """The name of a host's namespace and of its control group."""
        return f"{self.tag}-h{rank}"

    @property
    def switch(self) -> str:
        """The name of the bridge's namespace."""
        return f"{self.tag}-switch"

    def address(self, rank: int) -> str:
        """The address under which the other hosts reach a host."""
        return links.address(rank)

    def limit(self, bits_per_s: float | None) -> None:
        """Sets the rate of every link in each direction; None lifts the limit.

        While hosts run, let them wait for each other first: the links are set one by one, which takes a hundredth of a
        second for four hosts, and packets in a queue are lost.

        Raises: InputError for a rate that no link can have; LabError where the kernel refuses.
        """
        links.check_rate(bits_per_s)
        links.limit(self.switch, self._names, bits_per_s)

    def quota(self, cpu: float | None, period: int = quotas.QUOTA_PERIOD) -> None:
        """Sets the same quota for every host; None restores those of `Lab.cpu` and `Lab.shares`.  While nothing is
        measured, such as during compilation, `cpu` may be larger.  period: microseconds over which a quota holds.

        Raises: InputError for less than the kernel's minimum; LabError for a lab without quotas, for one that is gone,
        and if the kernel refuses.
        """
        if self.cpu is None:
            raise LabError("this lab has no quotas to set: it was made without cpu")
        cores = self._cores(self.cpu) if cpu is None else [cpu] * self.hosts
        quotas.check_cpu(min(cores))
        process = maker(self.tag)
        # A host does not see the control groups; the process that made the lab does.
        controller = quotas.seen_by(process) if process is not None else None
        if controller is None:
            raise LabError(f"there are no quotas of {self.tag} (any more)")
        for host, each in zip(self._names, cores, strict=True):
            controller.limit(host, each, period)

    def run(self, command: Command, *, timeout_s: float, env: Mapping[str, str] | None = None) -> list[HostResult]:
        """Runs a command on all hosts at the same time, and returns their results by rank.

        Args:
          command: returns the arguments of each rank.
          timeout_s: seconds after which all hosts must have ended.
          env: variables besides those of this process (without proxies, which no host can reach).

        All processes that the hosts have started are killed before it returns.

        Raises: HostError as soon as a host fails, HostTimeout if one runs too long.  A process of `jax.distributed`
        that raises waits for the others for minutes, unless it ends by `os._exit`.
        """
        with TemporaryDirectory(prefix=f"{self.tag}-") as name:
            folder, running = Path(name), list[subprocess.Popen[bytes]]()
            try:
                for rank, host in enumerate(self._names):
                    line = [*links.inside(host), *command(rank, self.hosts, f"{self.address(0)}:{links.PORT}")]
                    core = None
                    if self.cpu is not None:
                        line, core = quotas.joined(host, line), quotas.core_of(rank, self._cores(self.cpu))
                    with unbroken():
                        running.append(processes.start(line, rank, folder, processes.environment(env), core))
                statuses = processes.wait(running, timeout_s)
            finally:
                processes.kill(running)
                empty(self.tag)
            results = [processes.result(rank, status, folder) for rank, status in enumerate(statuses)]
        processes.raise_failures(results, timeout_s)
        return results

    def _cores(self, cpu: float) -> list[float]:
        """Cores of every host, if a whole share has so many."""
        return [cpu * share for share in self.shares or [1.0] * self.hosts]

    @property
    def _names(self) -> list[str]:
        return [self.host(rank) for rank in range(self.hosts)]


@contextlib.contextmanager
def _made(lab: Lab) -> Iterator[None]:
    """Makes the lab's network and groups, and removes them afterwards."""
    with OrderlyEnd():
        try:
            remove_dead()
            remove(lab.tag)
            links.make_network(lab.switch, lab._names)
            if lab.cpu is not None:
                quotas.make_groups(dict(zip(lab._names, lab._cores(lab.cpu), strict=True)))
            lab.limit(lab.bits_per_s)
            yield
        finally:
            with unbroken():
                remove(lab.tag)
