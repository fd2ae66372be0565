"""Bytes round-trip without touching the special ids; tokenizer files are read with theirs, or refused."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
TEXT = "the mesh maps every layer to a device, and each step adds up what the others have seen.\n"


def train_bpe(path, special_tokens):
    """A byte-level BPE of 300 ids, trained on one sentence and written to `path`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def gpt_file(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("gpt") / "tokenizer.json", ["<|endoftext|>"])


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("bert") / "tokenizer.json", ["[PAD]", "[CLS]", "[SEP]", "[MASK]"])


@given(text=st.text(max_size=200))
@PROPERTY
def test_bytes_round_trip_and_never_emit_a_special_id(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.dtype == np.int32 and len(ids) == len(text.encode())
    specials = {tokenizer.end, tokenizer.mask, tokenizer.start, tokenizer.separator}
    assert len(specials) == 4 and max(specials) < tokenizer.vocab_size
    assert not specials & set(ids.tolist())


def test_no_utf8_text_contains_the_special_bytes():
    """Every character of every plane, surrogates apart (no text has them)."""
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert ByteTokenizer().encode(everything).max() < 0xF8


@given(ids=st.lists(st.integers(0, 255), max_size=40))
@PROPERTY
def test_any_bytes_decode_and_special_ids_are_silent(ids):
    tokenizer = ByteTokenizer()
    spoken = [i for i in ids if i < 0xF8]
    assert tokenizer.decode(ids) == bytes(spoken).decode("utf-8", errors="replace")


@given(text=st.text(max_size=100))
@PROPERTY
def test_a_byte_level_file_round_trips(gpt_file, text):
    tokenizer = load_tokenizer(str(gpt_file))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.dtype == np.int32 and np.all((ids >= 0) & (ids < tokenizer.vocab_size))


def test_a_gpt_file_has_an_end_and_nothing_for_bert(gpt_file):
    tokenizer = FileTokenizer(gpt_file)
    assert tokenizer.end == 0  # special tokens come first
    assert (tokenizer.mask, tokenizer.start, tokenizer.separator) == (None, None, None)
    assert tokenizer.vocab_size <= 300
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode())  # it has merged something


def test_a_bert_file_has_its_special_tokens(bert_file):
    tokenizer = FileTokenizer(bert_file)
    assert (tokenizer.start, tokenizer.separator, tokenizer.mask) == (1, 2, 3)
    assert tokenizer.end == tokenizer.separator  # [SEP] is the best there is between documents
    assert not {0, 1, 2, 3} & set(tokenizer.encode(TEXT).tolist())


def test_ids_beyond_the_vocabulary_are_not_decoded(gpt_file):
    """A model's table may have more rows than the tokenizer has ids."""
    tokenizer = FileTokenizer(gpt_file)
    ids = tokenizer.encode("the mesh").tolist()
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "the mesh"


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path):
    """Ids may have gaps: three tokens, but id 700 needs 701 rows."""
    path = tmp_path / "gaps.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 700, "[UNK]": 5}, unk_token="[UNK]")).save(str(path))
    tokenizer = FileTokenizer(path)
    assert tokenizer.encode("b").tolist() == [700]
    assert tokenizer.vocab_size == 701


def test_the_fingerprint_follows_the_content(gpt_file, bert_file, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(gpt_file.read_bytes())
    prints = [FileTokenizer(path).fingerprint for path in (gpt_file, copy, bert_file)]
    assert prints[0] == prints[1]
    assert len({*prints, ByteTokenizer().fingerprint}) == 3


def test_bytes_need_no_file():
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"{", "not a tokenizers JSON file"),
        (b'{"model": {"type": "unheard of"}}', "not a tokenizers JSON file"),
        (b"\xff\xfe", "not a tokenizers JSON file"),
        (
            json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}).encode(),
            "empty",
        ),
    ],
    ids=["missing", "no JSON", "unknown model", "no UTF-8", "no tokens"],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_tokenizer(str(path))
    assert f"data.tokenizer={path}" in str(caught.value) and words in str(caught.value)


def test_a_long_text_is_read_in_pieces_that_begin_with_spaces(gpt_file, monkeypatch):
    sample = "the mesh maps every layer to a device, and each step adds up " * 20
    tokenizer = FileTokenizer(gpt_file)
    whole = tokenizer.encode(sample).tolist()
    monkeypatch.setattr("jhpt.training.data.tokenizer.LONGEST_TEXT", 64)
    assert tokenizer.encode(sample).tolist() == whole
    assert tokenizer.decode(tokenizer.encode("x" * 500).tolist()) == "x" * 500
    assert [len(ids) > 0 for ids in tokenizer.encode_batch(["a", sample, ""])] == [True, True, False]
