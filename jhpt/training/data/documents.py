"""Files -> documents: pieces of text, with a mark after each document, from any part of a file."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jhpt.core.errors import InputError
from jhpt.core.text_files import bounded_lines
from jhpt.training.data.columns import check_rows, row_group_sizes, rows
from jhpt.training.data.formats import check_content, format_of
from jhpt.training.data.streams import BLOCK, check_whole, opened

PIECE_CHARS = 1 << 20
"""Text is read and tokenised in pieces of about this many characters, cut at line ends."""

LINE_CHARS = 1 << 20
"""A piece is cut after so many more where no line ends, so that a file of a single line need not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file, or a part of it that can be read without the rest.

    first, last: bytes of a text or JSONL file, row groups of a Parquet file; last None: to the end.
    """

    file: Path
    first: int = 0
    last: int | None = None


def check_file(file: Path, text_key: str) -> None:
    """Refuses a file that is not what its name says, has no column of text or is cut short, as far as its ends tell.

    Raises:
      InputError: says what it seems to be.
    """
    check_content(file)
    if format_of(file).layout in ("parquet", "arrow"):
        check_rows(file, text_key)


def cut(file: Path, size: int, text_key: str) -> Iterator[tuple[Part, int]]:
    """The parts of a file, each of about `size` bytes or less, and their bytes on disk.

    Parts of text end where pieces end, so that the pieces of all parts are those of the whole file.  Compressed files
    and Arrow streams are not cut.
    """
    found, total = format_of(file), file.stat().st_size
    if found.compression or found.layout == "arrow" or total <= size:
        yield Part(file=file), total
    elif found.layout == "parquet":
        yield from _cut_groups(file, size, row_group_sizes(file, text_key))
    else:
        ends = _piece_ends(file, size) if found.layout == "text" else _line_ends(file, size)
        first = 0
        for end in ends:
            if end < total:
                yield Part(file=file, first=first, last=end), end - first
                first = end
        yield Part(file=file, first=first), total - first


def _cut_groups(file: Path, size: int, sizes: list[int]) -> Iterator[tuple[Part, int]]:
    """sizes: of the groups in memory, which are scaled to the bytes of the file."""
    scale = file.stat().st_size / max(sum(sizes), 1)
    first, gathered = 0, 0.0
    for number, group in enumerate(sizes, start=1):
        gathered += group * scale
        if gathered >= size and number < len(sizes):
            yield Part(file=file, first=first, last=number), int(gathered)
            first, gathered = number, 0.0
    yield Part(file=file, first=first), int(gathered)


def _piece_ends(file: Path, size: int) -> Iterator[int]:
    """Where pieces end, in bytes, each about `size` bytes behind the one before."""
    with opened(file) as stream:
        position = given = 0
        for piece in _pieces(stream):
            position += len(piece.encode())
            if position - given >= size:
                yield position
                given = position


def _line_ends(file: Path, size: int) -> Iterator[int]:
    """The first line ends, in bytes, behind multiples of `size`."""
    with opened(file) as stream:
        position = 0
        while True:
            stream.seek(position := position + size)
            while block := stream.read(BLOCK):
                if (end := block.find(b"\n")) >= 0:
                    yield (position := position + end + 1)
                    break
                position += len(block)
            else:
                return


def read(part: Part, text_key: str) -> Iterator[str | None]:
    """The pieces of all documents of a part, and None behind each document that ends there.

    Raises:
      InputError: text that is not UTF-8, a line that is not a JSON object, no text under `text_key`, a damaged file.
    """
    layout = format_of(part.file).layout
    if layout == "text":
        with opened(part.file, part.first, part.last) as stream:
            yield from _pieces(stream)
        if part.last is None:
            yield None
    else:
        texts = _lines(part, text_key) if layout == "jsonl" else rows(part.file, text_key, part.first, part.last)
        for text in texts:
            yield text
            yield None


def _pieces(stream: BinaryIO) -> Iterator[str]:
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        while piece := text.read(PIECE_CHARS):
            yield piece + text.readline(LINE_CHARS)


def _lines(part: Part, text_key: str) -> Iterator[str]:
    with opened(part.file, part.first, part.last) as stream, io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in enumerate(bounded_lines(lines)):
            if line.strip():
                try:
                    yield _json_text(line, text_key)
                except _BadLine as fault:
                    check_whole(part.file)
                    raise InputError(f"{part.file}, line {_lines_before(part) + number + 1}: {fault}") from None


class _BadLine(ValueError):
    """A line without a text; says why."""


def _lines_before(part: Part) -> int:
    """How many lines lie before a part.  Only needed where one is bad."""
    if not part.first:
        return 0
    with opened(part.file, 0, part.first) as stream, io.TextIOWrapper(stream, encoding="utf-8") as lines:
        return sum(1 for _ in bounded_lines(lines))


def _json_text(line: str, text_key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # too long a number, too deep a nesting
        reason = getattr(error, "msg", error)
        raise _BadLine(f"not valid JSON ({reason}); every line of a .jsonl file is one object") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise _BadLine(f"no text under {text_key!r} (found: {keys}); set data.text_key")
    text = record[text_key]
    if not _is_unicode(text):
        raise _BadLine("the text has half of a surrogate pair (\\ud800 to \\udfff); remove it")
    return text


def _is_unicode(text: str) -> bool:
    r"""Whether UTF-8 can write the text; JSON can escape half of a surrogate pair, `"\ud800"`, which it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
