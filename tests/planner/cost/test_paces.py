"""Whose seconds count on a cluster of several kinds of devices."""

import numpy as np
import pytest

from jhpt.core.cluster import Device
from jhpt.core.config import Compression
from jhpt.core.errors import InputError
from jhpt.planner.cost.communication import compression_kernel_seconds, stream_of
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.paces import paces
from tests.planner.cost.test_estimate import layer, model
from tests.planner.search.test_rows import cluster_of, node


def device(name: str, peak: float, bandwidth: float = 1.0) -> Device:
    return Device(name=name, peak_flops={"bfloat16": peak}, memory=1.0, memory_bandwidth=bandwidth)


FAST, SLOW = device("fast", 4.0, 6.0), device("slow", 1.0, 2.0)
OF_FAST = model(layer(), layer(3.0, 6.0), update_seconds=0.5).model_copy(update={"device": "fast"})
OF_SLOW = model(layer(5.0, 7.0), layer(1.0, 2.0), update_seconds=0.25).model_copy(update={"device": "slow"})


def test_one_kind_takes_the_profile_whatever_its_name():
    (pace,) = paces(OF_SLOW, {}, [FAST])
    assert (pace.profile, pace.compute, pace.update, pace.note) == (OF_SLOW, 1.0, 1.0, "")


def test_a_kind_without_a_profile_goes_by_the_datasheets():
    fast, slow = paces(OF_FAST, {}, [FAST, SLOW])
    assert (fast.compute, fast.update, fast.note) == (1.0, 1.0, "")
    assert (slow.compute, slow.update) == (4.0, 3.0)
    assert slow.note == (
        "slow has no profile of its own, so its seconds are approximate: those of fast, passes times 4 (peak bfloat16 "
        "FLOP/s), updates times 3 (memory bandwidth)"
    )


def test_the_profile_is_that_of_the_device_it_names():
    fast, slow = paces(OF_SLOW, {}, [FAST, SLOW])
    assert (fast.compute, slow.compute, slow.note) == (0.25, 1.0, "")
    assert "fast has no profile of its own" in fast.note


def test_a_profile_of_a_device_that_is_not_there_counts_for_the_fastest():
    fast, slow = paces(OF_FAST.model_copy(update={"device": "elsewhere"}), {}, [FAST, SLOW])
    assert (fast.compute, slow.compute) == (1.0, 4.0)
    assert fast.note == "fast has no profile of its own, so it counts as elsewhere, the profile's device"


def test_own_profiles_need_no_ratio():
    fast, slow = paces(OF_FAST, {SLOW.rates: OF_SLOW}, [FAST, SLOW])
    assert (fast.profile, slow.profile) == (OF_FAST, OF_SLOW)
    assert (slow.compute, slow.update, fast.note, slow.note) == (1.0, 1.0, "", "")


def test_a_profile_of_another_model_is_refused():
    for other, word in ((model(layer()), "layers"), (OF_SLOW.model_copy(update={"dtype": "float32"}), "dtype")):
        with pytest.raises(InputError, match=f"differ in {word}.*make both with the same configuration"):
            paces(OF_FAST, {SLOW.rates: other}, [FAST, SLOW])


def test_a_device_without_the_dtype_is_refused():
    old = Device(name="old", peak_flops={"float32": 1.0}, memory=1.0, memory_bandwidth=1.0)
    both = FAST.model_copy(update={"peak_flops": {"bfloat16": 4.0, "float32": 2.0}})
    with pytest.raises(
        InputError, match=r"old has no rate for dtype=bfloat16.*use a profile in float32, or take it out"
    ):
        paces(OF_FAST, {}, [both, old])
    with pytest.raises(InputError, match="old has no rate for dtype=bfloat16 of the profile toy; take it out"):
        paces(OF_FAST, {}, [FAST, old])


def mixed() -> CostModel:
    cluster = cluster_of(node("slow", 1.0), node("fast", 4.0))
    slow = next(each.device for each in cluster.nodes if each.device.name == "slow")
    return CostModel(OF_FAST, cluster, others={slow.rates: OF_SLOW})


def test_the_slowest_device_sets_the_pace_of_every_layer_and_pass():
    costs, strategy = mixed(), LayerStrategy(2, 0, False)
    # One sample each: forward 1 and 3 s on the fast device, 5 and 1 s on the slow one; backward 2, 6 and 7, 2 s.
    both = costs.layer_costs(costs.places.at(0, 2), 1, strategy)
    assert (both.forward.tolist(), both.backward.tolist()) == ([5, 3], [7, 6])
    for offset, seconds in ((0, [10, 2]), (1, [2, 6])):
        assert costs.layer_costs(costs.places.at(offset, 1), 1, strategy).forward.tolist() == seconds


def test_updates_casts_and_kernels_go_by_the_slowest_memory():
    costs = mixed()
    alone, both = costs.places.at(1, 1), costs.places.at(0, 2)
    assert [costs.update_seconds(0, 1, place) for place in (alone, both, costs.places.at(0, 1))] == [0.5, 0.5, 0.25]
    assert [min(each.memory_bandwidth for each in costs.places.devices_of(place)) for place in (alone, both)] == [4, 1]
    tokens = OF_FAST.model_copy(update={"sample": "a sequence of 8 tokens"})
    kinds = {
        name: kind.model_copy(update={"boundary_bytes": 64.0, "tensor_forward_bytes": 64.0, "max_tensor": 2})
        for name, kind in tokens.kinds.items()
    }
    costs = CostModel(tokens.model_copy(update={"kinds": kinds}), costs.cluster)
    compression, stream, place = Compression(bits=8), stream_of(costs.profile), costs.places.at(0, 2)
    assert stream is not None
    seconds = costs.tensor_all_reduce._coding_seconds(place, place.tensor_group(2), 1, compression)[0]
    slowest = costs.places.kinds[1]
    assert np.allclose(seconds, compression_kernel_seconds(2, compression, stream, 1, slowest))


def test_members_that_are_no_neighbours():
    costs = CostModel(
        OF_FAST, cluster_of(node("fast", 4.0, devices=2), node("slow", 1.0), node("fast", 4.0, devices=2))
    )
    places = costs.places
    assert places.of((0, 1, 3, 4)).crossing == (2, 2) and places.of((0, 1, 3, 4)).kinds == (0,)
    assert places.of((1, 2)) == places.at(1, 2) and places.of((1, 2)).kinds == (0, 1)
    # From two devices on both outer nodes to the one between them: over the network, one sender.
    assert places.between((1, 3), (2,)) == (costs.cluster.network, 1)
    assert places.between((3,), (4,)) == (places.nodes[2].inside, 1)
    # Two nodes of one device each, and one node of two, on whose ports both transfers meet.
    few, many = node("slow", 1.0, count=2), node("fast", 4.0, devices=2)
    for order, single, both in (((few, many), (0, 1), (2, 3)), ((many, few), (2, 3), (0, 1))):
        places = CostModel(OF_FAST, cluster_of(*order)).places
        assert places.between(single, both)[1] == places.between(both, single)[1] == 2
