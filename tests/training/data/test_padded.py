"""`data.packing: pad`: every document, whole or in pieces, once; nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.training.data import padded
from jhpt.training.data.padded import padded_rows
from jhpt.training.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
LENGTH = 6


def stream(sizes, last_ends):
    """Documents of so many tokens, whose values count through all of them."""
    parts, value = [], 0
    for size in sizes:
        parts += [np.arange(value, value + size) % 200, [BYTES.end]]
        value += size
    tokens = np.concatenate([[], *parts]).astype(np.uint16)
    return tokens if last_ends else tokens[:-1]


def documents(tokens):
    """Their tokens, by hand; the end token is left on."""
    found, so_far = [], []
    for token in tokens.tolist():
        so_far.append(token)
        if token == BYTES.end:
            found.append(so_far)
            so_far = []
    return [*found, so_far]


def read(tokens, masked):
    try:
        rows = padded_rows(tokens, LENGTH, "training", BYTES, masked=masked)
    except InputError as error:
        assert "no document with a token to predict" in str(error)
        return []
    assert all(rows[index].dtype == np.int32 for index in range(len(rows)))
    return [rows[index].tolist() for index in range(len(rows))]


SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(sizes=SIZES, last_ends=st.booleans(), at_once=st.integers(1, 40))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_gpt_predicts_every_token_but_the_first_of_a_document_once(sizes, last_ends, at_once):
    tokens = stream(sizes, last_ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded, "READ_AT_ONCE", at_once)
        rows = read(tokens, masked=False)
    predicted = []
    for row in rows:
        assert len(row) == LENGTH + 1
        predicted += [pair for pair in pairwise(row) if pair[0] != BYTES.end]
    *whole, rest = documents(tokens)  # the rest has no end: its whole pieces only
    expected = [pair for document in whole for pair in pairwise(document)]
    assert predicted == expected + list(pairwise(rest[: max(len(rest) - 1, 0) // LENGTH * LENGTH + 1]))


@given(sizes=SIZES, last_ends=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_bert_reads_every_token_once(sizes, last_ends):
    tokens = stream(sizes, last_ends)
    expected = []
    for document in documents(tokens):
        text = [token for token in document if token != BYTES.end]
        for first in range(0, len(text), LENGTH - 2):
            piece = [BYTES.start, *text[first : first + LENGTH - 2]]
            expected.append(piece + [BYTES.separator] * (LENGTH - len(piece)))
    assert read(tokens, masked=True) == expected


@pytest.mark.parametrize("masked", [False, True])
def test_text_without_a_token_to_predict_is_refused(masked):
    with pytest.raises(InputError, match="the validation text has no document"):
        padded_rows(stream([0, 0], last_ends=True), LENGTH, "validation", BYTES, masked=masked)
