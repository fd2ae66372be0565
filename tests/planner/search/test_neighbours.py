"""Batches beside the requested one: what they would save, and where nothing is said."""

from dataclasses import replace

import pytest

from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import price
from jhpt.planner.report.answer import summary, to_json
from jhpt.planner.search.neighbours import GAIN, NEARBY, better_batch


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "better"),
    [("gpt2-124m", "h100x7x1", 64, 63), ("gpt2-1.5b", "h100x8x3", 256, 264)],
)
def test_a_batch_that_the_devices_divide_is_named(model, cluster, batch, better):
    """Its plan fits, costs what is said, uses all devices, and a search at that batch finds none that is slower."""
    answer = prepare(model, cluster=cluster, batch=batch).solve()
    found = better_batch(answer)
    assert found is not None and found.batch == found.plan.batch == better
    assert found.plan.devices == answer.model.cluster.num_devices
    estimate = price(found.plan, answer.model)
    assert estimate.fits and estimate.seconds == found.seconds
    assert found.ratio == pytest.approx(found.seconds / better / (answer.estimate.seconds / batch))
    assert found.ratio <= 1 - GAIN
    there = prepare(model, cluster=cluster, batch=better).solve()
    assert there.estimate.seconds <= found.seconds * (1 + 1e-9)
    assert better_batch(there) is None and to_json(there)["better_batch"] is None

    told = f"batch {better} would take {100 * (1 - found.ratio):.1f} % less time per sample: "
    assert summary(answer)[-1].startswith(told)
    tree = to_json(answer)["better_batch"]
    assert (tree["batch"], tree["ratio"]) == (better, found.ratio) and tree["why"].startswith(told)


def test_neighbours_are_near_and_keep_what_was_requested():
    """65 samples on 8 devices: 64 is near and 72, too.  Micro-batches that are given must divide the neighbour."""
    task = prepare("gpt-tiny", cluster="a100x8x1", batch=65)
    answer = task.solve()
    found = better_batch(answer)
    assert found is not None and abs(found.batch - 65) <= 65 / NEARBY and found.batch % 8 == 0
    for counts, possible in (((5, 13), False), ((1,), True)):
        asked = replace(task.request, micro_batches=counts)
        other = better_batch(replace(answer, request=asked))
        assert (other is not None) == possible
        assert other is None or other.plan.micro_batches in counts
    assert better_batch(replace(answer, request=replace(task.request, offload=("both",)))) is None
    assert better_batch(replace(answer, request=None)) is None
