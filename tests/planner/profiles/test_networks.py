"""The tables add up to the published totals; what the planner reads of them is sound."""

import itertools

import pytest

from jhpt.core.catalogue import device_named
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.profile import load_profile
from jhpt.planner.profiles.networks import TABLES, network_layers, network_profile

ENDLESS = Device(name="endless", peak_flops={"bfloat16": 1.0}, memory=1.0, memory_bandwidth=1e300)
"""One FLOP a second, and memory that costs nothing."""


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        # torchvision: 138 357 544 and 15.47 G; 25 557 032 and 4.09 G.
        ("vgg16", 138_357_544, 15.47e9),
        ("resnet50", 25_557_032, 4.09e9),
        # NVIDIA GNMT v2, "160M parameters".  Products of 50 tokens: encoder LSTMs 4 x 1024 x (2 x 2048 + 3072 + 2 x
        # 2048), decoder 4 x 1024 x (2048 + 3 x 3072), words 32320 x 1024, attention 2 x 1024^2 + 2 x 50 x 1024.
        ("gnmt", 160.5e6, 50 * (4096 * 22528 + 32320 * 1024 + 2 * 1024**2 + 2 * 50 * 1024)),
    ],
)
def test_published_totals(name, parameters, macs):
    layers = network_layers(name)
    assert sum(layer.parameters for layer in layers) == pytest.approx(parameters, rel=1e-9 if name != "gnmt" else 5e-3)
    assert sum(layer.macs for layer in layers) == pytest.approx(macs, rel=2e-3)


@pytest.mark.parametrize(("name", "layers"), [("vgg16", 16), ("resnet50", 18), ("gnmt", 10)])
def test_layers(name, layers):
    assert len(network_layers(name)) == layers


@pytest.mark.parametrize("name", TABLES)
def test_layers_of_one_kind_are_equal_and_fit_together(name):
    by_kind = {}
    for layer in network_layers(name):
        assert by_kind.setdefault(layer.kind, layer) == layer
    for before, after in itertools.pairwise(network_layers(name)):
        if name != "gnmt" and after.kind not in ("fc", "fc6"):
            # Decoder layers also read what earlier ones hand on, and a global pooling precedes fc.
            assert after.products[0].inputs == before.outputs


@pytest.mark.parametrize("name", TABLES)
def test_seconds_are_those_of_the_products_where_memory_is_free(name):
    profile = network_profile(name, ENDLESS)
    for layer in network_layers(name):
        kind = profile.kinds[layer.kind]
        for tensor in (1, kind.max_tensor):
            forward, backward = kind.seconds(4, tensor)
            assert forward == pytest.approx(4 * 2 * layer.macs / tensor, abs=1e-6)
            assert backward == pytest.approx(2 * forward, abs=1e-6)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("device", ["v100", "b200"])
def test_profiles_are_monotone_and_survive_a_file(name, device, tmp_path):
    profile = network_profile(name, device_named(device))
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    for kind in profile.kinds.values():
        assert kind.timings[-1].tensor == kind.max_tensor
        assert (kind.tensor_forward_bytes > 0) == (kind.max_tensor > 1)
        for timing in kind.timings:
            assert list(timing.forward) == sorted(timing.forward)
            assert list(timing.backward) == sorted(timing.backward)
        for lower, higher in itertools.pairwise(kind.timings):
            assert all(a >= b for a, b in zip(lower.backward, higher.backward, strict=True))


def test_a_recurrent_layer_takes_its_steps_one_after_the_other():
    """50 small products take longer than one of their FLOP."""
    device = device_named("v100")
    layer = next(layer for layer in network_layers("gnmt") if layer.kind == "encoder")
    whole = device.seconds(2 * layer.macs, 0, "bfloat16")
    assert network_profile("gnmt", device).kinds["encoder"].seconds(1, 1)[0] > 5 * whole


def test_unknown_network():
    with pytest.raises(InputError, match="did you mean resnet50"):
        network_profile("resnet5", ENDLESS)
