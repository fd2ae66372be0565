"""Fixed-length sequences cut from a stream of tokens (documents packed end to end)."""

from dataclasses import dataclass

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Random access to the sequences of a token stream; window i starts at token i * stride.

    Causal models read `stride + 1` tokens (inputs and next tokens overlap by one); BERT reads
    `[CLS] stride tokens [SEP]`.
    """

    tokens: np.ndarray
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


def causal_windows(tokens: np.ndarray, length: int, name: str) -> Windows:
    """Sequences for next-token prediction: `length` inputs and their next tokens."""
    return _checked(Windows(tokens=tokens, stride=length, overlap=1), name, length)


def check_masked(tokenizer: Tokenizer, length: int) -> None:
    """Refuses a tokenizer or length that masked-language modelling cannot work with.

    Raises:
      InputError: no mask, start or separator token, or no room between the latter two.
    """
    missing = [n for n in ("mask", "start", "separator") if getattr(tokenizer, n) is None]
    if missing:
        raise InputError(
            f"data.tokenizer has no {', '.join(missing)} token; BERT needs a tokenizer with [MASK], [CLS] and [SEP]"
        )
    if length < 3:
        raise InputError(f"data.sequence_length={length} leaves no room between [CLS] and [SEP]; use at least 3")


def masked_windows(tokens: np.ndarray, length: int, name: str, tokenizer: Tokenizer) -> Windows:
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
