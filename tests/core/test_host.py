"""Memory of a host: no more than its container may have."""

import os

import pytest

from jhpt.core.host import host_memory

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
