"""How much larger a model a device trains with blocks on the host."""

import pytest

from jhpt.bench.memory import largest_model
from jhpt.bench.memory.largest_model import WIDTHS, largest_trainable
from jhpt.core.cluster_file import find_cluster
from jhpt.planner.api import RESERVE, capped
from tests.covers import quick_and_exhaustive

DEVICE, HOST = 24 * 2**30, 110 * 2**30
LOW_PRECISION = {"weights": "bfloat16_stochastic", "moments": "int8"}


@pytest.fixture(scope="module", params=quick_and_exhaustive(["extreme widths", "all widths"], ["extreme widths"]))
def widths(request):
    """The largest models have them: the least without blocks on the host, the greatest with them."""
    some = list(WIDTHS)[::4] if request.param == "extreme widths" else WIDTHS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest_model, "WIDTHS", {width: WIDTHS[width] for width in some})
        yield


@pytest.fixture(scope="module")
def found(widths):
    """(without, with) blocks on the host of one H100 of which 24 GiB may be used."""
    cluster = capped(find_cluster("h100x1x1"), DEVICE, HOST)
    return largest_trainable(cluster, (None,)), largest_trainable(cluster, ("both",))


def test_the_leaner_of_both(widths):
    """14 bytes a parameter of the device, 12 of the host."""
    cluster = capped(find_cluster("h100x1x1"), DEVICE, HOST)
    without, offloaded = (
        largest_trainable(cluster, (None,), zero=3),
        largest_trainable(cluster, ("both",), update_in_backward=True),
    )
    assert without.plan.zero == 3 and offloaded.plan.offload.update_in_backward
    assert offloaded.parameters == pytest.approx(10.02e9, rel=1e-3)
    assert without.parameters == pytest.approx(1.637e9, rel=1e-3)
    (own,), (stage,) = without.estimate.stages, offloaded.estimate.stages
    assert own.total_bytes + 14 * without.config.model.parameter_count().per_layer > (1 - RESERVE) * DEVICE
    assert stage.total_host_bytes + 12 * offloaded.config.model.parameter_count().per_layer > HOST


def test_low_precision_state_holds_more(widths):
    """Of all ways without the host it is the leanest, so it is what offload is compared with."""
    cluster = capped(find_cluster("h100x1x1"), DEVICE, HOST)
    leanest = largest_trainable(cluster, (None,), zero=3, optimizer=LOW_PRECISION)
    assert leanest.parameters == pytest.approx(2.86e9, rel=2e-3)


def test_five_times_the_parameters(found):
    """8 sequences of 1,024 tokens: 7.50 instead of 1.35 billion."""
    without, offloaded = found
    assert offloaded.parameters / without.parameters >= 4.9
    assert offloaded.parameters == pytest.approx(7.50e9, rel=1e-3)
    assert without.parameters == pytest.approx(1.354e9, rel=1e-3)


def test_both_are_as_large_as_memory_is(found):
    """One more block would not fit: the device without, the host with blocks there."""
    without, offloaded = found
    (own,), (stage,) = without.estimate.stages, offloaded.estimate.stages
    assert without.estimate.fits and offloaded.estimate.fits
    assert own.total_bytes + 18 * without.config.model.parameter_count().per_layer > (1 - RESERVE) * DEVICE
    assert stage.total_host_bytes + 16 * offloaded.config.model.parameter_count().per_layer > HOST
