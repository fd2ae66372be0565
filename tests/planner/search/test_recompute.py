"""Names that plans keep: their price by hand, and what is planned with them."""

import itertools

import pytest

from jhpt.core.catalogue import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.load import load_config
from jhpt.core.plan import SavedTensors
from jhpt.core.profile import NamedTensor
from jhpt.planner.api import prepare
from jhpt.planner.cost.activations import NOTHING, repeated
from jhpt.planner.cost.estimate import evaluate, price
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.causes import stage_causes
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.sharding.plans import mixed, piped

GPT, BERT = "gpt-6.7b", "bert-large"
BLOCKS = 8


def profile_of(preset=GPT, length=2048):
    changes = {"model.num_layers": BLOCKS, "data.sequence_length": length, "model.max_length": length}
    return analytic_profile(load_config(preset, changes), find_cluster("h100x8x1").nodes[0].device)


def cluster_of(memory=80e9, name="h100x8x1"):
    cluster = find_cluster(name)
    larger = {"device": cluster.nodes[0].device.model_copy(update={"memory": memory})}
    return cluster.model_copy(update={"nodes": tuple(node.model_copy(update=larger) for node in cluster.nodes)})


def tensor(name, flops, *inputs, read=True, summed=False):
    return NamedTensor(name=name, bytes=1.0, flops=flops, inputs=inputs, read=read, summed=summed)


BLOCK = (
    tensor("residual_in", 0.0),
    tensor("qkv", 3.0, "residual_in"),
    tensor("attention_out", 2.0, "qkv"),
    tensor("projection_out", 1.0, "attention_out", summed=True),
    tensor("mlp_hidden", 2.0, "residual_in", "projection_out"),
    tensor("mlp_out", 2.0, "mlp_hidden", read=False, summed=True),
)


@pytest.mark.parametrize(
    ("saved", "seconds", "sums"),
    [
        (NOTHING, 0.8, 0.5),  # all but what is not read
        (SavedTensors(device=("mlp_hidden",)), 0.6, 0.5),
        (SavedTensors(device=("projection_out",)), 0.7, 0.0),  # the others are read, too
        (SavedTensors(device=("qkv",), host=("projection_out", "mlp_hidden")), 0.2, 0.0),
        (SavedTensors(device=NAMED_TENSORS), 0.0, 0.0),
    ],
)
def test_shares_that_are_repeated(saved, seconds, sums):
    found = repeated(BLOCK, saved)
    assert (found.seconds, found.all_reduces) == (pytest.approx(seconds), pytest.approx(sums))


def test_a_layer_without_names_is_repeated_whole():
    found = repeated((), SavedTensors(device=("qkv",)))
    assert (found.seconds, found.all_reduces) == (1.0, 1.0)


def with_link(cluster, factor):
    """The link to the host, so many times as fast."""
    node = cluster.nodes[0]
    host = node.host.model_copy(update={"bandwidth": node.host.bandwidth * factor})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"host": host}),)})


def test_bytes_and_seconds_of_names():
    """One stage of two data ranks at tensor degree 4, 16 samples in 4 micro-batches: two samples each.  Of a block the
    ranks divide qkv and keep projection_out whole."""
    profile, cluster = profile_of(), with_link(cluster_of(), 1000)
    bare = piped([BLOCKS + 2], 1, data=2, tensor=4, batch=16, micro_batches=4, recompute=True)
    first = evaluate(bare, profile, cluster).stages[0]
    sizes = {one.name: one.bytes for one in profile.kinds["block"].tensors}
    saved = bare.model_copy(update={"saved": SavedTensors(device=("qkv", "projection_out"))})
    second = evaluate(saved, profile, cluster).stages[0]
    more = BLOCKS * 2 * (sizes["qkv"] / 4 + sizes["projection_out"])
    assert second.bytes["activations"] - first.bytes["activations"] == pytest.approx(more)
    assert {cause for cause in first.bytes if first.bytes[cause] != second.bytes[cause]} == {"activations"}
    away = bare.model_copy(update={"saved": SavedTensors(host=("residual_in", "projection_out"))})
    third = evaluate(away, profile, cluster).stages[0]
    less = BLOCKS * 2 * sizes["residual_in"]
    assert first.bytes["activations"] - third.bytes["activations"] == pytest.approx(less)
    # With projection_out no sum is repeated, with qkv also its product is not; copies hide beside the passes.
    assert first.seconds["tensor communication"] > second.seconds["tensor communication"]
    assert second.seconds["tensor communication"] == pytest.approx(third.seconds["tensor communication"])
    assert first.seconds["compute"] > third.seconds["compute"] > second.seconds["compute"]


def test_copies_that_nothing_hides_take_time():
    """Over a link a thousand times slower nothing does: there and back, of every block."""
    profile, cluster = profile_of(), cluster_of()
    slow = with_link(cluster, 1 / 1000)
    saved = {"recompute": True, "saved": SavedTensors(device=NAMED_TENSORS[2:], host=("qkv",))}
    plan = piped([BLOCKS + 2], 1, batch=4, micro_batches=2, **saved)
    quick, late = (evaluate(plan, profile, one).seconds for one in (cluster, slow))
    qkv = next(one.bytes for one in profile.kinds["block"].tensors if one.name == "qkv")
    copies = 2 * 2 * BLOCKS * 2 * qkv / slow.nodes[0].host.bandwidth
    assert quick < 0.01 * late and late == pytest.approx(copies, rel=0.01)


