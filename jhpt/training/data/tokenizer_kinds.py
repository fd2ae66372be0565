"""The two kinds of tokenizers that are made here, around a vocabulary: GPT-2's byte-level BPE and BERT's WordPiece."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jhpt.core.errors import InputError

GPT_SPECIAL = ("<|endoftext|>",)
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens, in the order of their ids in a tokenizer that is trained here."""


@contextmanager
def library_faults(what: str) -> Iterator[None]:
    """Turns what the tokenizers library raises, bare Exceptions and panics of Rust, into one message.

    Raises:
      InputError: `what`, and what the library says.
    """
    try:
        yield
    except (InputError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what}: {error}") from None


def byte_level(model: models.BPE, *, add_prefix_space: bool = False) -> Tokenizer:
    """BPE over the bytes of UTF-8 (Radford et al. 2019, section 2.2), which any text passes unchanged."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece(
    model: models.WordPiece,
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese_characters: bool = True,
) -> Tokenizer:
    """Words, cut into the longest known pieces (Devlin et al. 2018, section 3).

    strip_accents: None: as `lowercase`.  chinese_characters: each is a word of its own.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=chinese_characters, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
