"""Bytes of a file as a stream: a range of it, or what gzip or zstd has compressed; never a whole file in memory."""

import codecs
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jhpt.core.errors import InputError
from jhpt.training.data.formats import COMPRESSIONS, format_of

BLOCK = 1 << 16
"""Bytes that are read at once."""


@contextmanager
def opened(file: Path, first: int = 0, last: int | None = None) -> Iterator[BinaryIO]:
    """The text of a file as bytes, decompressed, for as long as the context is open.

    Args:
      first, last: a range of bytes; last None: to the end.  Only of files that are not compressed.

    Raises:
      InputError: while it is read: compressed data that is damaged or cut short, bytes that are not UTF-8.
    """
    compression = format_of(file).compression
    try:
        with file.open("rb") as stream:
            if compression == ".gz":
                yield gzip.GzipFile(fileobj=stream)  # type: ignore[misc]
            elif compression == ".zst":
                yield io.BufferedReader(_Blocks(_decompressed(stream)))
            elif first or last is not None:
                yield io.BufferedReader(_Blocks(_range(stream, first, last)))
            else:
                yield stream
    except EOFError:
        name = COMPRESSIONS[compression]
        raise InputError(
            f"data file {file} is cut short: its {name} stream has no end; copy or download it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error, _Damaged) as error:
        raise InputError(f"data file {file} is damaged ({error}); copy or download it again") from None
    except UnicodeDecodeError:
        check_whole(file)
        raise InputError(
            f"data file {file} is not UTF-8 at byte {_first_fault(file)}{' of its text' if compression else ''}; "
            "convert it (iconv -t utf-8) or leave it out"
        ) from None


def check_whole(file: Path) -> None:
    """Reads a compressed file to its end, which tells whether it is damaged: then its text is not the one to blame.

    Raises:
      InputError: it is.
    """
    if format_of(file).compression:
        with opened(file) as stream:
            while stream.read(BLOCK):
                pass


class _Damaged(Exception):
    """Data that zstd cannot decompress."""


def _range(stream: BinaryIO, first: int, last: int | None) -> Iterator[bytes]:
    stream.seek(first)
    position = first
    while block := stream.read(BLOCK if last is None else min(BLOCK, last - position)):
        position += len(block)
        yield block


def _decompressed(stream: BinaryIO) -> Iterator[bytes]:
    """Frame after frame.  zstandard's own reader takes the end of a file that is cut short for the end of a frame."""
    zstandard = importlib.import_module("zstandard")  # optional; `format_of` has checked that it is there
    decompressor, frame = zstandard.ZstdDecompressor(max_window_size=1 << 31), None
    try:
        while block := stream.read(BLOCK):
            while block:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(block)
                block = b""
                if frame.eof:
                    block, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise _Damaged(error) from None
    if frame is not None:
        raise EOFError


class _Blocks(io.RawIOBase):
    """Blocks of bytes, one after the other, as a stream."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._block = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._block:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._block = memoryview(block)
        count = min(len(buffer), len(self._block))
        buffer[:count], self._block = self._block[:count], self._block[count:]
        return count


def _first_fault(file: Path) -> int:
    """The first byte of a text that is not UTF-8."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with opened(file) as stream:
        while block := stream.read(BLOCK):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                return offset - pending + error.start
            offset += len(block)
    return offset - len(decoder.getstate()[0])
