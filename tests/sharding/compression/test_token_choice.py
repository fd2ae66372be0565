"""Tokens chosen as they come: exactly k of them, by a rule that knows no later token."""

import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.sharding.compression.token_choice import causal_choice

LENGTH = 45
"""Windows of 16, and one that is not full."""


def scores(kind, rows=3, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((rows, length)).astype(np.float32)
    drifting = np.cumsum(drawn, 1)
    return {"any": drawn, "levels": np.floor(drawn), "equal": 0 * drawn, "rising": drifting, "unknown": drawn * np.nan}[
        kind
    ]


def chosen(scores, k, window=16):
    choice = np.asarray(causal_choice(jnp.asarray(scores), k, window))
    assert choice.dtype == np.int32 and choice.shape == (len(scores), k)
    return choice


def one_by_one(scores, k, window):
    """The rule, token by token."""
    length, taken = len(scores), []
    for start in range(0, length, window):
        end = min(start + window, length)
        places = (2 * k * end + length) // (2 * length) - (2 * k * start + length) // (2 * length)
        for at in range(start, end):
            last = scores[max(0, at - window + 1) : at + 1]
            stands_out = np.sum(last > scores[at]) * length < k * len(last)
            if places and (stands_out or places == end - at):
                taken.append(at)
                places -= 1
        assert places == 0
    return taken


@pytest.mark.parametrize("kind", ["any", "levels", "equal", "rising", "unknown"])
@pytest.mark.parametrize("k", [0, 1, 14, 44, 45])
def test_is_the_rule_token_by_token(kind, k):
    drawn = scores(kind)
    choice = chosen(drawn, k)
    assert choice.tolist() == [one_by_one(row, k, 16) for row in drawn]
    assert np.all(np.diff(choice, axis=1) > 0) and np.all(choice < LENGTH)


@pytest.mark.parametrize(("length", "window"), [(1, 16), (15, 16), (16, 16), (33, 32), (128, 32)])
def test_any_length(length, window):
    drawn = scores("any", length=length)
    k = -(-length * 3 // 10)
    assert chosen(drawn, k, window).tolist() == [one_by_one(row, k, window) for row in drawn]


def test_later_scores_decide_nothing_about_earlier_tokens():
    drawn, others, k = scores("any"), scores("any", seed=1), 14
    choice = chosen(drawn, k)
    for cut in range(1, LENGTH):
        again = chosen(np.concatenate([drawn[:, :cut], 9 * others[:, cut:]], 1), k)
        for row, other in zip(choice, again, strict=True):
            assert row[row < cut].tolist() == other[other < cut].tolist()


def test_scores_decide():
    """The choice has most of what the k largest, which look ahead, would have."""
    drawn, k = np.square(scores("any", rows=20, length=128)), 39
    total = np.take_along_axis(drawn, chosen(drawn, k, 32), 1).sum(1)
    best = np.sort(drawn, 1)[:, -k:].sum(1)
    assert np.mean(total / best) > 0.75 > 0.5 > k / 128


def test_more_than_there_are():
    with pytest.raises(ValueError, match="k=5 of 4 tokens"):
        causal_choice(jnp.zeros((1, 4)), 5)
