"""Text <-> token ids: raw bytes, or any tokenizer in the `tokenizers` JSON format."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from jhpt.core.errors import InputError


class Tokenizer(Protocol):
    """A tokenizer as the data pipeline sees it; special ids are None if the vocabulary has none."""

    vocab_size: int
    fingerprint: str
    end: int | None
    """Separates documents."""
    mask: int | None
    start: int | None
    separator: int | None

    def encode(self, text: str) -> np.ndarray:
        """Token ids [n], int32."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte.  The special ids are bytes that UTF-8 never contains, so 256 ids are enough."""

    vocab_size = 256
    fingerprint = "bytes-1"
    end: int | None = 0xFF
    mask: int | None = 0xFE
    start: int | None = 0xFD
    separator: int | None = 0xFC

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 0xF8).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library, read from its JSON file."""

    _END = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>")

    def __init__(self, path: Path):
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            # Released files often carry the limits of one model's inputs; here whole documents are read.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except FileNotFoundError:
            raise InputError(f"data.tokenizer={path}: no such file; give a tokenizers JSON file or 'bytes'") from None
        except Exception as error:  # the library raises bare Exception on malformed JSON
            raise InputError(f"data.tokenizer={path}: not a tokenizers JSON file: {error}") from None
        # Not get_vocab_size(), which counts tokens: ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if not self.vocab_size:
            raise InputError(f"data.tokenizer={path}: its vocabulary is empty; give a trained tokenizer")
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.end = next((i for i in map(self._tokenizer.token_to_id, self._END) if i is not None), None)
        self.mask = self._first("[MASK]", "<mask>")
        self.start = self._first("[CLS]", "<s>")
        self.separator = self._first("[SEP]", "</s>")

    def _first(self, *names: str) -> int | None:
        return next((i for i in map(self._tokenizer.token_to_id, names) if i is not None), None)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:  # on all cores
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i < self.vocab_size])


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(os.path.expanduser(name)))
