"""What the lab asks of its machine: programs, quotas, signals, and what it removes; no emulated hosts run here."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from benchmarks.netlab import (
    CpuController,
    Ended,
    Lab,
    LabError,
    cpu_controller,
    queue_discipline,
    quotas,
    remains,
    why_not,
)
from benchmarks.netlab.quotas import shortest_period
from benchmarks.netlab.remains import maker, started
from benchmarks.netlab.signals import OrderlyEnd, unbroken
from jhpt import cli
from jhpt.core.errors import Exit, InputError


def test_why_not_without_the_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "emulated hosts need the program ip, of the package iproute2, which is not installed"


def test_why_not_without_root(monkeypatch, tmp_path):
    for name in ("ip", "tc"):
        program(tmp_path / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "emulated hosts are network namespaces, which only root may make: run it as root"


def test_why_not_says_what_the_kernel_said(monkeypatch, tmp_path):
    for name in ("ip", "tc"):
        program(tmp_path / name, "echo 'mount --make-shared /run/netns failed: Operation not permitted' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("benchmarks.netlab.lab.remove_dead", lambda: None)
    assert why_not().startswith("emulated hosts cannot be made here: `ip netns add jhpt-lab-")
    assert why_not().endswith("failed: mount --make-shared /run/netns failed: Operation not permitted")


def program(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "hosts=0: between 1 and 250"),
        ({"hosts": 251}, "hosts=251: between 1 and 250"),
        ({"hosts": 2, "bits_per_s": 0.0}, "bits_per_s=0: "),
        ({"hosts": 2, "cpu": 0.05}, "cpu=0.05: a host needs at least 0.1 cores"),
        ({"hosts": 2, "cpu": float("nan")}, "cpu=nan: a host needs at least 0.1 cores"),
        ({"hosts": 2, "cpu": float("inf")}, "cpu=inf: .* not infinitely many"),
        (
            {"hosts": 4, "cpu": 0.75},
            "take 3 cores, and this process may use 2 .*: let it use 3, or use cpu=0.5 or less",
        ),
        ({"hosts": 3, "cpu": 0.75}, "or use cpu=0.666 or less"),
        ({"hosts": 50, "cpu": 0.1}, "take 5 cores, .*: let it use 5, or emulate at most 20 hosts, with cpu=0.1"),
    ],
)
def test_impossible_labs_are_refused(settings, message, monkeypatch):
    monkeypatch.setattr(quotas, "cores", lambda: 2)
    with pytest.raises(InputError, match=message):
        Lab(**settings)


def test_advice_is_accepted(monkeypatch):
    monkeypatch.setattr(quotas, "cores", lambda: 2)
    Lab(hosts=3, cpu=0.666)
    Lab(hosts=20, cpu=0.1)


def test_a_host_does_not_take_its_own_quota_for_that_of_all(monkeypatch):
    """It makes a lab, too, to change links and quotas."""
    monkeypatch.setattr(quotas, "cores", lambda: 0.5)
    assert Lab(hosts=4, cpu=0.5, tag=f"jhpt-lab-{os.getppid()}-{started(os.getppid())}-0").hosts == 4


def test_quotas_that_cannot_be_set_are_refused(monkeypatch):
    monkeypatch.setattr(quotas, "cores", lambda: 2)
    with pytest.raises(LabError, match="no quotas"):
        Lab(hosts=1).quota(1.0)
    with pytest.raises(InputError, match=r"cpu=0.01: a host needs at least 0.1 cores"):
        Lab(hosts=1, cpu=0.5).quota(0.01)
    lab = Lab(hosts=1, cpu=0.5, tag=f"jhpt-lab-{os.getpid()}-{started(os.getpid()) + 1}-0")
    with pytest.raises(LabError, match=f"no quotas of {lab.tag}"):
        lab.quota(1.0)


def test_quotas_that_the_kernel_refuses_are_named(tmp_path):
    with pytest.raises(LabError, match=r"cpu=0.5: `5000 10000` cannot be written to cpu.max of no-such-group: "):
        CpuController(root=tmp_path, version=2).limit("no-such-group", 0.5)


def test_labs_of_one_process_have_tags_of_their_own():
    first, second = Lab(hosts=1), Lab(hosts=1)
    assert first.tag != second.tag
    assert Lab(hosts=1, tag=first.tag) == first


def test_buckets_hold_a_millisecond_and_what_passes_at_once():
    """At 500 Mbit/s 9,375 bytes take 150 us, 125 without the timer's delay: 600 Mbit/s.  At 100 one frame takes 721."""
    assert queue_discipline(500e6) == (
        f"tbf rate 500000000bit burst 62500 peakrate 600000000bit mtu 9375 limit {(1 << 26) + 62500}"
    )
    assert queue_discipline(100e6) == (
        f"tbf rate 100000000bit burst 18028 peakrate 103591335bit mtu 9014 limit {(1 << 26) + 18028}"
    )
    assert queue_discipline(None) == "noqueue"


