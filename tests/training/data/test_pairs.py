"""Rows of pairs: `[CLS] A [SEP] B [SEP]`, of which half go together."""

import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.training.data.pairs import ELSEWHERE, FOLLOWS, paired_rows
from jhpt.training.data.tokenizer import ByteTokenizer

START, SEPARATOR = ByteTokenizer().start, ByteTokenizer().separator
PIECES = 4_000


def rows_of(length, pieces=PIECES):
    """Pairs of a stream whose tokens tell where they are, and have a rest."""
    return paired_rows(np.arange(1_000, 1_000 + pieces * (length - 3) + 1), length, "training", ByteTokenizer())


@pytest.mark.parametrize("length", [5, 16, 17])
def test_the_second_piece_follows_where_the_label_says_so(length):
    rows, half = rows_of(length), (length - 3) // 2
    assert len(rows) == PIECES
    labels = []
    for index in range(PIECES):
        tokens, (size, begins, label) = np.split(rows[index], [length])
        assert (size, begins) == (length, half + 2) and rows[index].dtype == np.int32
        assert [tokens[0], tokens[begins - 1], tokens[-1]] == [START, SEPARATOR, SEPARATOR]
        first, second = tokens[1 : begins - 1], tokens[begins:-1]
        assert first[0] == 1_000 + index * (length - 3) and (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
        apart = (second[0] - first[-1] - 1) / (length - 3)
        assert (label == FOLLOWS) == (apart == 0)
        if label == ELSEWHERE:
            assert PIECES / 4 <= abs(apart) <= PIECES * 3 / 4
        labels.append(label)
    assert np.mean(labels) == pytest.approx(0.5, abs=0.024)  # three standard deviations
    assert np.mean(np.diff(labels) != 0) == pytest.approx(0.5, abs=0.024)


def test_a_row_depends_on_its_number_alone():
    rows, again = rows_of(16), rows_of(16)
    backwards = [again[np.int64(index)] for index in reversed(range(50))]
    np.testing.assert_array_equal([rows[index] for index in range(50)], backwards[::-1])


@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_short_texts_have_pairs(pieces):
    """Of two pieces at least: what follows is never said to be from elsewhere."""
    rows = rows_of(9, pieces)
    for index in range(pieces):
        tokens, (_, _, label) = np.split(rows[index], [9])
        assert (tokens[5] == tokens[3] + 1) == (label == FOLLOWS)


def test_one_pair_is_refused():
    with pytest.raises(InputError, match=r"the training text has 14 tokens, too few for two pairs of 16.*give more"):
        rows_of(16, pieces=1)
