"""Which devices can be compiled for, and how they are described."""

import re

import pytest

from jhpt.compiled.targets import MULTIPROCESSORS, chip_of, target_config
from jhpt.core.catalogue import device_named, kinds_with_chips
from jhpt.core.errors import InputError


def described(kind):
    """{field: number} of a device's description."""
    config = target_config(device_named(kind))
    return {name: float(value) for name, value in re.findall(r"(\w+): (-?[\d.e+]+)\b", config)}


@pytest.mark.parametrize("kind", kinds_with_chips())
def test_every_chip_of_the_catalogue_is_described(kind):
    device = device_named(kind)
    assert chip_of(device).capability in MULTIPROCESSORS
    fields = described(kind)
    assert (
        fields["shared_memory_per_block"] < fields["shared_memory_per_block_optin"] < fields["shared_memory_per_core"]
    )
    assert fields["device_memory_size"] > device.memory


def test_a_description_read_off_a_device():
    """Of OpenXLA's h100_sxm."""
    expected = {
        "core_count": 132,
        "fpus_per_core": 128,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "block_dim_limit_x": 2147483647,
        "major": 9,
        "active_links": 18,
    }
    fields = described("h100")
    assert {name: fields[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA H100 NVL", "no device that can be compiled for; compiling works for a100, .* or gh200"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("cpu", "no device that can be compiled for"),
    ],
)
def test_other_devices_are_refused(name, words):
    with pytest.raises(InputError, match=words):
        chip_of(device_named("h100").model_copy(update={"name": name}))
