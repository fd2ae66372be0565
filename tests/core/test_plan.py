"""Plans by hand: how the section `parallel` becomes stages."""

import pytest

from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import OtherBlocks, Plan, SavedTensors
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.plan_check import check_plan


def by_hand(devices=8, blocks=8, **parallel):
    settings = {f"parallel.{name}": value for name, value in parallel.items()}
    return plan_by_hand(load_config("gpt-tiny", {"model.num_layers": blocks, **settings}), devices)


def layers(plan: Plan) -> list[list[tuple[int, int]]]:
    return [[(chunk.first, chunk.stop) for chunk in stage.chunks] for stage in plan.stages]


def test_one_stage_holds_everything():
    plan = by_hand(tensor=2)
    assert layers(plan) == [[(0, 10)]]
    assert (plan.stages[0].devices, plan.stages[0].chunks[0].tensor) == (8, (2,) * 10)


def test_ends_go_with_the_first_and_last_block():
    assert layers(by_hand(pipe=4, micro_batches=4)) == [[(0, 3)], [(3, 5)], [(5, 7)], [(7, 10)]]


def test_the_first_stages_take_one_block_more():
    assert layers(by_hand(blocks=5, pipe=2, micro_batches=2)) == [[(0, 4)], [(4, 7)]]


def test_interleaved_chunks_go_round():
    plan = by_hand(pipe=2, chunks=2, micro_batches=2)
    assert plan.schedule == "interleaved"
    assert layers(plan) == [[(0, 3), (5, 7)], [(3, 5), (7, 10)]]


def test_stages_share_the_devices():
    plan = by_hand(pipe=2, tensor=2, micro_batches=2)
    assert [(stage.device, stage.devices) for stage in plan.stages] == [(0, 4), (4, 4)]
    assert by_hand(pipe=2, data=1, micro_batches=2).devices == 2


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"data": 16}, "needs 16 devices, and there are 8"),
        ({"pipe": 4, "tensor": 4, "micro_batches": 4}, "parallel.pipe=4 x .* needs 16 devices"),
        ({"data": 8, "micro_batches": 3}, "divisible"),
        ({"pipe": 9, "micro_batches": 8}, "as many blocks"),
        ({"chunks": 2}, "several stages"),
        ({"chunks": 2, "pipe": 2, "micro_batches": 3}, "divisible by parallel.pipe=2"),
        ({"chunks": 2, "pipe": 2, "micro_batches": 2, "schedule": "gpipe"}, "drop parallel.schedule=gpipe"),
    ],
)
def test_what_cannot_be_is_refused(parallel, words):
    with pytest.raises(InputError, match=words):
        by_hand(**parallel)


def test_auto_leaves_the_rest_aside():
    assert load_config("gpt-13b", {"parallel": "auto"}).parallel.auto
    assert load_config({"parallel": "auto"}).parallel.auto
    config = load_config("gpt-tiny", {"parallel.auto": True, "parallel.tensor": 3})  # 3 divides no head count
    assert config.parallel.auto
    with pytest.raises(InputError, match="parallel"):
        load_config({"parallel": "automatic"})


