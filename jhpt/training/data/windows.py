"""Fixed-length sequences cut from a stream of tokens (documents packed end to end)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.mixture import Sequences
from jhpt.training.data.tokenizer import Tokenizer


class TokenStream(Protocol):
    """Token ids [n], of which ranges are read: an array, or `shards.Tokens`."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Random access to the sequences of a token stream; window i starts at token i * stride.

    Causal models read `stride + 1` tokens (inputs and next tokens overlap by one); BERT reads
    `[CLS] stride tokens [SEP]`.
    """

    tokens: TokenStream
    stride: int
    overlap: int
    start: int | None = None
    separator: int | None = None

    def __len__(self) -> int:
        return max(len(self.tokens) - self.overlap, 0) // self.stride

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [S + 1] for causal models, [S] for BERT."""
        first = index * self.stride
        window = np.asarray(self.tokens[first : first + self.stride + self.overlap], np.int32)
        if self.start is None:
            return window
        return np.concatenate([[self.start], window, [self.separator]]).astype(np.int32)


def causal_windows(tokens: TokenStream, length: int, name: str) -> Windows:
    """Sequences for next-token prediction: `length` inputs and their next tokens."""
    return _checked(Windows(tokens=tokens, stride=length, overlap=1), name, length)


def check_masked(tokenizer: Tokenizer, length: int, *, masks: bool = True) -> None:
    """Refuses a tokenizer or length that BERT cannot work with.

    Args:
      masks: whether tokens are masked, as in masked-language modelling.

    Raises:
      InputError: no mask (if it `masks`), start or separator token, or no room between the latter two.
    """
    missing = [n for n in (*(("mask",) if masks else ()), "start", "separator") if getattr(tokenizer, n) is None]
    if missing:
        raise InputError(
            f"data.tokenizer has no {', '.join(missing)} token; BERT needs a tokenizer with [MASK], [CLS] and [SEP]"
        )
    if length < 3:
        raise InputError(f"data.sequence_length={length} leaves no room between [CLS] and [SEP]; use at least 3")


def check_words(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that does not cut words into pieces that tell that they are pieces.

    Raises:
      InputError: it is no WordPiece tokenizer.
    """
    if tokenizer.continues is None:
        raise InputError(
            "data.whole_words=true needs a WordPiece tokenizer, whose pieces begin with ## inside words, and "
            "data.tokenizer is none; train one (jhpt tokenizer train FILES --kind wordpiece), or leave "
            "data.whole_words out"
        )


def check_documents(tokenizer: Tokenizer, packing: str = "documents") -> None:
    """Refuses a tokenizer that does not mark where documents end.

    Raises:
      InputError: it has no such token.
    """
    if tokenizer.end is None:
        raise InputError(
            f"data.packing={packing} needs a token between documents, and data.tokenizer has none, such as "
            "<|endoftext|> or [SEP]; add one to the tokenizer, or use data.packing=stream"
        )


COUNTED_WINDOWS = 1024
"""Windows whose documents are measured; with more, reading them would take long where files are far away."""


def visible_keys(windows: Sequences, length: int, end: int, *, causal: bool) -> float:
    """Keys that an average token sees, if it sees its own document only: sum of n (n + 1) / 2 over the documents of n
    tokens in a window, or of n^2, divided by the window's `length`.

    It is exact for up to `COUNTED_WINDOWS` windows; of more, that many are taken at equal distances.
    """
    chosen = np.unique(np.linspace(0, len(windows) - 1, COUNTED_WINDOWS).astype(np.int64))

    def pairs(window: np.ndarray) -> float:
        starts = np.flatnonzero(window[: length - 1] == end) + 1
        sizes = np.diff(np.concatenate([[0], starts, [length]]))
        return float(np.sum(sizes * (sizes + 1) // 2 if causal else sizes**2))

    return sum(pairs(windows[int(index)]) for index in chosen) / (len(chosen) * length)


def masked_windows(tokens: TokenStream, length: int, name: str, tokenizer: Tokenizer) -> Windows:
    """Sequences for masked-language modelling: `[CLS] length - 2 tokens [SEP]`."""
    check_masked(tokenizer, length)
    windows = Windows(tokens=tokens, stride=length - 2, overlap=0, start=tokenizer.start, separator=tokenizer.separator)
    return _checked(windows, name, length)


def _checked(windows: Windows, name: str, length: int) -> Windows:
    if len(windows) < 1:
        raise InputError(
            f"the {name} text has {len(windows.tokens)} tokens, too few for one sequence of {length}; "
            "give more text or a shorter data.sequence_length"
        )
    return windows
