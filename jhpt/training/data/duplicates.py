"""Training text without what stands in the held-out text: lines that have 48 bytes in common with it are left out.

A piece is 48 bytes in a row, at any offset.  It tells nothing, and is not looked at, if it has no letter and no digit:
white space, separators, runs of punctuation.  Pieces are compared by a hash of 64 bits,

    h(piece) = sum over its six words w of 8 bytes, (w xor w >> 29) x odd number, modulo 2^64

so that equal pieces are always found; if two others ever have one hash, a line is left out without need.  Held-out
files stay whole.  Text is read into memory: this is for the text that jhpt gathers itself, some 10 MB, not for corpora.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhpt.training.data.documents import Part

PIECE = 48
"""Bytes of a piece: longer than most idioms of a line, shorter than a line and a half of code."""

WORDS = PIECE // 8
"""Words of a piece."""

FACTORS = np.random.default_rng(0).integers(0, 1 << 63, WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

FILTER_BITS = 24
"""Leading bits of a hash that are looked up first: most pieces of a text are in no other, and cost one look."""

BLOCK = 1 << 18
"""Pieces that are hashed at a time, which fit a core's cache."""

END = 0xFF
"""The mark behind a document, which UTF-8 never contains (as in `tokenizer.ByteTokenizer`)."""

TELLING = np.array([code != END and (code >= 128 or chr(code).isalnum()) for code in range(256)])
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
      training, held: bytes, uint8, with `END` behind every document or without.
    """
    pieces = Pieces.of(held)
    found = [np.zeros(0, np.uint64)]
    for first in range(0, max(len(training) - PIECE + 1, 0), BLOCK):
        hashes = hashes_of(training[first : first + BLOCK + PIECE - 1])
        found.append(hashes[pieces.holds(hashes)])
    return len(np.unique(np.concatenate(found)))


def apart(training: Sequence[Path], held: Sequence[Path]) -> list[tuple[Part, int]]:
    """The training files without the lines that hold letters or digits of a piece of the held-out ones, in order: their
    parts, with the bytes of each.

    What is left is read end to end, and no piece of it is in the held-out files, nor where a line was left out between.
    All files are text without compression.
    """
    pieces, text = Pieces.of(_joined(held)), _joined(training)
    ends = text == END
    begins = ends.copy()  # of lines; the end of a document is a line of its own, which stays
    begins[1:] |= ends[:-1] | (text[:-1] == ord("\n"))
    begins[:1] = True
    starts = np.flatnonzero(begins)
    sizes, stays = np.diff(starts, append=len(text)), ends[starts]
    left_out = np.zeros(len(starts), bool)
    kept, found = text, pieces.found_in(text)
    while len(found):
        first, last = _lines_of(found, kept, np.where(left_out, 0, sizes))
        for distance in range(int((last - first).max()) + 1):
            left_out[np.minimum(first + distance, last)] = True
        left_out &= ~stays
        kept = text[np.repeat(~left_out, sizes)]
        found = _across_gaps(kept, np.where(left_out, 0, sizes), pieces)
    return list(_parts(training, starts, left_out))


def _lines_of(found: np.ndarray, text: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last line in which the pieces of text[n] that begin there have a letter or a digit.

    Args:
      sizes: bytes of every line, 0 where it was left out.
    """
    telling = TELLING[text[found[:, None] + np.arange(PIECE)]]
    begins = np.cumsum(sizes) - sizes
    ends = (telling.argmax(1), PIECE - 1 - telling[:, ::-1].argmax(1))
    first, last = (np.searchsorted(begins, found + place, "right") - 1 for place in ends)
    return first, last


def _across_gaps(text: np.ndarray, sizes: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Where pieces begin in text[n], among those that reach over a place where lines were left out, of size 0."""
    gaps = np.cumsum(sizes)[sizes == 0]
    begins = np.unique(gaps[:, None] - np.arange(1, PIECE))
    begins = begins[(begins >= 0) & (begins <= len(text) - PIECE)]
    rows = text[begins[:, None] + np.arange(PIECE)]
    hashes = (_mixed(rows.view("<u8")) * FACTORS).sum(1, dtype=np.uint64)
    return begins[pieces.holds(hashes)]


def _parts(files: Sequence[Path], starts: np.ndarray, left_out: np.ndarray) -> Iterator[tuple[Part, int]]:
    """What is kept of each file; the last part of every file goes to its end, where its document ends."""
    edges = np.diff(left_out.astype(np.int8), prepend=0)
    gaps = zip(starts[edges == 1].tolist(), starts[edges == -1].tolist(), strict=True)
    gap_begins, gap_ends = next(gaps, (sys.maxsize, sys.maxsize))
    begin = 0
    for file in files:
        size, first = file.stat().st_size, 0
        while gap_begins < begin + size:
            if gap_begins - begin > first:
                yield Part(file=file, first=first, last=gap_begins - begin), gap_begins - begin - first
            first = gap_ends - begin
            gap_begins, gap_ends = next(gaps, (sys.maxsize, sys.maxsize))
        yield Part(file=file, first=first), size - first
        begin += size + 1  # the mark


def _mixed(words: np.ndarray) -> np.ndarray:
    """High bits go into low ones, because a product modulo 2^64 carries low bits up only."""
    return words ^ (words >> np.uint64(29))


def _joined(files: Sequence[Path]) -> np.ndarray:
    """Their bytes, each with the mark of its end."""
    return np.frombuffer(b"".join(file.read_bytes() + bytes([END]) for file in files), np.uint8)


def _telling(text: np.ndarray) -> np.ndarray:
    """Whether the piece at each offset of text[n] has a letter or a digit: bool [n - 47]."""
    if len(text) < PIECE:
        return np.zeros(0, bool)
    count = np.concatenate([[0], np.cumsum(TELLING[text], dtype=np.int64)])
    return count[PIECE:] > count[:-PIECE]


def _first_bits(hashes: np.ndarray) -> np.ndarray:
    return hashes >> np.uint64(64 - FILTER_BITS)
