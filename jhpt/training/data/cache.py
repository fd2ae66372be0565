"""Token ids on disk, memory-mapped: built once, atomically, and identified by content and tokenizer.

A cache is a folder `<key>/` with `train.bin`, `validation.bin` (little-endian uint8, uint16 or uint32) and
`index.json`.  It is written under another name and renamed, so that readers never see an incomplete one.  `key` hashes
the content of every file, the tokenizer and the split.  Files are hashed again only if path, size or time have changed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.folders import cache_folder
from jhpt.training.data.corpus import digest, documents, find_files, split_files
from jhpt.training.data.tokenizer import Tokenizer

FORMAT = 3
"""Increased when the same input would give other tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Token ids of the training and the held-out text; `key` identifies their content."""

    key: str
    folder: Path
    train: np.ndarray
    validation: np.ndarray
    built: bool
    """Whether this call built it."""


BATCH_CHARS = 1 << 23
"""About this many characters are tokenised in one call, on all cores."""


def token_cache(data: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = lambda line: None) -> TokenCache:
    """The cache for this data and tokenizer, built if it does not exist, which `say` reports.

    Raises:
      InputError: missing, empty or malformed files; a damaged cache; a cache folder that cannot be written.
    """
    root = Path(os.path.expanduser(data.cache_dir)) if data.cache_dir else cache_folder() / "tokens"
    files = find_files(data.path)
    held_files = find_files(data.validation_path, "data.validation_path") if data.validation_path else None
    settings = [FORMAT, tokenizer.fingerprint, data.text_key, data.validation_fraction, held_files is None]
    try:
        root.mkdir(parents=True, exist_ok=True)
        key = _content_key(root, files, held_files or [], settings)
        with _lock(root / f"{key}.lock"):
            built = not (root / key).is_dir()
            if built:
                size = sum(file.stat().st_size for file in (*files, *(held_files or [])))
                say(f"tokenising {size / 2**20:,.1f} MiB of text, once, into {root / key}")
                # The key depends on content and not on names, so the order of the files must not depend on names
                # either.
                files = sorted(files, key=digest)
                if held_files is None:
                    files, held_files = split_files(files, data.validation_fraction)
                _build(root, key, files, sorted(held_files, key=digest), data, tokenizer)
    except OSError as error:
        raise InputError(
            f"token cache {root} cannot be used: {error}; set data.cache_dir to a writable folder"
        ) from None
    return _open(root / key, built)


def _content_key(root: Path, files: Sequence[Path], held: Sequence[Path], settings: list) -> str:
    """Hash of content and settings, stored under the files' names, sizes and times."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in (*files, *held)]
    memo = root / "seen" / _hash([stats, len(files), settings])
    if memo.is_file() and (key := memo.read_text()) and (root / key).is_dir():
        return key
    key = _hash([sorted(map(digest, files)), sorted(map(digest, held)), settings])
    memo.parent.mkdir(exist_ok=True)
    _write_atomically(memo, key)
    return key


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{_unique()}")
    partial.write_text(text)
    partial.rename(path)


def _unique() -> str:
    """A name for an unfinished file or folder.  Process ids would repeat if containers share a file system."""
    return uuid.uuid4().hex


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time on this file system; because of the rename, readers are safe even if locks do not work."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(
    root: Path, key: str, files: Sequence[Path], held: Sequence[Path], data: DataConfig, tokenizer: Tokenizer
) -> None:
    partial = root / f"{key}.{_unique()}.partial"
    partial.mkdir()
    try:
        dtype = np.dtype(np.min_scalar_type(tokenizer.vocab_size - 1))
        counts = {
            "train": _write_tokens(partial / "train.bin", files, data.text_key, tokenizer, dtype),
            "validation": _write_tokens(partial / "validation.bin", held, data.text_key, tokenizer, dtype),
        }
        if counts["train"] and not held and data.validation_fraction:
            counts = _hold_out_tail(partial, counts["train"], data.validation_fraction, dtype)
        index = {"format": FORMAT, "dtype": dtype.name, "tokens": counts, "tokenizer": tokenizer.fingerprint}
        (partial / "index.json").write_text(json.dumps(index, indent=1))
        _publish(partial, root / key)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:  # if locks do not work, another builder may have been first, whose cache is as good
        if not folder.is_dir():
            raise


def _write_tokens(path: Path, files: Iterable[Path], text_key: str, tokenizer: Tokenizer, dtype: np.dtype) -> int:
    separator = np.asarray([] if tokenizer.end is None else [tokenizer.end], dtype)
    count = 0
    with path.open("wb") as stream:
        for batch in _batches(_pieces_and_ends(files, text_key)):
            texts = iter(tokenizer.encode_batch([piece for piece in batch if piece is not None]))
            for piece in batch:
                ids = separator if piece is None else next(texts).astype(dtype)
                count += ids.size
                stream.write(ids.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    return count


def _pieces_and_ends(files: Iterable[Path], text_key: str) -> Iterator[str | None]:
    """The pieces of all documents, and None after each document."""
    for file in files:
        for document in documents(file, text_key):
            yield from document
            yield None


def _batches(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += 1 if piece is None else len(piece)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch


def _hold_out_tail(folder: Path, total: int, fraction: float, dtype: np.dtype) -> dict[str, int]:
    """Holds out the last part of the tokens, for text of which no whole file could be held out."""
    remaining = total - int(total * fraction)
    tokens = np.memmap(folder / "train.bin", dtype, mode="r")
    tokens[remaining:].tofile(folder / "validation.bin")
    os.truncate(folder / "train.bin", remaining * dtype.itemsize)
    return {"train": remaining, "validation": total - remaining}


def _open(folder: Path, built: bool) -> TokenCache:
    remedy = f"delete it (rm -r {folder}) and it is built again"
    try:
        index = json.loads((folder / "index.json").read_text())
        dtype = np.dtype(index["dtype"])
        counts = {name: int(index["tokens"][name]) for name in ("train", "validation")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"token cache {folder} has no readable index ({error!r}); {remedy}") from None
    arrays = {}
    for name, count in counts.items():
        file = folder / f"{name}.bin"
        size = file.stat().st_size if file.is_file() else 0
        if size != count * dtype.itemsize:
            raise InputError(
                f"token cache {file} holds {size} bytes where its index says {count * dtype.itemsize}; {remedy}"
            )
        arrays[name] = np.memmap(file, dtype, mode="r") if count else np.zeros(0, dtype)
    return TokenCache(key=folder.name, folder=folder, built=built, **arrays)
