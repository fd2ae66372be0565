"""Shards: token ids in files, written one by one and read as one sequence."""

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from jhpt.training.data.documents import Part, read
from jhpt.training.data.tokenizer import Tokenizer

BATCH_CHARS = 1 << 22
"""About this many characters are tokenised in one call, by the threads of the tokenizer."""

BATCH_CHARS_ALONE = 1 << 20
"""As many where there is one thread: the tokenizers library takes about 200 bytes for each until the call returns."""

OPEN_SHARDS = 64
"""Shards of a sequence that are mapped at a time, because each takes a file descriptor."""

UNFINISHED = ".unfinished"
"""Suffix of what is still being written."""


class Tokens:
    """Token ids [n] that lie in several files of little-endian integers.  Files are mapped into memory when they are
    read."""

    def __init__(self, shards: Mapping[Path, int], dtype: np.dtype, first: int = 0, last: int | None = None):
        """shards: files with their numbers of ids.  first, last: the range of the whole sequence that this one is."""
        self._counts = {file: count for file, count in shards.items() if count}
        self._files, self._ends = list(self._counts), np.cumsum([0, *self._counts.values()])
        self.dtype, self._first = dtype, first
        self.size: int = (int(self._ends[-1]) if last is None else last) - first
        self._mapped = lru_cache(OPEN_SHARDS)(lambda shard: np.memmap(self._files[shard], dtype, mode="r"))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        """The ids of a range, in memory only where it crosses files."""
        start, stop, step = part.indices(self.size)
        assert step == 1, "a sequence of tokens is read in ranges"
        return self._read(start + self._first, max(stop, start) + self._first)

    def _read(self, start: int, stop: int) -> np.ndarray:
        pieces = [np.empty(0, self.dtype)]
        shard = int(np.searchsorted(self._ends, start, "right")) - 1
        while start < stop:
            end = int(min(stop, self._ends[shard + 1]))
            pieces.append(self._mapped(shard)[start - self._ends[shard] : end - self._ends[shard]])
            start, shard = end, shard + 1
        return pieces[-1] if len(pieces) <= 2 else np.concatenate(pieces)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def split(self, at: int) -> tuple["Tokens", "Tokens"]:
        """The first `at` ids, and the others."""
        middle, last = self._first + at, self._first + self.size
        return (
            Tokens(self._counts, self.dtype, self._first, middle),
            Tokens(self._counts, self.dtype, middle, last),
        )


def write_shard(
    path: Path,
    parts: Iterable[Part],
    text_key: str,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    batch_chars: int = BATCH_CHARS,
) -> None:
    """Writes the ids of these parts; the file has its name only when it is complete and on the disk.

    Args:
      batch_chars: characters that are tokenised in one call, on which nothing depends but time and memory.

    Raises:
      InputError: as `documents.read`.
    """
    separator = np.asarray([] if tokenizer.end is None else [tokenizer.end], dtype)
    # Process ids would repeat if containers share a file system.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
    try:
        with partial.open("wb") as stream:
            for batch in _batches((piece for part in parts for piece in read(part, text_key)), batch_chars):
                texts = iter(tokenizer.encode_batch([piece for piece in batch if piece is not None]))
                for piece in batch:
                    stream.write((separator if piece is None else next(texts).astype(dtype)).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _batches(pieces: Iterable[str | None], chars: int) -> Iterator[Sequence[str | None]]:
    batch: list[str | None] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += 1 if piece is None else len(piece)
        if size >= chars:
            yield batch
            batch, size = [], 0
    yield batch
