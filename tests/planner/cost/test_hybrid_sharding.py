"""Hybrid sharding by hand: seconds, bytes on a device, and bytes within a node and between nodes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jhpt.planner.cost.estimate import evaluate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.search.request import request
from tests.planner.brute_force import spmd_plans
from tests.planner.cost.test_estimate import GPT, INNER, cluster, plan, stage
from tests.planner.cost.test_traffic import ALL, BLOCK, EMBEDDING, HEAD, PROFILE, UNTIED, sent
from tests.planner.cost.test_traffic import plan as traffic_plan
from tests.planner.instances import random_cluster, random_profile

# Two nodes of two devices, 10 bytes/s in a node and 1 byte/s between nodes, one sample a device and micro-batch.
# Blocks of 10 and 30 parameters, or 20 and 60 bytes, are gathered and scattered in a node in 1 and 3 s.  Both devices
# of a node send shares of 10 and 30 bytes to the other node at once, each at half a byte/s, and sum them over two ranks
# in 2 (10 / 2) / 0.5 = 20 and 60 s.

FOUR = stage(0, 4, (0, [1, 1, 1, 1]))


def hybrid(zero, overlap=True, **fields):
    made = plan(FOUR, batch=8, zero=zero, zero_ranks=2, **fields)
    return evaluate(made, INNER, cluster(2, nodes=2, overlap=overlap))


def test_zero_1_reduces_shares_beside_the_last_backward_pass():
    # From its start: the second block's backward until 2, its gradients until 2 + 3 + 60; the first block's until 65 +
    # 1 + 20.  Of the gathers 2 s remain, and half of 40 parameters are updated.
    estimate = hybrid(1)
    assert estimate.times.sync == 86 and estimate.times.update == pytest.approx(2 + 0.2)
    assert estimate.seconds == pytest.approx(2 * 2 + 4 + 86 + 2.2)
    # As ZeRO-1 over two data ranks: 12 bytes of state in halves.
    assert estimate.stages[0].bytes["optimizer"] == 240
    # Over all four: 45 s and 15 s to scatter, until 2 + 45 + 15, and 44 + 14 s of as long gathers, a quarter to update.
    whole = evaluate(plan(FOUR, batch=8, zero=1), INNER, cluster(2, nodes=2))
    assert whole.seconds == pytest.approx(2 * 2 + 4 + 62 + 58 + 0.1) and whole.stages[0].bytes["optimizer"] == 120


def test_zero_2_and_zero_3_reduce_shares_after_all_passes():
    # In a node as over two data ranks alone (test_estimate); 80 s between nodes follow.
    alone = [evaluate(plan(stage(0, 2, (0, [1] * 4)), zero=zero), INNER, cluster(2)) for zero in (2, 3)]
    assert [each.seconds for each in alone] == pytest.approx([18.2, 24.2])
    for zero, within in zip((2, 3), alone, strict=True):
        estimate = hybrid(zero)
        assert estimate.seconds == pytest.approx(within.seconds + 80)
        assert estimate.stages[0].bytes == within.stages[0].bytes
        assert estimate.stages[0].seconds["gradients exposed"] == pytest.approx(
            within.stages[0].seconds["gradients exposed"] + 80
        )


def test_without_overlap():
    # ZeRO-1: 12 + (1 + 3) to scatter + 80 + (1 + 3) to gather + 0.2; ZeRO-2 scatters twice; ZeRO-3: 36 (test_estimate).
    found = [hybrid(zero, overlap=False).seconds for zero in (1, 2, 3)]
    assert found == pytest.approx([100.2, 104.2, 36 + 80 + 0.2])


def test_a_pipeline_reduces_shares_after_all_passes():
    # Room for 50 parameters of the ends and 10 of a block.  In a node 5 and 1 s to gather, as long to scatter; 100 and
    # 20 s for shares of 50 and 10 bytes; 60 parameters in halves, 0.3; and 120 s for the tied table's 60 bytes.
    piped = stage(0, 4, (0, [1, 1])), stage(4, 4, (2, [1, 1]))
    estimate = evaluate(plan(*piped, batch=8, zero=1, zero_ranks=2), GPT, cluster(2, nodes=4))
    assert estimate.times.update == pytest.approx(2 * [6 + 6 + 100 + 20 + 0.3 + 120])
    # ZeRO-3 has the block's 2 s in its passes.
    estimate = evaluate(plan(*piped, batch=8, zero=3, zero_ranks=2), GPT, cluster(2, nodes=4))
    assert estimate.times.update == pytest.approx(2 * [5 + 5 + 100 + 20 + 0.3 + 120])
    assert estimate.times.backward.tolist() == [[1 + 3], [3 + 5]]


def sends(zero, micro_batches=2, overlap=False):
    """Of four data ranks in pairs."""
    made = traffic_plan((4, [(0, [1] * 6)]), zero=zero, micro_batches=micro_batches)
    return traffic(made.model_copy(update={"zero_ranks": 2}), PROFILE, overlap=overlap)[0]


BETWEEN = (6, 2 * 1 / 2 * 2 * ALL / 2)
"""All-reduces of six layers' shares, half of their parameters, over two replicas."""


