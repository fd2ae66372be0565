"""Text <-> token ids: raw bytes, or any tokenizer of the `tokenizers` library."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from jhpt.compiled.quiet import quiet
from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer_files import SPECIAL_FILE, TOKENIZER_FILE, read_tokenizer
from jhpt.training.data.tokenizer_kinds import library_faults

BYTES = "bytes"
"""What `data.tokenizer` is for raw bytes."""


class Tokenizer(Protocol):
    """A tokenizer as the data pipeline sees it; special ids are None if the vocabulary has none."""

    vocab_size: int
    fingerprint: str
    end: int | None
    """Separates documents."""
    mask: int | None
    start: int | None
    separator: int | None
    continues: np.ndarray | None
    """[vocab_size], which ids go on with the word before; None: ids are no pieces of words."""
    files: tuple[Path, ...]
    """What it was read from."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids [n], int32."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Writes it into a folder that `data.tokenizer` can name then; nothing for raw bytes."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte.  The special ids are bytes that UTF-8 never contains, so 256 ids are enough."""

    vocab_size = 256
    fingerprint = "bytes-1"
    end: int | None = 0xFF
    mask: int | None = 0xFE
    start: int | None = 0xFD
    separator: int | None = 0xFC
    continues: np.ndarray | None = None
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 0xF8).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing: it has no file."""


PROBE = "The mesh maps 16 layers, ab\n"
"""A text that any tokenizer can read; some files are accepted and make the library panic at the first text."""

LONGEST_TEXT = 1 << 21
"""Characters of a text that are tokenised in one call, for each of which the library takes about 200 bytes."""

SPECIAL = {
    "end": (("eos_token", "sep_token"), ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>")),
    "mask": (("mask_token",), ("[MASK]", "<mask>")),
    "start": (("cls_token", "bos_token"), ("[CLS]", "<s>")),
    "separator": (("sep_token", "eos_token"), ("[SEP]", "</s>")),
}
"""Special ids: their names in settings, the first that names a token; where settings name none of them, usual texts."""


class FileTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library, from its JSON file or in any form of `tokenizer_files`."""

    def __init__(self, name: str | Path):
        source, self._name = f"data.tokenizer={name}", name
        read = read_tokenizer(str(name))
        with library_faults(f"{source}: not a tokenizers JSON file"):
            self._tokenizer = tokenizers.Tokenizer.from_str(read.text)
            # Released files often carry the limits of one model's inputs; here whole documents are read.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if (panic := _panic(self._tokenizer)) is not None:
                raise panic
        # Not get_vocab_size(), which counts tokens: ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if not self.vocab_size:
            raise InputError(f"{source}: its vocabulary is empty; give a trained tokenizer")
        ids = {role: self._special(role, read.special, source) for role in SPECIAL}
        guess = {role: self._special(role, {}, source) for role in SPECIAL}
        self.end, self.mask, self.start, self.separator = ids.values()
        self.continues = _continues(self._tokenizer, read.text, self.vocab_size)
        self.files = read.files
        self._read = read
        content = read.text + (str(ids) if ids != guess else "")
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _special(self, role: str, settings: Mapping[str, str | None], source: str) -> int | None:
        keys, usual = SPECIAL[role]
        if not any(key in settings for key in keys):
            return next((i for i in map(self._tokenizer.token_to_id, usual) if i is not None), None)
        key, token = next(((key, settings[key]) for key in keys if settings.get(key) is not None), ("", None))
        if token is None:
            return None
        if (number := self._tokenizer.token_to_id(token)) is None:
            raise InputError(
                f"{source}: its settings name {token!r} as {key}, which its vocabulary has not; correct {SPECIAL_FILE} "
                "or tokenizer_config.json"
            )
        return number

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:  # on all cores
        """Token ids of several texts; those that are longer than `LONGEST_TEXT` are read piece by piece."""
        if any(len(text) > LONGEST_TEXT for text in texts):
            return [np.concatenate([self._encoded([piece])[0] for piece in _pieces(text)]) for text in texts]
        return self._encoded(texts)

    def _encoded(self, texts: Sequence[str]) -> list[np.ndarray]:
        with library_faults(f"data.tokenizer={self._name}: cannot read this text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with library_faults(f"data.tokenizer={self._name}: cannot write these tokens"):
            return self._tokenizer.decode([i for i in ids if i < self.vocab_size])

    def save(self, folder: Path) -> None:
        """Writes its JSON file and what settings say of special tokens, each atomically."""
        texts = {TOKENIZER_FILE: self._read.text}
        if self._read.special:
            texts[SPECIAL_FILE] = json.dumps(dict(self._read.special), indent=1)
        for name, text in texts.items():
            partial = folder / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.rename(folder / name)


def _panic(tokenizer: tokenizers.Tokenizer) -> BaseException | None:
    """What the library panics with at any text; it says much on standard error then, which is left out."""
    with quiet():
        try:
            tokenizer.encode_batch_fast([PROBE], add_special_tokens=False)
        except Exception:  # such as an unknown character, which is told when it matters
            return None
        except BaseException as error:
            return error
    return None


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most `LONGEST_TEXT` characters, cut before a space as far as there are spaces."""
    while len(text) > LONGEST_TEXT:
        space = max(text.rfind(space, LONGEST_TEXT // 2, LONGEST_TEXT) for space in " \n")
        end = space if space > 0 else LONGEST_TEXT
        yield text[:end]
        text = text[end:]
    yield text


def _continues(tokenizer: tokenizers.Tokenizer, text: str, size: int) -> np.ndarray | None:
    """Of a WordPiece vocabulary, the pieces with the prefix of its file, `##`."""
    model = json.loads(text).get("model") or {}
    if model.get("type") != "WordPiece":
        return None
    prefix, found = model.get("continuing_subword_prefix", "##"), np.zeros(size, bool)
    found[[number for piece, number in tokenizer.get_vocab().items() if piece.startswith(prefix)]] = True
    return found


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(name)
