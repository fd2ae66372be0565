"""Days, device-hours and cost: by hand, per kind, with idle devices; what cannot be counted is refused."""

import pytest

from jhpt.core.catalogue import cluster_named
from jhpt.core.errors import InputError
from jhpt.planner.report.answer import to_json
from jhpt.planner.report.rent import check_tokens, hourly_price, read_prices, read_tokens, rent, rent_lines
from tests.planner.report.test_explain import PIPELINE, answer_of, model_of

TOKENS_OF_A_STEP = 8 * 128
"""Of `PIPELINE`, for 4 of 6 A100."""


def prices_of(text, *names):
    return read_prices(text, [cluster_named(name) for name in names])


def test_by_hand():
    """10 steps of s seconds on 6 devices at 2.5: 10 s / 3600 x 6 device-hours, and 2.5 times that."""
    answer = answer_of(PIPELINE)
    found, seconds = rent(answer, 9.5 * TOKENS_OF_A_STEP, prices_of("2.5", "a100x2x3")), answer.estimate.seconds
    assert (found.steps, found.devices, found.idle) == (10, 6, 2)
    assert found.seconds == pytest.approx(10 * seconds)
    assert found.device_hours == pytest.approx(10 * seconds / 3600 * 6)
    assert found.cost == pytest.approx(2.5 * found.device_hours)
    assert found.per_token == pytest.approx(found.cost / (10 * TOKENS_OF_A_STEP))
    first, second = rent_lines(found, answer)
    assert "10 steps" in first and "GPU-hours" in first and "per billion tokens" in first
    assert "all 6 GPUs, 2 idle ones included, at 2.5 per GPU-hour" in second


def test_without_tokens_only_what_one_costs():
    answer = answer_of(PIPELINE)
    found = rent(answer, None, prices_of("2.5", "a100x2x3"))
    assert set(found.to_json()) == {"cost_per_hour", "cost_per_billion_tokens"}
    assert rent_lines(found, answer)[0].startswith("cost: ")
    assert rent(answer, None, None) is None
    assert "rent" not in to_json(answer)


def test_without_a_price_no_cost():
    answer = answer_of(PIPELINE)
    found = rent(answer, 1e9, None)
    assert {"tokens", "steps", "days", "device_hours"} == set(found.to_json())
    assert "cost" not in "".join(rent_lines(found, answer))
    assert to_json(answer, rent=found)["rent"] == found.to_json()


def test_prices_per_kind():
    first, second = cluster_named("h100x8x2"), cluster_named("a10040x4x3")
    mixed = first.model_copy(update={"nodes": (*first.nodes, *second.nodes)})
    prices = read_prices("h100=2.5, A10040=1", [mixed])
    assert hourly_price(mixed, prices) == pytest.approx(16 * 2.5 + 12 * 1)
    with_rest = read_prices("h100=2.5,a10040=1", [first, second])
    assert hourly_price(first, with_rest) == 40 and hourly_price(second, with_rest) == 12
    assert hourly_price(mixed, read_prices("3", [mixed])) == 28 * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cheap", ["'cheap'", "2.5"]),
        ("nan", ["'nan'"]),
        ("-1", ["'-1'"]),
        ("2,3", ["one per kind"]),
        ("h100=2,h100=3", ["one per kind"]),
        ("=2", ["one per kind"]),
        ("a100=2", ["no price for h100", "h100=PRICE"]),
        ("h100=2,h10=3", ["'h10'", "did you mean h100?"]),
        ("h100=2,b200=3", ["'b200'"]),
    ],
)
def test_prices_that_are_none(text, words):
    with pytest.raises(InputError) as error:
        prices_of(text, "h100x8x1")
    assert all(word in str(error.value) for word in ("price=", *words)), str(error.value)


@pytest.mark.parametrize("text", ["", "many", "0", "-3B", "2X", "1e999", "260 B B"])
def test_tokens_that_are_none(text):
    with pytest.raises(InputError, match="tokens="):
        read_tokens(text)


def test_counts_with_a_suffix():
    assert [read_tokens(text) for text in ("260B", "1.5t", "300 M", "2e3", "7K")] == [260e9, 1.5e12, 3e8, 2000, 7000]


def test_samples_without_tokens_are_refused():
    profile = model_of().profile.model_copy(update={"sample": "an image of 224 x 224"})
    with pytest.raises(InputError, match="no tokens to count; leave out tokens and price"):
        check_tokens(profile, 1e9, {"": 1.0})
    check_tokens(profile, None, None)
