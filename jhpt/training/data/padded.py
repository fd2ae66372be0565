"""Sequences of one document each, or of a piece of one, padded (`data.packing: pad`)."""

from dataclasses import dataclass

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.data.windows import TokenStream

READ_AT_ONCE = 1 << 24
"""Tokens that are searched for the ends of documents at once."""


@dataclass(frozen=True, kw_only=True)
class PaddedRows:
    """Random access to the documents of a token stream, which are cut where they are too long.

    firsts, sizes: [n], where each sequence begins in `tokens` and how many it has.  length: of a row.  fill: what
    follows it up to `length`, and occurs in it at its end only.  start: what precedes it, and then `fill` follows it
    at least once (BERT); None: it has its end token itself (GPT).
    """

    tokens: TokenStream
    firsts: np.ndarray
    sizes: np.ndarray
    length: int
    fill: int
    start: int | None = None

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [length]."""
        row = np.full(self.length, self.fill, np.int32)
        first, size, before = int(self.firsts[index]), int(self.sizes[index]), int(self.start is not None)
        row[before : before + size] = self.tokens[first : first + size]
        if self.start is not None:
            row[0] = self.start
        return row


def padded_rows(tokens: TokenStream, length: int, name: str, tokenizer: Tokenizer, *, masked: bool) -> PaddedRows:
    """A sequence for each document, or for each piece of `length` tokens of one that is longer.

    masked: `[CLS] document [SEP] padding` for BERT, [length]; otherwise `document end padding`, [length + 1], for
    next-token prediction, where a piece begins with the last token of the one before.  Of a last document without an
    end there are only whole pieces then: nothing should learn that it ends there.

    Raises:
      InputError: there is no document with a token to predict.
    """
    assert tokenizer.end is not None
    stride, overlap = (length - 2, 0) if masked else (length, 1)
    firsts, sizes = _documents(tokens, tokenizer.end)
    if not masked:
        sizes = sizes + 1  # with the end, which the last document of a text that was cut in two lacks
        sizes[-1] = max(sizes[-1] - 2, 0) // stride * stride + 1
    counts = -(-np.maximum(sizes - overlap, 0) // stride)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    fill, start = (tokenizer.separator, tokenizer.start) if masked else (tokenizer.end, None)
    assert fill is not None
    if not len(number):
        raise InputError(f"the {name} text has no document with a token to predict; give more text")
    return PaddedRows(
        tokens=tokens,
        firsts=np.repeat(firsts, counts) + number * stride,
        sizes=np.minimum(np.repeat(sizes, counts) - number * stride, stride + overlap),
        length=length + overlap,
        fill=fill,
        start=start,
    )


def _documents(tokens: TokenStream, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(where each document begins, its tokens without the end)."""
    pieces = range(0, len(tokens), READ_AT_ONCE)
    found = [np.flatnonzero(np.asarray(tokens[at : at + READ_AT_ONCE]) == end) + at for at in pieces]
    ends = np.concatenate([*found, [len(tokens)]]).astype(np.int64)
    firsts = np.concatenate([[0], ends[:-1] + 1])
    return firsts, ends - firsts
