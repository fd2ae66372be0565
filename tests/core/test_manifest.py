"""A manifest notices every change of any file, and a folder that has none."""

import hashlib
import os
import random

import pytest

from jhpt.core.manifest import MANIFEST, manifest_faults, write_manifest


@pytest.fixture
def folder(tmp_path):
    rng = random.Random(0)
    for name, size in (("a", 1), ("b/c", 300), ("b/d/e", 4097), ("empty", 0)):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))
    write_manifest(tmp_path / "folder")
    return tmp_path / "folder"


def test_what_was_written_is_whole(folder):
    assert manifest_faults(folder) == []
    (folder / "later.partial").write_text("being written")
    assert manifest_faults(folder) == []


def test_digests_are_those_of_sha256sum(folder):
    assert hashlib.sha256((folder / "b/c").read_bytes()).hexdigest() in (folder / MANIFEST).read_text()


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_noticed(folder, seed):
    rng = random.Random(seed)
    path = rng.choice([folder / name for name in ("a", "b/c", "b/d/e")])
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    assert manifest_faults(folder) == [f"{path.relative_to(folder)} has other bytes than were written"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: os.truncate(folder / "b/c", 299), "b/c has 299 bytes instead of 300"),
        (lambda folder: (folder / "empty").unlink(), "empty is missing"),
        (lambda folder: (folder / "new").write_text("x"), "new is not in the manifest"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"a": 3}}'), "manifest.json cannot be read"),
    ],
)
def test_every_other_change_is_named(folder, change, fault):
    change(folder)
    assert len(found := manifest_faults(folder)) == 1 and found[0].startswith(fault)
