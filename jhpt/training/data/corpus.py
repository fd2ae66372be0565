"""Which files a run reads, and their text."""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jhpt.core.errors import InputError

PIECE_CHARS = 1 << 20
"""Text is read and tokenised in pieces of about this many characters, cut at line ends."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
"""What a folder contributes."""

STDLIB = "stdlib"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Parts of a Python installation that are not the standard library, or not shipped everywhere."""


def find_files(path: str | Sequence[str]) -> list[Path]:
    """The files that `data.path` names: files, globs, folders, or "stdlib".

    Raises:
      InputError: a name that matches nothing, or a named file that is empty.
    """
    names = [path] if isinstance(path, str) else list(path)
    files = [file for name in names for file in _expand(name)]
    return sorted(set(files), key=str)


def _expand(name: str) -> list[Path]:
    if name == STDLIB:
        return _stdlib_files()
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.stat().st_size]
        remedy = f"put {', '.join(TEXT_SUFFIXES)} files there or name the files themselves"
    elif path.is_file():
        if path.stat().st_size == 0:
            raise InputError(f"data file {path} is empty; give a file with text")
        files, remedy = [path], ""
    else:
        files = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [file for file in files if file.is_file() and file.stat().st_size]
        remedy = "give an existing file, folder or glob, or data.path=stdlib"
    if not files:
        raise InputError(f"data.path={name}: no text found; {remedy}")
    return files


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if not SKIPPED_FOLDERS & set(file.relative_to(root).parts)]
    files = [file for file in files if file.stat().st_size and _is_utf8(file)]
    if not files:
        raise InputError(f"this Python ships no source of its standard library in {root}; give data.path=FILE")
    return files


def _is_utf8(file: Path) -> bool:
    """A few standard-library modules declare other encodings on purpose."""
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def digest(file: Path) -> str:
    """Hash of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def split_files(files: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """(training, validation) files.

    Files are held out in the order of their content hash until `fraction` of the bytes is reached, so the split does
    not depend on where the files lie; with one file or fraction 0 nothing is held out here.
    """
    target = fraction * sum(file.stat().st_size for file in files)
    held, size = [], 0
    for file in sorted(files, key=digest):
        if size >= target or len(held) == len(files) - 1:
            break
        held.append(file)
        size += file.stat().st_size
    return [file for file in files if file not in set(held)], held


def documents(file: Path, text_key: str) -> Iterator[Iterator[str]]:
    """The documents of a file, each as an iterator of pieces: a text file is one, a .jsonl file one per line.

    Raises:
      InputError: text that is not UTF-8, a line that is not a JSON object, a line without `text_key`.
    """
    if file.suffix != ".jsonl":
        yield _pieces(file)
        return
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield iter([_json_text(line, text_key, f"{file}, line {number}")])


def _json_text(line: str, text_key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg}); every line of a .jsonl file is one object") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{place}: no text under {text_key!r} (found: {keys}); set data.text_key")
    return record[text_key]


def _pieces(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            while piece := stream.read(PIECE_CHARS):
                yield piece + stream.readline()
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as stream:
            yield from stream
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def _not_utf8(file: Path) -> InputError:
    offset = 0
    try:
        file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start
    return InputError(f"data file {file} is not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out")
