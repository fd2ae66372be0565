"""Blocks of one stage that save more than others (`Plan.other_blocks`): gradients, and bytes as compiled."""

import pytest

from jhpt.core.errors import InputError
from jhpt.core.plan import OtherBlocks, SavedTensors
from jhpt.core.plan_check import check_plan
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training.compile import lower_step
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.planner.search.test_recompute import cluster_of
from tests.sharding import test_parity as parity
from tests.sharding.plans import laid_out, piped

setup_of = parity.setup_of

SOME, MORE = SavedTensors(device=("projection_out",)), SavedTensors(device=("qkv", "projection_out", "mlp_hidden"))
CASES = {
    "unrolled": ("bert", parity.ALL, None, OtherBlocks(after=1), {}, {}),
    "in a loop": ("gpt-untied", parity.NONE, SOME, OtherBlocks(after=2), {"zero": 1, "data": 2}, {"overlap": True}),
    "ZeRO-3, micro-batches": (
        "bert, no dropout",
        parity.NONE,
        None,
        OtherBlocks(after=2, saved=MORE),
        {"zero": 3, "data": 4, "micro_batches": 4},
        {"overlap": True},
    ),
    "tensor, sample chunks": (
        "gpt-tied, no dropout",
        parity.NONE,
        SOME,
        OtherBlocks(after=1, saved=MORE),
        {"tensor": 2, "sample_chunks": 3, "micro_batches": 2},
        {},
    ),
    "cut sequence": ("bert", parity.NONE, None, OtherBlocks(after=1), {"tensor": 2, "sequence": True, "data": 2}, {}),
}


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("case", quick_and_exhaustive(CASES, ["in a loop"]))
def test_gradients_are_those_of_the_definition(setup_of, case):
    name, unrolled, saved, others, settings, changes = CASES[case]
    settings |= {"recompute": True, "saved": saved, "other_blocks": others}
    plan = piped([5], 1, batch=parity.BATCH, **settings)
    parity.check_gradients(setup_of, name, 3, unrolled, plan, **changes)


WIDE = {"model.d_model": 128, "model.d_ff": 512, "model.max_length": 128, "data.sequence_length": 128}
BLOCKS, ROWS = 12, 32


@pytest.mark.exhaustive
def test_every_block_that_recomputes_holds_less(tiny):
    """A step's bytes, compiled: between two numbers of blocks what is predicted, within 1 %.  With any number they are
    fewer than with none, and no more above those with all than predicted."""
    setup = prepare(tiny(**WIDE, **{"model.num_layers": BLOCKS, "data.batch_size": ROWS}))
    none = piped([BLOCKS + 2], 1, batch=ROWS, micro_batches=4)
    every = none.model_copy(update={"recompute": True, "saved": SOME})
    some = [every.model_copy(update={"other_blocks": OtherBlocks(after=count)}) for count in (1, 4, 9)]
    profile = analytic_profile(setup.config, cluster_of().nodes[0].device, "float32")
    held, planned = [], []
    for plan in (none, *some, every):
        held.append(lower_step(laid_out(setup, plan)).compile().memory_analysis().temp_size_in_bytes)
        planned.append(evaluate(plan, profile, cluster_of()).stages[0].bytes["activations"])
    assert held == sorted(held, reverse=True) and planned == sorted(planned, reverse=True)
    assert held[2] - held[3] == pytest.approx(planned[2] - planned[3], rel=0.01)
    assert held[3] - held[4] <= planned[3] - planned[4]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (piped([5], 1, recompute=False, other_blocks=OtherBlocks(after=1)), "recompute is false"),
        (piped([5], 1, recompute=True, other_blocks=OtherBlocks(after=3)), "there are 3; use a smaller number"),
        (piped([3, 2], 2, recompute=True, other_blocks=OtherBlocks(after=1)), "needs one stage, and there are 2"),
        (
            piped([5], 1, recompute=True, other_blocks=OtherBlocks(after=1, saved=SavedTensors(host=("qkv",)))),
            "offloaded to the host",
        ),
        (
            piped([5], 1, recompute=True, other_blocks=OtherBlocks(after=1, saved=SavedTensors(device=("kqv",)))),
            "no tensor 'kqv'",
        ),
    ],
)
def test_plans_that_are_refused(plan, message):
    with pytest.raises(InputError, match=message):
        check_plan(plan, 5)
