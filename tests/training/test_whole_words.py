"""`data.whole_words`: pieces of a word are masked together, with as many predictions as ever."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jhpt.core.errors import InputError
from jhpt.core.families.family import masked_positions
from jhpt.models.family import Rows, build
from jhpt.models.masking import mask_tokens
from jhpt.training.data.tokenizer import ByteTokenizer, load_tokenizer
from jhpt.training.parts import make_parts
from jhpt.training.setup import fitting_tokenizer

LENGTH, FRACTION, ROWS = 40, 0.2, 400
CONTINUES = np.arange(256) % 3 != 0
"""Ids of which every third begins a word."""


@pytest.fixture
def pieces(tmp_path):
    """A WordPiece tokenizer's file, with a gap in its ids."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "mesh": 4, "##es": 5, "##s": 7, "#": 8}
    file = tmp_path / "pieces.json"
    tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(file))
    return str(file)


@pytest.mark.parametrize("padded", [False, True])
def test_words_are_masked_whole(padded):
    """All but the last one that is chosen; the number of predictions is that of single tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (ROWS, LENGTH)).astype(np.int32)
    lengths = rng.integers(3, LENGTH + 1, ROWS) if padded else np.full(ROWS, LENGTH)
    keys = jax.random.split(jax.random.key(0), ROWS)
    found = mask_tokens(keys, tokens, FRACTION, ByteTokenizer(), lengths if padded else None, CONTINUES)
    cut = 0
    for row, length in enumerate(lengths):
        at = np.asarray(found.positions[row])
        at = at[np.asarray(found.predicts[row])] if padded else at
        assert len(at) == masked_positions(int(length), FRACTION) and at.min() > 0 and at.max() < length - 1
        words = np.cumsum(~CONTINUES[tokens[row, 1 : length - 1]])
        chosen = np.isin(np.arange(1, length - 1), at)
        partly = [word for word in set(words) if 0 < chosen[words == word].sum() < (words == word).sum()]
        assert len(partly) <= 1
        cut += len(partly)
    assert 0 < cut < ROWS


def test_words_are_equally_likely_whatever_their_length():
    """One word of two pieces among 19 of one: of one position, it is chosen with probability 1 / 20."""
    tokens = np.full((4_000, 23), 6, np.int32)
    tokens[:, 10:12] = 3, 4
    keys = jax.random.split(jax.random.key(1), len(tokens))
    at = np.asarray(mask_tokens(keys, tokens, 0.05, ByteTokenizer(), None, CONTINUES).positions)
    assert at.shape[1] == 1 and not (at == 11).any()
    assert np.mean(at == 10) == pytest.approx(1 / 20, abs=0.011)  # three standard deviations


def test_pieces_are_told_from_the_vocabulary(pieces):
    assert load_tokenizer(pieces).continues.tolist() == [False] * 5 + [True, False, True, False]
    assert load_tokenizer("bytes").continues is None


def test_a_tokenizer_without_pieces_is_refused(tiny):
    with pytest.raises(InputError, match=r"whole_words=true needs a WordPiece tokenizer.*leave data\.whole_words out"):
        fitting_tokenizer(tiny("bert-tiny", **{"data.whole_words": True}))


def test_training_masks_whole_words(tiny, pieces):
    """The setting reaches the masks: with it other tokens are read."""
    settings = {"data.tokenizer": pieces, "model.num_layers": 1, "model.vocab_size": 9, "parallel.data": 1}
    rows = Rows(np.tile(np.array([1, *[4, 5, 7, 8, 4, 7] * 5, 2], np.int32), (16, 1)))
    keys, read = jax.random.split(jax.random.key(1), 16), []
    for whole in (False, True):
        config = tiny("bert-tiny", **settings | {"data.whole_words": whole})
        model = build(config.model)
        parts = make_parts(model, config.data, fitting_tokenizer(config), 0.0, train=False)
        params = model.init(jax.random.key(0))
        read.append(parts.embed(params, rows, parts.context(rows, keys)))
    assert not np.array_equal(*read)
