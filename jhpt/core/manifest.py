"""Manifests: the size and digest of every file in a folder, so that a flipped bit or a missing file is noticed.

`manifest.json` is written last, when everything that it names is on the disk.  The digests are SHA-256, which
`sha256sum` prints, too.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jhpt.core.text_files import read_text

MANIFEST = "manifest.json"

PARTIAL = ".partial"
"""Suffix of a file that is being written."""

THREADS = 4
"""That read files at a time."""


def files_of(folder: Path) -> Iterator[Path]:
    """All files below a folder but its manifest and what is being written, in the order of their names."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != PARTIAL)
    yield from sorted(path for path in files if path != folder / MANIFEST)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Brings all files and folders below `folder` to the disk, then writes their manifest."""
    files = list(files_of(folder))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(to_disk, files))
        digests = list(pool.map(file_digest, files))
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    for below in sorted(path for path in folder.rglob("*") if path.is_dir()):
        to_disk(below)
    write_to_disk(folder / MANIFEST, json.dumps({"files": entries}, indent=1))


def manifest_faults(folder: Path) -> list[str]:
    """What differs from the manifest, a line for each file; files that it does not name count, too."""
    try:
        entries = json.loads(read_text(folder / MANIFEST))["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"]
    there = {path.relative_to(folder).as_posix(): path for path in files_of(folder)}
    faults = [f"{name} is missing" for name in expected.keys() - there.keys()]
    faults += [f"{name} is not in the manifest" for name in there.keys() - expected.keys()]
    both = sorted(expected.keys() & there.keys())
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _fault(there[name], *expected[name]), both)
        faults += [f"{name} {fault}" for name, fault in zip(both, found, strict=True) if fault]
    return sorted(faults)


def _fault(path: Path, size: int, digest: str) -> str | None:
    try:
        if (found := path.stat().st_size) != size:
            return f"has {found:,} bytes instead of {size:,}"
        return None if file_digest(path) == digest else "has other bytes than were written"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_to_disk(path: Path, text: str) -> None:
    """Writes a file that is there whole, or not at all, also after a power failure."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    to_disk(path.parent)
