"""Pairs of pieces of text, of which the second follows the first in half of the rows (`model.objective: mlm+nsp`;
Devlin et al. 2018, arXiv 1810.04805, section 3.1, task 2)."""

from dataclasses import dataclass

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.data.windows import TokenStream, Windows, check_masked

FOLLOWS, ELSEWHERE = 0, 1
"""Labels of rows, those of published weights: the second piece follows the first, or is from elsewhere."""

CHOICE = 0x9A125
"""Sets the random choices for rows apart from other uses of a row's number."""


@dataclass(frozen=True, kw_only=True)
class PairedRows:
    """Random access to pairs `[CLS] A [SEP] B [SEP]`, which fill their rows.

    pieces: of the stream, one after the other, S - 3 tokens each.  A of row i is the first half of piece i.  B is its
    second half, or the second half of another piece, which is at least a quarter of the stream away, around its end.
    What a row is depends on its number alone.
    """

    pieces: Windows
    start: int
    separator: int

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [S + 3]: tokens, their number, where B begins, and the label (`jhpt.models.labelled`)."""
        half = self.pieces.stride // 2
        label, other = self._choice(int(index))
        piece = self.pieces[index]
        second = piece if label == FOLLOWS else self.pieces[other]
        row = [[self.start], piece[:half], [self.separator], second[half:], [self.separator]]
        return np.concatenate([*row, [self.pieces.stride + 3, half + 2, label]]).astype(np.int32)

    def _choice(self, index: int) -> tuple[int, int]:
        """(the label, the piece that B is of if it is from elsewhere)."""
        random, count = np.random.default_rng((CHOICE, index)), len(self)
        away = max(count // 4, 1)
        return int(random.integers(2)), int(index + random.integers(away, count - away + 1)) % count


def paired_rows(tokens: TokenStream, length: int, name: str, tokenizer: Tokenizer) -> PairedRows:
    """Pairs for masked-language modelling and next-sentence prediction, of `length` tokens in all.

    Raises:
      InputError: the text is too short for two pairs, or the tokenizer lacks a token that BERT needs.
    """
    check_masked(tokenizer, length)
    assert tokenizer.start is not None and tokenizer.separator is not None
    pieces = Windows(tokens=tokens, stride=length - 3, overlap=0)
    if len(pieces) < 2:
        raise InputError(
            f"the {name} text has {len(tokens)} tokens, too few for two pairs of {length}; give more text or a shorter "
            "data.sequence_length"
        )
    return PairedRows(pieces=pieces, start=tokenizer.start, separator=tokenizer.separator)
