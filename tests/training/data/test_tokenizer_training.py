"""Any text passes through bytes, BERT's pieces are the library's, and the same text gives the same file."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.implementations import BertWordPieceTokenizer

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.data.tokenizer_kinds import BERT_SPECIAL
from jhpt.training.data.tokenizer_training import MOST_CHARACTERS, _short_words, train_tokenizer
from tests.conftest import text
from tests.training.data.test_tokenizer import PROPERTY

SAMPLE = text(3000) + "Été à la mesh, l'été; it's 中文 42.\n" * 4


@pytest.fixture
def files(tmp_path):
    """The sample, half of it as text and half as JSON lines."""
    half = SAMPLE.index("\n", len(SAMPLE) // 2) + 1
    (tmp_path / "a.txt").write_text(SAMPLE[:half])
    lines = [json.dumps({"body": line}) for line in SAMPLE[half:].splitlines()]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def trained(files, kind, size, **options):
    """The tokenizer as the data pipeline reads it, and its file."""
    file = files[0].parent / f"{kind}-{size}.json"
    train_tokenizer(files, kind, size, text_key="body", **options).save(str(file))
    return load_tokenizer(str(file)), file


def test_bytes_give_any_text_back(files):
    tokenizer, _ = trained(files, "bpe", 320)
    assert (tokenizer.vocab_size, tokenizer.end) == (320, 0)
    assert tokenizer.decode([0]) == "" and tokenizer.encode("<|endoftext|>").tolist() == [0]
    assert len(tokenizer.encode(SAMPLE)) < 0.7 * len(SAMPLE.encode())

    @given(st.text(max_size=100))
    @PROPERTY
    def gives_back(sample):
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids.tolist()) == sample
        assert len(ids) <= len(sample.encode())

    gives_back()
    everything = "".join(map(chr, [*range(0, 0xD800, 7), *range(0xE000, 0x110000, 97)]))
    assert tokenizer.decode(tokenizer.encode(everything).tolist()) == everything


@pytest.mark.parametrize("lowercase", [False, True])
def test_word_pieces_are_the_librarys(files, lowercase):
    """The same vocabulary in the library's own BERT tokenizer cuts text in the same way."""
    tokenizer, file = trained(files, "wordpiece", 140, lowercase=lowercase)
    vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    theirs = BertWordPieceTokenizer(vocabulary, lowercase=lowercase)

    @given(st.text("theмesh Éé,.çß中\n'1", max_size=60))
    @PROPERTY
    def same(sample):
        ids = tokenizer.encode(sample).tolist()
        assert ids == theirs.encode(sample, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == theirs.decode(ids)

    same()
    assert [vocabulary[token] for token in BERT_SPECIAL] == [0, 1, 2, 3, 4]
    assert (tokenizer.start, tokenizer.separator, tokenizer.mask) == (2, 3, 4)
    assert 1 not in tokenizer.encode(SAMPLE), "no word of the text is unknown"
    assert any(token.lower() != token for token in set(vocabulary) - set(BERT_SPECIAL)) != lowercase


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_text_gives_the_same_file(files, kind):
    """The library's trainer iterates over hash tables of another order in every call."""
    texts = {train_tokenizer(files, kind, 300, text_key="body").to_str() for _ in range(4)}
    assert len(texts) == 1


def test_the_library_alone_numbers_word_pieces_at_random(files):
    """Why characters inside words are numbered before: if this fails, that is no longer needed."""
    from tokenizers import models, pre_tokenizers, trainers

    def alone() -> str:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator(SAMPLE.splitlines(), trainer)
        return tokenizer.to_str()

    assert len({alone() for _ in range(8)}) > 1


def test_word_pieces_know_the_most_frequent_characters(tmp_path):
    """Of 1,100 characters the rarest hundred are unknown; between equally frequent ones the code point decides."""
    characters = [chr(0x4E00 + index) for index in range(MOST_CHARACTERS + 100)]
    (tmp_path / "text.txt").write_text("".join(characters + characters[100:500]))
    tokenizer = train_tokenizer([tmp_path / "text.txt"], "wordpiece", 2000)
    known = [character for character in characters if tokenizer.token_to_id(character) is not None]
    assert known == characters[:MOST_CHARACTERS]
    assert not any(token.startswith("##") for token in tokenizer.get_vocab()), "each is a word of its own"


@pytest.mark.parametrize(("kind", "what"), [("bpe", "256 bytes"), ("wordpiece", "characters")])
def test_the_least_size_is_said_and_enough(files, kind, what):
    with pytest.raises(InputError, match=f"--vocab-size 7 is too small: .*{what} need") as caught:
        train_tokenizer(files, kind, 7, text_key="body")
    least = int(str(caught.value).split(" or more")[0].split()[-1])
    assert train_tokenizer(files, kind, least, text_key="body").get_vocab_size() == least
    with pytest.raises(InputError, match="too small"):
        train_tokenizer(files, kind, least - 1, text_key="body")


def test_a_short_text_has_fewer_ids(tmp_path):
    (tmp_path / "text.txt").write_text("the mesh the mesh\n")
    tokenizer = train_tokenizer([tmp_path / "text.txt"], "bpe", 5000)
    assert 257 < tokenizer.get_vocab_size() < 280


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "unigram"}, "kind='unigram': use bpe or wordpiece"),
        ({"lowercase": True}, "lowercase is for wordpiece"),
        ({"text_key": "text"}, "no text under 'text'"),
    ],
)
def test_what_cannot_be_trained_is_refused(files, arguments, words):
    with pytest.raises(InputError, match=words):
        train_tokenizer(files[::-1], **{"kind": "bpe", "vocab_size": 300, "text_key": "body"} | arguments)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_text_is_refused(content, tmp_path):
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises(InputError, match=r"no text in .*text\.txt; give files with text"):
        train_tokenizer([tmp_path / "text.txt"], "wordpiece", 300)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_an_overlong_word_is_learned_from_in_parts(tmp_path, kind):
    """As one word it would take the library hours."""
    (tmp_path / "a.txt").write_text("ab" * 500_000)
    tokenizer, _ = trained([tmp_path / "a.txt"], kind, 300)
    assert 0 < len(tokenizer.encode("abab")) < 4


def test_words_are_cut_only_where_they_are_overlong():
    lines = ["a b\n", "x" * 1000 + " y\n", "x" * 1001 + "\n", "x" * 2500 + " y"]
    parts = list(_short_words(iter(lines)))
    assert parts == [*lines[:2], "x" * 1000, "x\n", "x" * 1000, "x" * 1000, "x" * 500 + " y"]
