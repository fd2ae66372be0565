"""Emulated hosts: what runs in them, what is said when it fails, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import pytest

from benchmarks.netlab import (
    HostError,
    HostTimeout,
    Lab,
    LabError,
    cpu_controller,
    links,
    quotas,
    remains,
    why_not,
)
from benchmarks.netlab.remains import started


@pytest.fixture(scope="module")
def emulation() -> None:
    """Skips where hosts cannot be emulated."""
    if reason := why_not():
        pytest.skip(reason)


needs_emulation = pytest.mark.usefixtures("emulation")


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def shell(code: str) -> list[str]:
    return ["sh", "-c", code]


def traces(tag: str) -> list[str]:
    """Namespaces, files, control groups and processes of a lab."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    controller = cpu_controller(Path("/proc/mounts").read_text())
    folders = [Path("/etc/netns"), Path(gettempdir()), *([controller.root] if controller else [])]
    files = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if tag in path.name]
    running = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if tag in read(path)]
    return [name for name in listed if tag in name] + files + running


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a process that has ended
        return ""


def disciplines(lab: Lab) -> dict[str, str]:
    """The kind and, of a token bucket, the rate at both ends of every link."""
    endpoints = {f"{lab.host(rank)} eth0" for rank in range(lab.hosts)}
    endpoints |= {f"{lab.switch} port{rank}" for rank in range(lab.hosts)}
    kinds = {}
    for namespace, device in map(str.split, endpoints):
        line = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
        words = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        kinds[f"{namespace} {device}"] = words[words.index("rate") + 1] if "rate" in words else words[1]
    return kinds


NEIGHBOUR = """
import socket, sys, time
server = socket.create_server(("", 7000))
while True:
    try:
        client = socket.create_connection((sys.argv[1], 7000), timeout=10)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
peer, (address, _) = server.accept()
client.sendall(b"x")
assert peer.recv(1) == b"x"
print(socket.gethostbyname(socket.gethostname()), address)
"""


@needs_emulation
def test_hosts_see_each_other_by_address():
    with Lab(hosts=3, bits_per_s=1e9) as lab:
        results = lab.run(lambda rank, hosts, _: python(NEIGHBOUR, lab.address((rank + 1) % hosts)), timeout_s=30)
    assert [result.stdout.split() for result in results] == [
        [lab.address(0), lab.address(2)],
        [lab.address(1), lab.address(0)],
        [lab.address(2), lab.address(1)],
    ]


