"""The files that a run reads, and their text."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jhpt.core.errors import InputError

PIECE_CHARS = 1 << 20
"""Text is read and tokenised in pieces of about this many characters, cut at line ends."""

JSONL = ".jsonl"
TEXT_SUFFIXES = (".txt", ".md", JSONL)
"""Suffixes of the files that are read from a folder."""

STDLIB = "stdlib"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Parts of a Python installation that are not the standard library, or not shipped everywhere."""


def find_files(path: str | Sequence[str], setting: str = "data.path") -> list[Path]:
    """The files that `data.path` (or another `setting`) names: files, globs, folders, or "stdlib".

    Raises:
      InputError: a name that matches nothing, or a named file that is empty.
    """
    names = [path] if isinstance(path, str) else list(path)
    files = [file for name in names for file in _expand(name, setting)]
    return sorted(set(files), key=str)


def _expand(name: str, setting: str) -> list[Path]:
    if name == STDLIB:
        return _stdlib_files()
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and _has_content(file)]
        remedy = f"put {', '.join(TEXT_SUFFIXES)} files there or name the files themselves"
    elif path.is_file():
        if path.stat().st_size == 0:
            raise InputError(f"{setting}={path} is empty; give a file with text")
        files, remedy = [path], ""
    else:
        files = [file for file in map(Path, glob.glob(str(path), recursive=True)) if _has_content(file)]
        remedy = f"give an existing file, folder or glob, or {setting}=stdlib"
    if not files:
        raise InputError(f"{setting}={name}: no text found; {remedy}")
    return files


def _has_content(file: Path) -> bool:
    """Whether this is a file that is not empty: not a folder of that name, and not a dangling link."""
    return file.is_file() and file.stat().st_size > 0


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # os.walk does not enter the others
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [file for file in files if _has_content(file) and _is_utf8(file)]
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
    """A hash of a file's bytes, and of whether they are read as text or as JSONL.

    Raises:
      InputError: a file that cannot be read.
    """
    try:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        remedy = "make it readable or leave it out"
        raise InputError(f"data file {file} cannot be read ({error.strerror}); {remedy}") from None
    return content + (JSONL if file.suffix == JSONL else "")


def split_files(files: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """(training, validation) files.

    The files are given in the order of their content hash.  In this order, each file that still fits into `fraction` of
    the bytes is held out, so the split does not depend on where the files lie.  If all files are larger than that, as a
    single one always is, none is held out here.
    """
    room = fraction * sum(file.stat().st_size for file in files)
    training: list[Path] = []
    held: list[Path] = []
    for file in files:
        size = file.stat().st_size
        (held if size <= room else training).append(file)
        room -= size if size <= room else 0
    return training, held


def documents(file: Path, text_key: str) -> Iterator[Iterator[str]]:
    """The documents of a file, each as an iterator of pieces: a text file is one, a .jsonl file one per line.

    Raises:
      InputError: text that is not UTF-8, a line that is not a JSON object, a line without `text_key`.
    """
    if file.suffix != JSONL:
        yield _pieces(file)
        return
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield iter([_json_text(line, text_key, f"{file}, line {number}")])


def _json_text(line: str, text_key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # too long a number, too deep a nesting
        reason = getattr(error, "msg", error)
        raise InputError(f"{place}: not valid JSON ({reason}); every line of a .jsonl file is one object") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{place}: no text under {text_key!r} (found: {keys}); set data.text_key")
    text = record[text_key]
    if not _is_unicode(text):
        raise InputError(f"{place}: the text has half of a surrogate pair (\\ud800 to \\udfff); remove it")
    return text


def _is_unicode(text: str) -> bool:
    r"""Whether UTF-8 can write the text; JSON can escape half of a surrogate pair, `"\ud800"`, which it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