def test_cpu_controller_of_either_version(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    first = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    second = f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n"
    others = "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n"
    assert cpu_controller(others + first) == CpuController(root=Path("/sys/fs/cgroup/cpu,cpuacct"), version=1)
    assert cpu_controller(others + second) == CpuController(root=tmp_path, version=2)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    assert cpu_controller(others + second) is None


def test_quota_of_half_a_core():
    assert CpuController(root=Path("/"), version=2).quota(0.5) == {"cpu.max": "5000 10000", "cpu.weight": "10000"}
    short = CpuController(root=Path("/"), version=2).quota(0.5, shortest_period(0.5))
    assert short["cpu.max"] == "1000 2000"
    assert CpuController(root=Path("/"), version=1).quota(0.5) == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "5000",
        "cpu.shares": "262144",
    }


SECOND = "0::/docker/service\n"
FIRST = "7:memory:/other\n4:cpu,cpuacct:/docker/service\n0::/another\n"


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, float("inf")),  # the root group of a machine
        ({".": "max 100000"}, float("inf")),
        ({".": "150000 100000"}, 1.5),  # of a container, from where the folders below are not to be seen
        ({"docker": "50000 100000", "docker/service": "max 100000"}, 0.5),
        ({".": "max 100000", "docker": "200000 100000", "docker/service": "20000 10000"}, 2.0),
        ({"docker": "800000 100000", "docker/service": "25000 100000", "another": "1000 100000"}, 0.25),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_cores_by_quotas_of_the_groups_above(version, limits, cores, tmp_path):
    for group, text in limits.items():
        folder = tmp_path / group
        folder.mkdir(exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{text}\n")
        else:
            quota, period = text.replace("max", "-1").split()
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert CpuController(root=tmp_path, version=version).cores(SECOND if version == 2 else FIRST) == cores


def test_cores_are_the_fewer_of_processors_and_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(quotas, "here", lambda: CpuController(root=tmp_path, version=2))
    assert quotas.cores() == 64
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert quotas.cores() == 1
    monkeypatch.setattr(quotas, "here", lambda: None)
    assert quotas.cores() == 64


def test_a_process_is_known_by_its_start():
    assert maker(Lab(hosts=1).tag) == os.getpid()
    assert maker(f"jhpt-lab-{os.getpid()}-{started(os.getpid()) - 1}-0") is None
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken its status
    assert started(process.pid) is None
    process.wait()
    assert started(process.pid) is None


def test_dead_labs_are_removed_where_the_number_lives_again(monkeypatch, tmp_path):
    for room, name in ((remains, "NAMESPACES"), (remains, "SETTINGS")):
        monkeypatch.setattr(room, name, tmp_path / name)
    monkeypatch.setattr(remains, "here", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, start = Lab(hosts=1).tag, started(os.getpid())
    dead = f"jhpt-lab-{os.getpid()}-{start - 1}-0"
    for tag in (living, dead):
        (tmp_path / f"{tag}-folder").mkdir()
    assert remains.tags() == {living, dead}
    remains.remove_dead()
    assert [path.name for path in tmp_path.iterdir()] == [f"{living}-folder"]


@pytest.fixture
def defaults():
    """SIGTERM and SIGHUP as they are in a program of its own."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_signals_are_exceptions_inside(defaults):
    with pytest.raises(Ended) as it, OrderlyEnd():
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not disturb what is put in order
    assert it.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_signals_wait_for_what_must_not_break(defaults):
    done = []
    with pytest.raises(Ended) as it, OrderlyEnd():
        with unbroken():
            with unbroken():
                signal.raise_signal(signal.SIGHUP)
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"] and it.value.code == 129


def test_signals_are_not_lost_where_exceptions_are(defaults):
    with pytest.raises(Ended) as it, OrderlyEnd(), contextlib.suppress(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert it.value.code == 143
    with OrderlyEnd():  # another one begins anew
        pass


def test_signals_of_others_are_left_to_them(defaults):
    heard = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with OrderlyEnd():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_only_the_main_thread_takes_signals(defaults):
    handlers = []

    def enter() -> None:
        with OrderlyEnd():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_a_command_that_a_signal_ended_was_interrupted(monkeypatch, capsys):
    def command(arguments: list[str]) -> int:
        raise Ended(signal.SIGTERM)

    monkeypatch.setitem(cli.COMMANDS, "doctor", command)
    assert cli.main(["doctor"]) == Exit.INTERRUPTED == 130
    assert capsys.readouterr().err == "jhpt doctor: interrupted\n"