def test_a_file_holds_a_plan(tmp_path):
    plan = by_hand(pipe=2, chunks=2, micro_batches=2, zero=1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def changed(plan: Plan, change) -> Plan:
    """The plan with its JSON changed."""
    tree = plan.model_dump(mode="json")
    change(tree)
    return Plan.model_validate(tree)


def stage_of(tree, stage: int, *chunks: tuple[int, int]) -> None:
    """Gives a stage chunks [first, stop)."""
    tree["stages"][stage]["chunks"] = [{"first": a, "runs": [{"layers": b - a}]} for a, b in chunks]


def mixed_degrees(tree) -> None:
    """The second half of the layers of a stage at degree 2."""
    tree["stages"][0]["chunks"][0]["runs"] = [{"layers": 3}, {"layers": 3, "tensor": 2}]


PIPED = {"pipe": 2, "micro_batches": 4, "data": 1}
CHUNKED = PIPED | {"chunks": 2}


@pytest.mark.parametrize(
    ("parallel", "change", "words"),
    [
        (PIPED, lambda tree: stage_of(tree, 1, (4, 6)), "cover layers 0 to 5 in order.*found 0 to 2, 4 to 5"),
        (PIPED, lambda tree: tree["stages"][0].update(device=1) or tree["stages"][1].update(device=0), "ascending"),
        (PIPED, lambda tree: stage_of(tree, 0, (3, 6)) or stage_of(tree, 1, (0, 3)), "found 3 to 5, 0 to 2"),
        (PIPED, lambda tree: tree["stages"][1].update(device=2), r"from device 0 on, found them to begin at \[0, 2\]"),
        (CHUNKED, lambda tree: tree.update(schedule="gpipe"), "schedule=gpipe with 2 chunks per stage"),
        (CHUNKED, lambda tree: tree.update(schedule="eager-1f1b"), "schedule=eager-1f1b with 2 chunks per stage"),
        (
            CHUNKED,
            lambda tree: tree.update(batch=12, micro_batches=3),
            "needs micro_batches divisible by stages=2, found 3",
        ),
        (CHUNKED, lambda tree: stage_of(tree, 1, (2, 6)), r"the same number of chunks, found \[2, 1\]"),
        ({"data": 1}, lambda tree: stage_of(tree, 0, (0, 3), (3, 6)), "chunks=2 needs several stages.*join them"),
        (PIPED, lambda tree: tree.update(batch=33), "batch=33 is not divisible by micro_batches=4; use 1, 3, 11 or 33"),
        ({"data": 8}, lambda tree: tree.update(batch=12), "a micro-batch of 12 is not divisible by data=8"),
        ({"data": 2, "tensor": 2}, lambda tree: tree["stages"][0].update(devices=3), "does not divide the 3 devices"),
        (
            {"data": 8, "zero": 1},
            lambda tree: tree.update(zero_ranks=3),
            "cut 8 data ranks .*; use 2, 4 or 8, or leave",
        ),
        ({"data": 8, "zero": 1}, lambda tree: tree.update(zero_ranks=16), "cut 8 data ranks into equal groups"),
        (
            {"data": 1, "zero": 3},
            lambda tree: tree.update(zero_ranks=1),
            "1 data ranks into equal groups; leave it out",
        ),
        (
            {"data": 8, "zero": 1},
            lambda tree: tree.update(zero_ranks=4) or mixed_degrees(tree),
            r"needs one tensor degree.*found \[1, 2\]",
        ),
        ({"zero": 3}, lambda tree: tree.update(prefetch=1000), "prefetch=1000 .* use 6 or less"),
    ],
)
def test_what_is_no_plan_is_refused(parallel, change, words):
    plan = by_hand(blocks=4, **parallel)
    check_plan(plan, 6)
    with pytest.raises(InputError, match=words):
        check_plan(changed(plan, change), 6)


@pytest.mark.parametrize(
    ("recomputed", "recompute", "saved"),
    [
        ("auto", False, None),
        ("none", False, None),
        ("full", True, None),
        ("qkv", True, SavedTensors(device=("qkv",))),
        ("qkv, mlp_hidden", True, SavedTensors(device=("qkv", "mlp_hidden"))),
        (["attention_out"], True, SavedTensors(device=("attention_out",))),
    ],
)
def test_recomputation_by_hand(tmp_path, recomputed, recompute, saved):
    config = load_config("gpt-tiny", {"memory.recompute": recomputed})
    plan = plan_by_hand(config, 8)
    assert (plan.recompute, plan.saved) == (recompute, saved)
    check_plan(plan, config.model.num_layers + 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert load_config(config.model_dump(mode="json")) == config


def test_recomputation_of_some_blocks_by_hand(tmp_path):
    """The first ones; all of them are no choice, and more are refused."""
    config = load_config("gpt-tiny", {"memory.recompute": "qkv", "memory.recompute_blocks": 3})
    plan = plan_by_hand(config, 8)
    assert plan.other_blocks == OtherBlocks(after=3)
    assert (plan.of_first_blocks.recompute, plan.of_other_blocks.recompute) == (True, False)
    check_plan(plan, config.model.num_layers + 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    blocks = {"memory.recompute_blocks": config.model.num_layers}
    assert plan_by_hand(load_config(config, blocks), 8).other_blocks is None
    with pytest.raises(InputError, match=r"memory\.recompute_blocks=9, and model\.num_layers="):
        plan_by_hand(load_config(config, {"memory.recompute_blocks": 9}), 8)
    with pytest.raises(InputError, match=r"memory\.recompute_blocks needs one stage, and there are 2"):
        plan_by_hand(load_config(config, {"parallel.pipe": 2}), 8)


def test_names_of_no_tensor_are_refused():
    with pytest.raises(
        InputError, match=r"memory\.recompute: a block has no tensor 'mlp_hiden'; did you mean mlp_hidden"
    ):
        load_config("gpt-tiny", {"memory.recompute": "qkv,mlp_hiden"})
    with pytest.raises(InputError, match="no tensor 'ful'; did you mean full"):
        load_config("gpt-tiny", {"memory.recompute": "ful"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"saved": SavedTensors(device=("qkv",))}, "recompute is false; set recompute to true"),
        ({"recompute": True, "saved": SavedTensors(host=("logits",))}, "no tensor 'logits'; it has residual_in, qkv"),
        ({"recompute": True, "saved": SavedTensors(device=("qkv",), host=("qkv",))}, "saved names qkv twice"),
        (
            {"recompute": True, "saved": SavedTensors(), "space": "general"},
            "space=general has a program for each stage.*: saved;",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        check_plan(by_hand().model_copy(update=changes), 10)
