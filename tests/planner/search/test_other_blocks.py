"""Blocks of one stage that save different sets: pairs of sets, their price, and what is planned."""

import itertools

import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.core.plan import OtherBlocks, SavedTensors
from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import evaluate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.report.causes import stage_causes
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.other_blocks import BlockCosts
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.covers import quick_and_exhaustive
from tests.planner.saved import fastest
from tests.planner.search.test_recompute import BLOCKS, LONG, PLANS, cluster_of, one_device, profile_of
from tests.sharding.plans import piped

SOME, MORE = SavedTensors(device=("projection_out",)), SavedTensors(device=("qkv", "projection_out", "mlp_hidden"))


@pytest.mark.parametrize("seed", range(100))
def test_two_sets_are_enough(seed):
    """For every budget: over all ways to give equal blocks one of five sets, at most a block's seconds less."""
    rng, blocks = np.random.default_rng(seed), 6
    sizes, seconds = np.sort(rng.uniform(1, 9, 5)), -np.sort(-rng.uniform(0, 3, 5))
    each = [np.repeat(values[:, None], blocks, axis=1) for values in (seconds, sizes)]
    names = [SavedTensors(device=(f"tensor{at}",)) for at in range(4)]
    costs = BlockCosts(saved=(*names, None), seconds=each[0], bytes=each[1])
    room = float(rng.uniform(blocks * sizes[0], blocks * sizes[-1]))
    ways = [list(way) for way in itertools.combinations_with_replacement(range(5), blocks)]
    fitting = [seconds[way].sum() for way in ways if sizes[way].sum() <= room]
    pairs, alone = costs.pairs(room), seconds[blocks * sizes <= room] * blocks
    best = min([*pairs.seconds, *alone])
    assert min(fitting) - 1e-9 <= best <= min(fitting) + seconds[0] - seconds[-1]
    for at, (first, others, after) in enumerate(zip(pairs.first, pairs.others, pairs.after, strict=True)):
        counts = np.arange(1, blocks)
        totals = counts * sizes[first] + (blocks - counts) * sizes[others]
        assert after == counts[totals <= room][0] and sizes[first] < sizes[others]
        assert pairs.seconds[at] == pytest.approx(after * seconds[first] + (blocks - after) * seconds[others])


ONE_STAGE = [name for name, (_, plan) in PLANS.items() if len(plan.stages) == 1]


@pytest.mark.parametrize("others", [None, MORE], ids=["everything", "names"])
@pytest.mark.parametrize("name", ONE_STAGE)
def test_with_every_block_that_saves_more_time_falls_and_bytes_grow(name, others):
    """Between the prices of all blocks alike.  Bytes by as many with each block."""
    preset, bare = PLANS[name]
    model = CostModel(profile_of(preset, 2048 if preset != "bert-large" else 512), cluster_of())
    first = bare.model_copy(update={"recompute": True, "saved": SOME})
    last = bare.model_copy(update={"recompute": others is not None, "saved": others})
    some = [
        first.model_copy(update={"other_blocks": OtherBlocks(after=after, saved=others)})
        for after in reversed(range(1, BLOCKS))
    ]
    priced = [price(plan, model) for plan in (first, *some, last)]
    seconds = [one.seconds for one in priced]
    sizes = [one.stages[0].bytes["activations"] for one in priced]
    if name != "chunks":  # there the samples of a run of blocks fill its first one
        assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
        assert np.diff(sizes) == pytest.approx(np.diff(sizes)[0])
    assert seconds[1:-1] == sorted(seconds[1:-1], reverse=True) and sizes == sorted(sizes)
    for one, plan in zip(priced[1:-1], some, strict=True):
        assert sum(stage_causes(plan, 0, one, model).values()) == pytest.approx(one.seconds)


@pytest.mark.parametrize("share", quick_and_exhaustive((0.1, 0.3, 0.5, 0.7, 0.9), (0.1, 0.5)))
def test_the_planner_chooses_the_best_sets_and_number(share):
    """Of all pairs of sets and all numbers of blocks, in a share of the memory between the input and everything."""
    profile, bare = profile_of(length=LONG), piped([BLOCKS + 2], 1, batch=1)
    most, least = (
        evaluate(bare.model_copy(update={"recompute": recompute}), profile, one_device(1e12)).stages[0].total_bytes
        for recompute in (False, True)
    )
    answer = solve(profile, one_device(least + share * (most - least)), request(1, zero=(0,)))
    assert answer.estimate.fits and answer.plan.other_blocks is not None
    by_hand = price(fastest(bare, answer.model), answer.model)
    assert answer.plan.seconds == pytest.approx(by_hand.seconds, rel=1e-9)
    assert answer.plan.lower_bound == pytest.approx(answer.plan.seconds, rel=1e-9)
    assert f"recomputation in {answer.plan.other_blocks.after} of {BLOCKS} blocks" in shape_text(answer.plan)


def test_the_number_is_for_a_layout_by_hand():
    with pytest.raises(InputError, match=r"memory\.recompute_blocks=4 is for a layout by hand"):
        prepare("gpt2-124m", cluster="h100x8x1", overrides={"memory.recompute": "full", "memory.recompute_blocks": 4})
