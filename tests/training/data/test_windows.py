"""Windows cover a token stream without loss, and refuse a stream that is too short."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.data.windows import causal_windows, masked_windows

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
BYTES = ByteTokenizer()


def stream(size):
    return (np.arange(size) % 251).astype(np.uint8)


@given(size=st.integers(2, 400), length=st.integers(1, 40))
@PROPERTY
def test_causal_windows_predict_every_token_once(size, length):
    """Inputs are consecutive, each target is the next token, and less than one sequence is left over."""
    if size <= length:
        return
    tokens = stream(size)
    windows = causal_windows(tokens, length, "training")
    rows = np.stack([windows[index] for index in range(len(windows))])
    assert rows.shape == (len(windows), length + 1) and rows.dtype == np.int32
    covered = len(windows) * length
    np.testing.assert_array_equal(rows[:, :-1].ravel(), tokens[:covered])
    np.testing.assert_array_equal(rows[:, 1:].ravel(), tokens[1 : covered + 1])
    assert 0 <= size - 1 - covered < length


@given(size=st.integers(1, 400), length=st.integers(3, 40))
@PROPERTY
def test_masked_windows_hold_every_token_once_between_cls_and_sep(size, length):
    if size < length - 2:
        return
    tokens = stream(size)
    windows = masked_windows(tokens, length, "training", BYTES)
    rows = np.stack([windows[index] for index in range(len(windows))])
    assert rows.shape == (len(windows), length) and rows.dtype == np.int32
    assert set(rows[:, 0]) == {BYTES.start} and set(rows[:, -1]) == {BYTES.separator}
    covered = len(windows) * (length - 2)
    np.testing.assert_array_equal(rows[:, 1:-1].ravel(), tokens[:covered])
    assert 0 <= size - covered < length - 2


@pytest.mark.parametrize("size", [0, 1, 8])
def test_a_stream_shorter_than_a_causal_sequence_is_refused(size):
    with pytest.raises(InputError) as caught:
        causal_windows(stream(size), 8, "validation")
    for word in ("validation", f"{size} tokens", "sequence of 8", "data.sequence_length"):
        assert word in str(caught.value)
    assert len(causal_windows(stream(9), 8, "validation")) == 1


@pytest.mark.parametrize("size", [0, 5])
def test_a_stream_shorter_than_a_masked_sequence_is_refused(size):
    with pytest.raises(InputError, match=f"training text has {size} tokens"):
        masked_windows(stream(size), 8, "training", BYTES)
    assert len(masked_windows(stream(6), 8, "training", BYTES)) == 1


def test_a_masked_sequence_has_room_for_a_token():
    with pytest.raises(InputError, match=r"data\.sequence_length=2"):
        masked_windows(stream(9), 2, "training", BYTES)


@pytest.mark.parametrize("missing", ["mask", "start", "separator"])
def test_bert_needs_its_special_tokens(missing):
    @dataclass
    class Lacking(ByteTokenizer):
        mask: int | None = 1
        start: int | None = 2
        separator: int | None = 3

    with pytest.raises(InputError) as caught:
        masked_windows(stream(9), 8, "training", Lacking(**{missing: None}))
    assert f"no {missing} token" in str(caught.value) and "[MASK]" in str(caught.value)
