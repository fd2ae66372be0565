"""Memory of a host: no more than its container may have; and how hosts are told from each other."""

import os

import pytest

from jhpt.core.host import available_memory, host_identity, host_memory, machine_identity

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30


def written(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/pod/box\n", {"pod/box/memory.max": "max\n", "pod/memory.max": f"{GIB}\n"}, GIB),
        ("0::/pod/box\n", {"pod/box/memory.max": f"{GIB}\n", "pod/memory.max": f"{2 * GIB}\n"}, GIB),
        ("0::/\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("0::/of/the/host\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("5:cpu,io:/box\n4:memory:/box\n0::/\n", {"memory/box/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
    ],
)
def test_a_container_has_what_it_may_have(tmp_path, groups, files, expected):
    folder = written(tmp_path / "groups", files)
    membership = tmp_path / "own"
    membership.write_text(groups)
    assert host_memory(folder, membership) == expected


def test_what_cannot_be_read_limits_nothing(tmp_path):
    assert host_memory(tmp_path / "nothing", tmp_path / "nothing") == MACHINE


def test_what_nobody_uses_is_available(tmp_path):
    """Of the machine, and of every group with a limit; cached files count as unused."""
    (tmp_path / "own").write_text("0::/pod/box\n")
    (tmp_path / "memory").write_text(f"MemTotal: 9 kB\nMemAvailable: {3 << 20} kB\n")
    free = lambda: available_memory(tmp_path / "groups", tmp_path / "own", tmp_path / "memory")  # noqa: E731
    assert free() == min(3 * GIB, MACHINE)
    limits = {"pod/memory.max": f"{GIB}\n", "pod/box/memory.max": "max\n", "pod/box/memory.current": f"{9 * GIB}\n"}
    written(tmp_path / "groups", limits | {"pod/memory.current": f"{GIB // 2}\n"})
    assert free() == GIB // 2, "a group without a limit has all that its machine has"
    written(tmp_path / "groups", {"pod/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n"})
    assert free() == 3 * GIB // 4
    written(tmp_path / "groups", {"pod/memory.current": f"{2 * GIB}\n"})
    assert free() == 0
    (tmp_path / "own").write_text("4:memory:/box\n")
    old = {"limit_in_bytes": f"{GIB}\n", "usage_in_bytes": "1000\n", "stat": "total_inactive_file 600\n"}
    written(tmp_path / "groups", {f"memory/box/memory.{name}": text for name, text in old.items()})
    assert free() == GIB - 400
    assert 0 < available_memory() <= host_memory()


def test_hosts_are_told_by_name_kernel_and_network(tmp_path, monkeypatch):
    """Emulated hosts differ in their network alone, and so share a machine; files that are missing tell nothing."""
    boot, network, other = (tmp_path / name for name in ("boot", "network", "other"))
    for file in (boot, network, other):
        file.write_text("1\n")
    machine, host = machine_identity(boot), host_identity(boot, network)
    assert host_identity(boot, network) == host != machine == machine_identity(boot)
    assert host_identity(boot, other) != host
    boot.write_text("2\n")
    assert machine_identity(boot) != machine and host_identity(boot, network) != host
    missing = tmp_path / "none"
    assert machine_identity(missing) == machine_identity(missing) != machine
    monkeypatch.setattr("platform.node", lambda: "another")
    assert machine_identity(missing) != machine and 0 <= host_identity(missing, missing) < 1 << 64
    assert host_identity() == host_identity()
