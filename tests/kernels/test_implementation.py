"""Which programs a device gets."""

import pytest

from jhpt.kernels.implementation import choose_kernels


@pytest.mark.parametrize(
    ("platform", "capability", "expected", "word"),
    [
        ("cpu", None, "reference", "a cpu"),
        ("gpu", 9.0, "mosaic", "Hopper"),
        ("cuda", 9.0, "mosaic", "Hopper"),
        ("gpu", 8.0, "reference", "8.0"),
        ("gpu", 10.0, "reference", "10.0"),
        ("gpu", None, "reference", "None"),
        ("rocm", 9.0, "reference", "a rocm"),
    ],
)
def test_pallas_is_for_hopper(platform, capability, expected, word):
    choice = choose_kernels(platform, capability)
    assert choice.implementation == expected and word in choice.reason
