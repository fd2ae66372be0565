"""Training text without what stands in the held-out text: lines that have 48 bytes in common with it are left out.

A piece is 48 bytes in a row, at any offset.  It tells nothing, and is not looked at, if it has no letter and no digit:
white space, separators, runs of punctuation.  Pieces are compared by a hash of 64 bits,

    h(piece) = sum over its six words w of 8 bytes, (w xor w >> 29) x odd number, modulo 2^64

so that equal pieces are always found; if two others ever have one hash, a line is left out without need.  Held-out
files stay whole.  Text is read into memory: this is for the text that jhpt gathers itself, some 10 MB, not for corpora.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhpt.training.data.documents import Part

PIECE = 48
"""Bytes of a piece: longer than most idioms of a line, shorter than a line and a half of code."""

WORDS = PIECE // 8
FACTORS = np.random.default_rng(0).integers(0, 1 << 63, WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

FILTER_BITS = 24
"""Leading bits of a hash that are looked up first: most pieces of a text are in no other, and cost one look."""

BLOCK = 1 << 18
"""Pieces that are hashed at a time, which fit a core's cache."""

TELLING = np.array([code >= 128 or chr(code).isalnum() for code in range(256)])
"""Bytes that are letters, digits or parts of them."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The telling pieces of a text.  hashes: of all, ascending.  begins: whether one has these leading bits."""

    hashes: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, text: np.ndarray) -> "Pieces":
        """The pieces of text[n], uint8."""
        hashes = np.sort(hashes_of(text)[_telling(text)])
        begins = np.zeros(1 << FILTER_BITS, bool)
        begins[_first_bits(hashes)] = True
        return cls(hashes=hashes, begins=begins)

    def holds(self, hashes: np.ndarray) -> np.ndarray:
        """Whether pieces with these hashes are among them: the places in `hashes` where they are, ascending."""
        places = np.flatnonzero(self.begins[_first_bits(hashes)])
        wanted = hashes[places]
        found = np.minimum(np.searchsorted(self.hashes, wanted), max(len(self.hashes) - 1, 0))
        return places[self.hashes[found] == wanted] if len(self.hashes) else places[:0]

    def found_in(self, text: np.ndarray) -> np.ndarray:
        """Where they begin in text[n], uint8: ascending offsets."""
        found = [
            first + self.holds(hashes_of(text[first : first + BLOCK + PIECE - 1]))
            for first in range(0, max(len(text) - PIECE + 1, 0), BLOCK)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.intp)


def hashes_of(text: np.ndarray) -> np.ndarray:
    """The hash of the piece at every offset of text[n], uint8: uint64 [n - 47], or none of a shorter text."""
    if len(text) < PIECE:
        return np.zeros(0, np.uint64)
    words = np.empty(len(text) - 7, np.uint64)  # at every offset
    for offset in range(8):
        aligned = text[offset:]
        words[offset::8] = aligned[: len(aligned) // 8 * 8].view("<u8")
    words = _mixed(words)
    count = len(text) - PIECE + 1
    hashes = words[:count] * FACTORS[0]
    for place in range(1, WORDS):
        hashes += words[8 * place : 8 * place + count] * FACTORS[place]
    return hashes


def shared_pieces(training: np.ndarray, held: np.ndarray) -> int:
    """The number of telling pieces of the held-out text, each counted once, that stand in the training text.

    Args:
      training, held: bytes, uint8.
    """
    pieces = Pieces.of(held)
    found = [np.zeros(0, np.uint64)]
    for first in range(0, max(len(training) - PIECE + 1, 0), BLOCK):
        hashes = hashes_of(training[first : first + BLOCK + PIECE - 1])
        found.append(hashes[pieces.holds(hashes)])
    return len(np.unique(np.concatenate(found)))


def apart(training: Sequence[Path], held: Sequence[Path]) -> list[tuple[Part, int]]:
    """The training files without the lines that hold a part of a piece of the held-out ones, in order: their parts,
    with the bytes of each.

    What is left is read end to end, and no piece of it, also where a line was left out between, is in the held-out
    files.  All files are text without compression.
    """
    pieces = Pieces.of(_joined(held))
    text, sizes = _joined(training), [file.stat().st_size for file in training]
    ends = np.zeros(len(text), bool)  # of lines, which end with their file at the latest
    ends[text == ord("\n")] = True
    ends[np.cumsum(sizes) - 1] = True
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    left_out = np.zeros(len(starts) - 1, bool)
    kept, found = np.arange(len(text)), pieces.found_in(text)
    while len(found):
        first = np.searchsorted(starts, kept[found], "right") - 1
        last = np.searchsorted(starts, kept[found + PIECE - 1], "right") - 1
        for distance in range(int((last - first).max()) + 1):
            left_out[np.minimum(first + distance, last)] = True
        kept = np.flatnonzero(np.repeat(~left_out, np.diff(starts)))
        found = _across_gaps(text, kept, pieces)
    return list(_parts(training, sizes, starts, left_out))


def _across_gaps(text: np.ndarray, kept: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Where pieces begin in the text of these offsets, among those in which bytes are neighbours that were not."""
    begins = np.flatnonzero(kept[PIECE - 1 :] - kept[: len(kept) - PIECE + 1] >= PIECE)
    rows = text[kept[begins[:, None] + np.arange(PIECE)]]
    hashes = (_mixed(rows.view("<u8")) * FACTORS).sum(1, dtype=np.uint64)
    return begins[pieces.holds(hashes)]


def _parts(
    files: Sequence[Path], sizes: Sequence[int], starts: np.ndarray, left_out: np.ndarray
) -> Iterator[tuple[Part, int]]:
    """What is kept of each file; the last part of every file goes to its end, where its document ends."""
    stops = np.concatenate([[False], left_out, [False]])
    edges = np.diff(stops.astype(np.int8))
    gaps = list(zip(starts[np.flatnonzero(edges == 1)], starts[np.flatnonzero(edges == -1)], strict=True))[::-1]
    begin = 0
    for file, size in zip(files, sizes, strict=True):
        first, end = 0, begin + size
        while gaps and gaps[-1][0] < end:
            gap_begins, gap_ends = (int(place) for place in gaps.pop())
            if gap_ends > end:
                gaps.append((np.intp(end), np.intp(gap_ends)))
                gap_ends = end
            if gap_begins - begin > first:
                yield Part(file=file, first=first, last=gap_begins - begin), gap_begins - begin - first
            first = gap_ends - begin
        yield Part(file=file, first=first), size - first
        begin = end


def _mixed(words: np.ndarray) -> np.ndarray:
    """High bits go into low ones, because a product modulo 2^64 carries low bits up only."""
    return words ^ (words >> np.uint64(29))


def _joined(files: Sequence[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def _telling(text: np.ndarray) -> np.ndarray:
    """Whether the piece at each offset of text[n] has a letter or a digit: bool [n - 47]."""
    if len(text) < PIECE:
        return np.zeros(0, bool)
    count = np.concatenate([[0], np.cumsum(TELLING[text], dtype=np.int64)])
    return count[PIECE:] > count[:-PIECE]


def _first_bits(hashes: np.ndarray) -> np.ndarray:
    return hashes >> np.uint64(64 - FILTER_BITS)