def test_a_node_gathers_and_scatters_and_shares_are_summed_between_nodes():
    assert sends(1) == sent(
        all_gather__data=(6, 1 / 2 * 2 * ALL), reduce_scatter__data=(6, 1 / 2 * 2 * ALL), all_reduce__replica=BETWEEN
    )
    ends = EMBEDDING + HEAD
    scattered = (2 * 4 + 2, 1 / 2 * 2 * (2 * 4 * BLOCK + ends))
    assert sends(2) == sent(
        all_gather__data=(6, 1 / 2 * 2 * ALL), reduce_scatter__data=scattered, all_reduce__replica=BETWEEN
    )
    gathered = (4 * 4 + 2, 1 / 2 * 2 * (4 * 4 * BLOCK + ends))
    assert sends(3) == sent(all_gather__data=gathered, reduce_scatter__data=scattered, all_reduce__replica=BETWEEN)


def test_what_is_scattered_late_is_summed_late_with_zero_1_alone():
    """Overlapped loops reduce one layer late, so that of a run one block more, of zeros, travels."""
    late = BETWEEN[1] + 2 * 1 / 2 * 2 * BLOCK / 2
    found = [sends(zero, overlap=True)["all-reduce", "replica"].bytes for zero in (1, 2, 3)]
    assert found == pytest.approx([late, BETWEEN[1], BETWEEN[1]])


def test_stages_exchange_shares_of_a_tied_table():
    """Two stages of four devices in pairs: half of the table in float32; 3 ticks of 2 samples x 50 bytes."""
    stages = [(4, [(0, [1] * 3)]), (4, [(3, [1] * 3)])]
    for zero in (1, 3):
        made = traffic_plan(*stages, zero=zero).model_copy(update={"zero_ranks": 2})
        for found in traffic(made, PROFILE, overlap=False):
            assert found["collective-permute", "pipe"].bytes == pytest.approx(3 * 2 * 50)
            assert found["all-reduce", "pipe"].bytes == pytest.approx(4 * 960 / 2)
            shares = 2 * BLOCK + EMBEDDING + HEAD
            assert found["all-reduce", "replica"].bytes == pytest.approx(2 * 1 / 2 * 2 * shares / 2)
    untied = traffic(traffic_plan(*stages, zero=1).model_copy(update={"zero_ranks": 2}), UNTIED)[0]
    assert untied["collective-permute", "pipe"].bytes == pytest.approx(3 * 2 * 50)
    assert ("all-reduce", "pipe") not in untied


@pytest.mark.parametrize("seed", range(6))
def test_over_all_data_ranks_it_is_plain_sharding_and_over_fewer_it_holds_more(seed):
    rng = np.random.default_rng(seed)
    model = CostModel(random_profile(rng, 4), random_cluster(rng, 4, min_devices=4))
    plans = (made for made in spmd_plans(replace(request(4), hybrid=False), model) if made.zero and made.replicas == 4)
    for made in itertools.islice((one for one in plans if len(one.degrees) == 1), 40):
        whole, named, pairs = (
            price(made.model_copy(update={"zero_ranks": ranks}), model) for ranks in (None, made.replicas, 2)
        )
        assert (named.seconds, named.stages) == (whole.seconds, whole.stages)
        for one, other in zip(pairs.stages, whole.stages, strict=True):
            assert one.total_bytes >= other.total_bytes