@needs_emulation
def test_every_host_has_its_own_output(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with Lab(hosts=2) as lab:
        for word in ("first", "second"):  # a lab may run several commands
            results = lab.run(
                lambda rank, hosts, coordinator: shell(
                    f"echo {rank} {hosts} {coordinator} $WORD $HTTP_PROXY; echo err{rank} >&2"
                ),
                timeout_s=30,
                env={"WORD": word},
            )
            assert [result.stdout for result in results] == [f"{rank} 2 10.77.0.1:5599 {word}\n" for rank in range(2)]
            assert [result.stderr for result in results] == ["err0\n", "err1\n"]
            assert [(result.rank, result.status) for result in results] == [(0, 0), (1, 0)]


@needs_emulation
def test_failing_host_ends_the_others():
    def command(rank: int, hosts: int, coordinator: str) -> list[str]:
        return shell("sleep 0.2; echo no such corpus >&2; exit 3" if rank == 1 else "echo began; setsid sleep 600")

    with Lab(hosts=3) as lab:
        with pytest.raises(
            HostError, match=r"host 1 of 3 exited with status 3; its stderr ends:\n    no such corpus"
        ) as it:
            lab.run(command, timeout_s=30)
        assert "host 0" not in str(it.value) and "host 2" not in str(it.value)
        assert [result.status for result in it.value.results] == [None, 3, None]
        assert [result.stdout for result in it.value.results] == ["began\n", "", "began\n"]
        assert remains.processes(lab.tag) == set()


@needs_emulation
def test_signals_and_missing_programs_are_failures():
    with Lab(hosts=1) as lab:
        with pytest.raises(HostError, match=r"host 0 of 1 was ended by signal 11 \(.+\); its stderr is empty"):
            lab.run(lambda *_: shell("kill -SEGV $$"), timeout_s=30)
        with pytest.raises(HostError, match="no-such-program"):
            lab.run(lambda *_: ["no-such-program"], timeout_s=30)


@needs_emulation
def test_time_out_ends_all():
    def command(rank: int, hosts: int, coordinator: str) -> list[str]:
        return shell("true" if rank == 0 else "echo waiting >&2; setsid sleep 600 & sleep 600")

    with Lab(hosts=2) as lab:
        with pytest.raises(HostTimeout, match=r"host 1 of 2 was still running after 0.5 s; .*\n    waiting$") as it:
            lab.run(command, timeout_s=0.5)
        assert [result.status for result in it.value.results] == [0, None]
        assert remains.processes(lab.tag) == set()


@needs_emulation
def test_what_a_host_leaves_running_is_ended():
    with Lab(hosts=1, cpu=0.5) as lab:
        lab.run(lambda *_: shell("setsid sleep 600 &"), timeout_s=30)
        assert remains.processes(lab.tag) == set()


@needs_emulation
def test_nothing_is_left_after_an_exception():
    with pytest.raises(ZeroDivisionError), Lab(hosts=2, bits_per_s=1e8, cpu=0.25) as lab:
        assert len(traces(lab.tag)) == 3 + 2 + 2  # namespaces, hosts files, control groups
        raise ZeroDivisionError
    assert traces(lab.tag) == []


@needs_emulation
def test_nothing_is_left_of_a_lab_that_could_not_be_made(monkeypatch):
    monkeypatch.setattr(links, "queue_discipline", lambda rate: "no-such-discipline")
    lab = Lab(hosts=2, cpu=0.25)
    with pytest.raises(LabError, match="root no-such-discipline` failed: "), lab:
        pass
    assert traces(lab.tag) == []


HEEDING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
"""What nohup, and a shell's background jobs, have their children ignore."""

BENCHMARK = """
from benchmarks.netlab import Lab
with Lab(hosts=2, bits_per_s=1e8, cpu=0.25) as lab:
    lab.run(lambda *_: ["sh", "-c", f"echo {lab.tag} >&2; touch $BEGAN; sleep 600"], timeout_s=600)
"""


@needs_emulation
@pytest.mark.parametrize(
    ("blow", "status"),
    [
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_run_that_was_ended(blow, status, tmp_path):
    """What can be caught is cleaned up after at once, by itself; what a killed run leaves, by the next lab."""
    began = tmp_path / "began"
    process = subprocess.Popen(
        python(HEEDING + BENCHMARK), env=os.environ | {"BEGAN": str(began)}, stderr=subprocess.DEVNULL
    )
    tag = f"jhpt-lab-{process.pid}-{started(process.pid)}-0"
    try:
        wait_for(began, process)
        assert len(traces(tag)) >= 3 + 2 + 2 + 1 + 1  # and the folder of outputs, and the first process
    finally:
        process.send_signal(blow)
        if blow in (signal.SIGTERM, signal.SIGHUP):
            process.send_signal(blow)  # once more, as timeout(1) does
        assert process.wait(timeout=30) == status
    if blow == signal.SIGKILL:
        with Lab(hosts=1):
            pass
    assert traces(tag) == []


def wait_for(file: Path, process: subprocess.Popen) -> None:
    while not file.exists():
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)


@needs_emulation
def test_leftovers_of_the_same_tag_are_replaced():
    old = Lab(hosts=3, bits_per_s=1e8, cpu=0.25)
    old.__enter__()
    with Lab(hosts=2, tag=old.tag) as lab:
        assert len(traces(lab.tag)) == 3 + 2
        assert len(lab.run(lambda *_: ["true"], timeout_s=30)) == 2
    assert traces(old.tag) == []
    old.__exit__(None, None, None)


@needs_emulation
def test_folders_of_the_tag_go_with_the_lab():
    with Lab(hosts=1) as lab:
        folder = TemporaryDirectory(prefix=f"{lab.tag}-", ignore_cleanup_errors=True)
        Path(folder.name, "file").touch()
        assert len(traces(lab.tag)) == 2 + 1 + 1  # namespaces, a hosts file and this
    assert traces(lab.tag) == []
    folder.cleanup()


@needs_emulation
def test_links_are_limited_both_ways():
    with Lab(hosts=2, bits_per_s=5e8) as lab:
        assert set(disciplines(lab).values()) == {"500Mbit"}
        lab.limit(1e8)
        assert set(disciplines(lab).values()) == {"100Mbit"}
        lab.limit(None)
        assert set(disciplines(lab).values()) == {"noqueue"}


SENDER = """
import socket, sys
server = socket.create_server(("", 7000)) if len(sys.argv) == 1 else None
if server:
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
for address in sys.argv[1:]:
    client = socket.socket()
    while client.connect_ex((address, 7000)):
        pass
    client.sendall(bytes(1 << 18))
    client.shutdown(socket.SHUT_WR)
    client.recv(1)
"""


def sent(lab: Lab, rank: int) -> list[int]:
    """Bytes of the classes of a host's queue, those to host 0 first."""
    line = ["tc", "-s", "-n", lab.host(rank), "class", "show", "dev", "eth0"]
    words = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
    found = {words[at + 2]: int(words[words.index("Sent", at) + 1]) for at, word in enumerate(words) if word == "class"}
    return [found[f"2:{peer + 1:x}"] for peer in range(lab.hosts)]


@needs_emulation
def test_packets_to_different_hosts_take_turns():
    """They wait in queues of their own, also after the rate has changed.  A collective permute from host to host, each
    of which has to tell the one before that it is ready while it sends to the next, took 8.2 ms instead of 5.2 by the
    rate."""
    with Lab(hosts=3, bits_per_s=5e8) as lab:
        for rate in (1e8, 1e9):
            lab.limit(rate)
            peers = [lab.address(1), lab.address(2)]
            lab.run(lambda rank, *_, peers=peers: python(SENDER, *peers) if rank == 0 else python(SENDER), timeout_s=30)
            assert [size >= 1 << 18 for size in sent(lab, 0)] == [False, True, True]
            assert [size > 0 for size in sent(lab, 1)] == [True, False, False]


@needs_emulation
def test_a_host_can_limit_the_links():
    code = "import sys; from benchmarks.netlab import Lab; Lab(hosts=2, tag=sys.argv[1]).limit(2e9)"
    with Lab(hosts=2) as lab:
        lab.run(lambda rank, *_: python(code, lab.tag) if rank == 0 else ["true"], timeout_s=30)
        assert set(disciplines(lab).values()) == {"2Gbit"}


@needs_emulation
def test_hosts_of_a_part_of_a_core_stay_on_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert [quotas.core_of(rank, [0.5] * 4) for rank in range(4)] == [3, 5, 3, 5]
    assert [quotas.core_of(rank, [1.0] * 2) for rank in range(2)] == [3, 5]
    # Three hosts of 0.6 do not fit on two cores without moving, nor does a host of more than a core on one.
    assert quotas.core_of(0, [0.6] * 3) is None and quotas.core_of(0, [1.5]) is None
    assert [quotas.core_of(rank, [0.6, 0.6, 0.3, 0.3]) for rank in range(4)] == [3, 5, 3, 5]


def test_hosts_run_in_their_quotas():
    controller = cpu_controller(Path("/proc/mounts").read_text())
    with Lab(hosts=2, cpu=0.25) as lab:
        results = lab.run(lambda *_: ["cat", "/proc/self/cgroup"], timeout_s=30)
        assert all(f"/{lab.host(result.rank)}\n" in result.stdout for result in results)
        for name, value in controller.quota(0.25).items():
            assert (controller.root / lab.host(1) / name).read_text().strip() == value


@needs_emulation
def test_a_host_can_change_the_quotas():
    code = "import sys; from benchmarks.netlab import Lab; Lab(hosts=2, cpu=0.25, tag=sys.argv[1]).quota({})"
    controller = cpu_controller(Path("/proc/mounts").read_text())
    with Lab(hosts=2, cpu=0.25) as lab:
        for given, cores in (("1.0", 1.0), ("None", 0.25)):
            lab.run(
                lambda rank, *_, given=given: python(code.format(given), lab.tag) if rank else ["true"], timeout_s=30
            )
            for name, value in controller.quota(cores).items():
                assert (controller.root / lab.host(0) / name).read_text().strip() == value


PSUM = """
import sys, jax, jax.numpy as jnp
rank, hosts, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(coordinator, hosts, rank)
mesh = jax.make_mesh((hosts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
x = jax.make_array_from_callback((hosts,), sharding, lambda _: jnp.full((1,), rank + 1.0))
total = jax.jit(jnp.sum, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))(x)
from jhpt.measure.hosts import hosts as by_host
places = by_host()
print("sum", float(total.addressable_data(0)), "nodes", *places.nodes, "on this machine", places.nodes_here)
"""


@needs_emulation
def test_jax_adds_up_over_two_hosts():
    """They share a kernel, and are two nodes all the same."""
    with Lab(hosts=2, bits_per_s=1e9) as lab:
        results = lab.run(
            lambda rank, hosts, coordinator: python(PSUM, rank, hosts, coordinator),
            timeout_s=120,
            env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        )
    assert [result.stdout.splitlines()[-1] for result in results] == 2 * ["sum 3.0 nodes (0,) (1,) on this machine 2"]
