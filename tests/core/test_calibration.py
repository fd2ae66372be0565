"""The figures that come with jhpt are complete, plausible, and reach every device of the catalogue."""

import pytest

from jhpt.core.calibration import architecture, figures, grouped, order_error, ours, residuals
from jhpt.core.catalogue import cluster_named, device_named, kinds


def test_figures_are_shares():
    found = figures()
    shares = [*found.products.values(), *found.fused_attention.values(), found.inside, found.network, found.flash1]
    assert all(0.3 < share <= 1.2 for share in shares)
    assert 1 < found.traffic < 3 and 0 < found.exposed_gathers < 1
    assert set(found.products) == {"volta", "ampere", "hopper"}
    assert 0.02 < order_error() < 0.1


@pytest.mark.parametrize(
    ("capability", "name"), [(7.0, "volta"), (8.0, "ampere"), (8.9, "ampere"), (9.0, "hopper"), (10.0, "hopper")]
)
def test_every_architecture_has_figures(capability, name):
    assert architecture(capability) == name
    assert architecture(None) == "hopper"


@pytest.mark.parametrize("kind", kinds())
def test_no_device_sustains_its_peak(kind):
    device = device_named(kind)
    assert device.sustained("bfloat16") < 0.96 * device.peak_flops["bfloat16"]
    cluster = cluster_named(f"{kind}x1x2")
    assert cluster.nodes[0].inside.reached < 1 and cluster.network.reached < 1 and cluster.network.decline > 0


def test_a_power_limit_lowers_the_clock():
    full, half = device_named("h100"), device_named("h100", power=350)
    assert half.sustained("bfloat16") == pytest.approx(0.5**0.5 * full.sustained("bfloat16"), rel=1e-3)
    assert device_named("h100", power=900) == full


def test_other_figures_give_other_devices():
    names = {"products.volta", "products.ampere", "products.hopper", "fused_attention.ampere"}
    values = dict.fromkeys(names, 0.5) | dict.fromkeys(
        ("inside", "network", "decline", "sharing", "traffic", "exposed_gathers", "exposed_gradients", "flash1"), 0.25
    )
    fitted = grouped(values)
    cluster = cluster_named("a100x8x2", fitted)
    share = device_named("a100").sustained("bfloat16") / figures().products["ampere"]
    assert cluster.nodes[0].device.sustained("bfloat16") == pytest.approx(0.5 * share, rel=1e-3)
    assert cluster.nodes[0].device.fused_attention == 0.5
    assert (cluster.nodes[0].inside.reached, cluster.network.reached, cluster.network.decline) == (0.25, 0.25, 0.25)


def test_residuals_are_around_one():
    runs = residuals()
    assert len(runs) > 100
    assert all(0.3 < run.ratio < 3 for run in runs)
    assert {run.device for run in runs} <= set(kinds())


def test_our_own_program():
    assert ours().name == "jhpt" and not ours().keeps_scores
    assert ours().exposed_gathers == figures().exposed_gathers
