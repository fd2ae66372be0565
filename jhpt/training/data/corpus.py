"""The files that a run reads: found by name, told apart and split by content."""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from jhpt.core.errors import InputError
from jhpt.core.text_files import read_text, tree_of
from jhpt.training.data.formats import format_of, is_data

FOLDER_SUFFIXES = ".txt, .md, .jsonl (also with .gz or .zst) or .parquet"
"""Files that are read from a folder, in words."""

SPLITS, DATASET = "dataset_dict.json", ("dataset_info.json", "state.json")
"""What Hugging Face's `save_to_disk` writes: a folder of splits has the one, a data set the other two."""

TRAIN = "train"
"""The split that is read of a folder of splits."""

STDLIB = "stdlib"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Parts of a Python installation that are not the standard library, or not shipped everywhere."""

GENERATED = re.compile(
    rb"gencodec|auto-?generated|automatically generated|file is generated|configuration generated", re.I
)
HEAD = 1_000
"""What generated modules say in their first so many bytes."""

ENTRIES, TABLE = (b"0x", b"',\n", b'",\n'), 0.45
"""What entries of tables contain, and how many a line make a module a table (locale.py's aliases: 0.48)."""


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
        files = _files_in(path, setting)
        remedy = f"put {FOLDER_SUFFIXES} files there or name the files themselves"
    elif path.is_file():
        if path.stat().st_size == 0:
            raise InputError(f"{setting}={path} is empty; give a file with text")
        files, remedy = [path], ""
    else:
        found = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [file for file in found if _has_content(file)]
        files += [file for folder in found if _is_dataset(folder) for file in _files_in(folder, setting)]
        remedy = f"give an existing file, folder or glob, or {setting}=stdlib"
    if not files:
        raise InputError(f"{setting}={name}: no text found; {remedy}")
    for file in files:
        format_of(file)
    return files


def _files_in(folder: Path, setting: str) -> list[Path]:
    """The data files of a folder at any depth; of a data set that was saved to disk, those that it names."""
    files: list[Path] = []
    for place, inner, names in os.walk(folder):
        if SPLITS in names:
            if TRAIN not in inner:
                raise InputError(
                    f"{setting}={place} is a folder of splits without {TRAIN!r}; name one of its sub-folders: "
                    f"{', '.join(sorted(inner))}"
                )
            inner[:] = [TRAIN]
        elif _is_dataset(Path(place)):
            inner.clear()
            files += _dataset_files(Path(place))
        else:
            files += [file for name in names if is_data(file := Path(place, name)) and _has_content(file)]
    return files


def _is_dataset(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or all((folder / name).is_file() for name in DATASET)


def _dataset_files(folder: Path) -> list[Path]:
    try:
        state = tree_of(read_text(folder / "state.json"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
        selected = state.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"the data set {folder} has no readable state.json ({error!r}); save it again with save_to_disk"
        ) from None
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise InputError(f"the data set {folder} lacks {', '.join(missing) or 'data files'}; save or copy it again")
    if selected:
        raise InputError(f"the data set {folder} is a selection of its rows; save it again after flatten_indices()")
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
    files = [file for file in files if _has_content(file) and _is_source(file.read_bytes())]
    if not files:
        raise InputError(f"this Python ships no source of its standard library in {root}; give data.path=FILE")
    return files


def _is_source(content: bytes) -> bool:
    """Whether people wrote this, in UTF-8: a few modules declare other encodings on purpose, and about a hundred
    are tables that a program has written, such as code pages, of which one tells most of another."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    entries = sum(content.count(mark) for mark in ENTRIES)
    return not GENERATED.search(content, 0, HEAD) and entries < TABLE * content.count(b"\n")


def digest(file: Path) -> str:
    """A hash of a file's bytes, and of the format in which they are read.

    Raises:
      InputError: a file that cannot be read.
    """
    try:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        remedy = "make it readable or leave it out"
        raise InputError(f"data file {file} cannot be read ({error.strerror}); {remedy}") from None
    return content + format_of(file).tag


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