PLANS = {
    "one stage": (GPT, piped([BLOCKS + 2], 1, data=8, batch=16, micro_batches=1)),
    "tensor": (GPT, piped([BLOCKS + 2], 1, data=2, tensor=4, batch=16, micro_batches=2)),
    "cut sequence": (GPT, piped([BLOCKS + 2], 1, data=2, tensor=4, batch=16, micro_batches=2, sequence=True)),
    "chunks": (BERT, piped([BLOCKS + 2], 1, data=2, tensor=4, batch=16, micro_batches=2, sample_chunks=2)),
    "mixed": (GPT, mixed([2, *[1] * 4, *[2] * 4, 2], 8, batch=16)),
    "1f1b": (GPT, piped([4, 3, 2, 1], 4, data=2, batch=32, micro_batches=8)),
    "gpipe": (BERT, piped([5, 5], 2, tensor=2, data=2, batch=32, micro_batches=4, schedule="gpipe")),
    "interleaved": (BERT, piped([3, 2, 2, 3], 2, tensor=4, batch=32, micro_batches=4, schedule="interleaved")),
}


def keeping(plan, saved, model):
    """The price of a plan that keeps these."""
    return price(plan.model_copy(update={"recompute": True, "saved": saved}), model)


def every_set(profile):
    read = [one.name for one in profile.kinds["block"].tensors[1:] if one.read]
    return [SavedTensors(device=names) for size in range(len(read) + 1) for names in itertools.combinations(read, size)]


LONG = 8192


def test_one_rank_rounds_weights_where_it_has_no_room_for_a_copy():
    """ZeRO-3 over one rank, with the best names: where nothing else fits, and where it is faster than the others."""
    profile = profile_of(length=LONG)
    bare = piped([BLOCKS + 2], 1, recompute=True, batch=1)
    needed = evaluate(bare, profile, one_device(1e12)).stages[0].total_bytes
    for memory, fits in ((needed - 1, False), (needed + 1, True)):
        cluster = one_device(memory)
        answer = solve(profile, cluster, request(1))
        assert answer.plan.zero == 3 and answer.estimate.fits and answer.plan.lower_bound <= answer.plan.seconds
        levels = [bare.model_copy(update={"zero": zero}) for zero in (0, 3)]
        levels += [one.model_copy(update={"recompute": False}) for one in levels]
        priced = [evaluate(one, profile, cluster) for one in levels]
        priced += [keeping(one, saved, answer.model) for one in levels[:2] for saved in every_set(profile)]
        assert answer.plan.seconds == pytest.approx(min(one.seconds for one in priced if one.fits), rel=1e-9)
        without = request(1, zero=(0,))
        if fits:
            assert solve(profile, cluster, without).plan.seconds > answer.plan.seconds
        else:
            with pytest.raises(InputError, match="fits no plan"):
                solve(profile, cluster, without)
        assert "ZeRO-3" in shape_text(answer.plan)


def test_the_fastest_plan_keeps_some():
    """Where all does not fit a device and nothing leaves room: faster than either, and the fastest of all sets."""
    profile = profile_of(length=LONG)
    sizes = {one.name: one.bytes for one in profile.kinds["block"].tensors}
    bare = piped([BLOCKS + 2], 1, recompute=True, batch=1)
    needed = evaluate(bare, profile, one_device(1e12)).stages[0].total_bytes
    cluster = one_device(needed + BLOCKS * 1.01 * (sizes["mlp_hidden"]))
    answer = solve(profile, cluster, request(1, zero=(0,)))
    priced = {saved: keeping(bare, saved, answer.model) for saved in every_set(profile)}
    best = min((one for one in priced if priced[one].fits), key=lambda one: priced[one].seconds)
    assert best.device and answer.plan.saved == best
    assert answer.estimate.fits and answer.plan.lower_bound <= answer.plan.seconds
    for recompute in (False, True):
        try:
            assert (
                solve(profile, cluster, request(1, zero=(0,), recompute=(recompute,))).plan.seconds
                > answer.plan.seconds
            )
        except InputError:
            assert not recompute
    assert f"recomputation but for {' and '.join(best.device)}" in shape_text(answer.plan)
    causes = stage_causes(answer.plan, 0, answer.estimate, answer.model)
    assert sum(causes.values()) == pytest.approx(answer.plan.seconds)
    assert 0 < causes["recomputation"] < stage_causes(bare, 0, price(bare, answer.model), answer.model)["recomputation"]


def one_device(memory):
    cluster = cluster_of(memory)
    return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"devices": 1}),)})


@pytest.mark.parametrize(
    ("how", "recompute", "saved"),
    [("none", False, None), ("full", True, None), ("qkv,mlp_hidden", True, SavedTensors(device=("qkv", "mlp_hidden")))],
)
def test_what_the_configuration_says_is_planned(how, recompute, saved):
    task = prepare("gpt2-124m", cluster="h100x8x1", overrides={"memory.recompute": how})
    found = task.solve()
    assert (found.plan.recompute, found.plan.saved) == (recompute, saved)
    assert found.plan.seconds == pytest.approx(evaluate(found.plan, task.profile, task.cluster).seconds)


def test_names_need_one_program():
    overrides = {"memory.recompute": "qkv"}
    with pytest.raises(InputError, match=r"memory\.recompute=auto"):
        prepare("gpt2-124m", cluster="h100x8x1", space="general", overrides=overrides).solve()
