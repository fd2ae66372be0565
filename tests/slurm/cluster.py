"""SLURM on one machine: munged, slurmctld and four slurmd out of a temporary folder, all ended afterwards.

A node is a slurmd with a port and a loopback address of its own.  Nodes are named by these addresses, so no name
service is needed.  Each has a "GPU" (/dev/null), so that scripts that ask for GPUs run as they are.  SLURM itself runs
as root, without accounting and cgroups.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = 4
SYSTEM = "/usr/sbin:/sbin:/usr/bin:/bin"

CONFIGURATION = """
ClusterName=one-machine
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdTimeout=3
MessageTimeout=3
TCPTimeout=2
KillWait=3
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""Short times, so that a lost node is noticed in seconds.  A job that is queued again waits for cred_expire."""


def missing() -> str | None:
    """Why SLURM cannot be run here; None: it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=SYSTEM) is None]
    if absent:
        return f"{', '.join(absent)} not found; on Debian: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root here"


def until(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Waits; what: says why it took too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


class Cluster:
    """The daemons, and commands that talk to them."""

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self.folder = folder
        self.nodes = [f"127.0.{os.getpid() % 250 + 1}.{number}" for number in range(1, NODES + 1)]
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        ports = free_ports(NODES + 1)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr={node} Port={port} CPUs=2 Gres=gpu:1"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, ports=ports, nodes=nodes))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in places.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        until((self.folder / "munge.socket").exists, 10, self.logs)
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        self.repair()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def stop(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired, subprocess.CalledProcessError):
            self.command("scancel", "--user=root")
            until(lambda: not self.command("squeue", "--noheader"), 15, self.logs)
        for node in self.nodes:
            self.kill(node)
        for name in ("slurmctld", "munged"):
            if (daemon := self._daemons.get(name)) is not None:
                daemon.terminate()
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()

    def repair(self) -> None:
        """Starts nodes that are not running, and waits until all are idle."""
        for node in self.nodes:
            if node not in self._daemons:
                self._start(node, ["slurmd", "-D", "-N", node])

        def idle() -> bool:
            return self.command("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * NODES

        until(idle, 30, self.logs)

    def kill(self, node: str) -> None:
        """As if the node had lost its power: slurmd, its slurmstepd, and all tasks end at once."""
        if (daemon := self._daemons.pop(node, None)) is None:
            return
        tasks = [pid for pid in processes() if f"SLURMD_NODENAME={node}" in environment_of(pid)]
        steps = {pid for pid in map(parent_of, tasks) if pid and name_of(pid).startswith("slurmstepd")}
        for pid in (daemon.pid, *steps, *tasks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def command(self, *words: str, seconds: float = 60, cwd: Path | None = None) -> str:
        """Runs a command that has to succeed; returns what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=seconds, cwd=cwd or self.folder
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows about a job: JobState, ExitCode, Restarts, BatchHost, NodeList and so on."""
        words = self.command("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def logs(self) -> str:
        """For a failure."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)


@contextmanager
def running(folder: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    cluster = Cluster(folder, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    with_port = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in with_port]
    for listening in with_port:
        listening.close()
    return ports


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def environment_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []


def name_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
