"""A tokenizer from text: GPT-2's byte-level BPE or BERT's WordPiece, trained by the `tokenizers` library.

The same text gives the same tokenizer.  For BPE the library sees to that.  For WordPiece it numbers the characters
inside words in the order of a hash table, and orders equally frequent pairs by those
numbers, so they are numbered here.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jhpt.core.errors import InputError
from jhpt.training.data.documents import Part, check_file, read
from jhpt.training.data.tokenizer_kinds import BERT_SPECIAL, GPT_SPECIAL, byte_level, word_piece

Kind = Literal["bpe", "wordpiece"]

LONGEST_WORD = 1000
"""Characters without a space that are learned from as one word.  The library takes time that grows with the square of
a word, and cannot be interrupted: hours for a file of a single word."""

LEAST_FREQUENCY = 2
"""A pair is joined if the text has it this often, as in the library's own GPT-2 and BERT tokenizers."""

MOST_CHARACTERS = 1000
"""WordPiece knows this many characters, the most frequent ones, as in the library's BERT tokenizer; a word with another
one is [UNK]."""


def train_tokenizer(
    files: Sequence[Path],
    kind: Kind,
    vocab_size: int,
    *,
    lowercase: bool = False,
    text_key: str = "text",
) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids; fewer if the text has no more pairs to join.

    The text is read line by line, BERT's twice.  Memory holds its different words, with their counts.

    Args:
      files: as `jhpt.training.data.corpus.find_files` finds them.
      lowercase: for WordPiece: text is read in lower case and without accents.

    Raises:
      InputError: no text, text that cannot be read, or fewer ids than special tokens and characters need.
    """
    if kind not in get_args(Kind):
        raise InputError(f"kind={kind!r}: use {' or '.join(get_args(Kind))}")
    if lowercase and kind == "bpe":
        raise InputError("lowercase is for wordpiece; byte-level BPE gives every text back as it is, leave it out")
    if not any(line.strip() for line in lines(files, text_key)):
        raise InputError(f"no text in {' and '.join(map(str, files[:3]))}; give files with text")
    if kind == "bpe":
        return _bpe(files, text_key, vocab_size)
    return _word_piece(files, text_key, vocab_size, lowercase)


def lines(files: Sequence[Path], text_key: str) -> Iterator[str]:
    """The text of the files, line by line."""
    for file in files:
        check_file(file, text_key)
        for piece in read(Part(file=file), text_key):
            if piece is not None:  # the end of a document
                yield from piece.splitlines(keepends=True)


def _short_words(text: Iterator[str]) -> Iterator[str]:
    """The lines, where each word is cut that is longer than `LONGEST_WORD`."""
    overlong = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
    for line in text:
        start = 0
        for word in overlong.finditer(line):
            yield line[start : word.end()]
            start = word.end()
        yield line[start:]


def _bpe(files: Sequence[Path], text_key: str, vocab_size: int) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(GPT_SPECIAL) + len(alphabet), "a special token and 256 bytes")
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_FREQUENCY,
        special_tokens=list(GPT_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_short_words(lines(files, text_key)), trainer)
    return tokenizer


def _word_piece(files: Sequence[Path], text_key: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    tokenizer = word_piece(models.WordPiece(unk_token="[UNK]"), lowercase=lowercase)
    characters = _characters(tokenizer, lines(files, text_key))
    inside = [f"##{character}" for character in characters if _continues(tokenizer, character)]
    first = [*BERT_SPECIAL, *inside]
    _check_size(
        vocab_size, len(first) + len(characters), f"{len(BERT_SPECIAL)} special tokens and the text's characters"
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_FREQUENCY,
        special_tokens=first,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_short_words(lines(files, text_key)), trainer)
    # The characters inside words were special only for the trainer.
    model = models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]")
    trained = word_piece(model, lowercase=lowercase)
    trained.add_special_tokens(list(BERT_SPECIAL))
    return trained


def _characters(tokenizer: Tokenizer, text: Iterator[str]) -> list[str]:
    """The most frequent characters, in the order of Unicode."""
    counts: Counter[str] = Counter()
    for line in text:
        counts.update(tokenizer.normalizer.normalize_str(line))
    visible = [character for character in counts if not character.isspace()]
    return sorted(sorted(visible, key=lambda character: (-counts[character], character))[:MOST_CHARACTERS])


def _continues(tokenizer: Tokenizer, character: str) -> bool:
    """Whether the character can stand inside a word; punctuation, for one, is a word of its own."""
    normal = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(normal)) == 1


def _check_size(vocab_size: int, least: int, what: str) -> None:
    if vocab_size < least:
        raise InputError(f"--vocab-size {vocab_size} is too small: {what} need {least} ids; use {least} or more")
