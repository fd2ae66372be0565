"""Seconds of a step with CPU offload, worked out by hand."""

import io
import itertools
from dataclasses import replace

import pytest
from rich.console import Console

from jhpt.core.amounts import gib
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Offload, Plan, SavedTensors, Stage, runs_of
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.api import capped, prepare
from jhpt.planner.cost.estimate import evaluate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloaded_step, offloads
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.alternatives import changed
from jhpt.planner.report.answer import print_answer
from jhpt.planner.report.causes import offload_lines
from jhpt.planner.report.offload_timeline import offload_timeline
from jhpt.planner.report.timeline import svg_timeline
from jhpt.planner.report.words import shape_text, streamed_layers
from jhpt.planner.search.offload import offloaded_plans
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from tests.covers import quick_and_exhaustive


def kind(forward, backward, parameters):
    """Seconds of a sample; two take twice as long."""
    timing = Timing(batches=(1.0, 2.0), forward=(forward, 2 * forward), backward=(backward, 2 * backward))
    return LayerKind(parameters=parameters, boundary_bytes=1.0, activation_bytes=2.0, timings=(timing,))


def toy(blocks=4, embedding_and_head=0):
    """Blocks of 10 parameters, 1 s forward and 2 s backward; an update takes 10 ms a parameter."""
    kinds = {"first": kind(0, 0, embedding_and_head), "block": kind(1, 2, 10), "last": kind(0, 0, 0)}
    layers = ("first", *["block"] * blocks, "last")
    return ModelProfile(name="toy", device="toy", source="by hand", kinds=kinds, layers=layers, update_seconds=0.01)


def machine(devices=1, memory=1e9, host=1e9, speed=40.0):
    """`speed` bytes a second to and from the host."""
    device = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=memory, memory_bandwidth=1.0)
    inside, link = Link(bandwidth=20.0, latency=0.0), Link(bandwidth=speed, latency=0.0)
    node = Node(device=device, devices=devices, inside=inside, host=link, host_memory=host)
    return Cluster(name="toy", nodes=(node,), network=inside)


def offloaded(blocks=4, devices=1, batch=1, micro_batches=1, recompute=False, **offload):
    stage = Stage(device=0, devices=devices, chunks=(Chunk(first=0, runs=runs_of((1,) * (blocks + 2))),))
    return Plan(
        model="toy",
        cluster="toy",
        batch=batch,
        micro_batches=micro_batches,
        recompute=recompute,
        offload=Offload(**offload),
        stages=(stage,),
    )


# A row is 40 bytes, a second: all of a block comes in 4 s, without the gradient it goes in 3 s.


def test_everything_on_the_host():
    estimate = evaluate(offloaded(), toy(), machine())
    # Forward: 4 s, then of each block half of 1 + 0.1 s beside 3 s of writing and 1 s for the next gradient, the other
    # half beside 3 s for its other rows.  Backward: weights 1 s, four times 2 s beside copies, a last write.
    assert estimate.seconds == pytest.approx(4 + 3 * (3 + 3) + 3 + 0.55 + 1 + 4 * 2 + 1)
    (stage,) = estimate.stages
    causes = {"compute": 12.0, "recomputation": 0.0, "weights gathered": 0.0, "gradients exposed": 0.0, "update": 0.4}
    assert stage.seconds == pytest.approx(causes | {"copies": 35.55 - 12.4})
    assert stage.host_bytes == {"weights and gradients": 4 * 80.0, "optimizer": 4 * 80.0}


@pytest.mark.parametrize(
    "what, fetched, written, again", [("optimizer", 2, 2, 0), ("parameters", 2, 1, 1), ("both", 4, 3, 1)]
)
def test_groups(what, fetched, written, again):
    """Two groups of two blocks: the copies of one beside the computation of both."""
    estimate = evaluate(offloaded(kind=what, resident=1), toy(), machine())
    forward = fetched + max(1.1, written) + max(1.1, fetched - again) + max(1.1, written) + 1.1
    assert estimate.seconds == pytest.approx(forward + again + 2 * max(4, again) + again)
    assert estimate.stages[0].total_host_bytes == 2 * 40 * fetched


def test_a_block_is_copied_once_however_many_micro_batches():
    estimate = evaluate(offloaded(batch=2, micro_batches=2), toy(), machine())
    assert estimate.seconds == pytest.approx(4 + 3 * (3 + 3) + 3 + 1.05 + 1 + 4 * 4 + 1)


def test_at_once_no_gradient_is_there():
    estimate = evaluate(offloaded(update_in_backward=True), toy(), machine())
    # Forward: weights 1 s, beside half of the block before.  Backward: weights 1 s, then of each block half of 2.1 s
    # beside 3 s of writing, half beside 3 s of fetching; a last write.
    assert estimate.seconds == pytest.approx(1 + 3 * (0.5 + 1) + 1 + 1 + 4 * (3 + 3) + 3)
    assert estimate.stages[0].host_bytes == {"weights": 4 * 40.0, "optimizer": 4 * 80.0}
    assert estimate.stages[0].seconds["update"] == pytest.approx(0.4)


def test_recomputation_goes_through_every_block_again():
    estimate = evaluate(offloaded(recompute=True), toy(), machine())
    assert estimate.seconds == pytest.approx(4 + 3 * (3 + 3) + 3 + 0.55 + 1 + 4 * 3 + 1)
    assert estimate.stages[0].seconds["recomputation"] == 4


def test_data_ranks_copy_their_share():
    """Two devices: half of every row each; gathering 40 bytes takes (1 / 2) 40 / 20 = 1 s, as does summing them."""
    estimate = evaluate(offloaded(devices=2, batch=2), toy(), machine(devices=2))
    forward = 2 + 3 * (1.5 + 1.5) + 1.5 + (1 + 0.05 + 1) / 2
    backward = 0.5 + 4 * (1 + 2 + 1) + 0.5
    assert estimate.seconds == pytest.approx(forward + backward)
    (stage,) = estimate.stages
    assert stage.seconds["weights gathered"] == 8 and stage.seconds["gradients exposed"] == 4
    assert stage.total_host_bytes == 4 * 160  # of both, on one host


def test_without_overlap_copies_are_in_line():
    estimate = evaluate(offloaded(), toy(), machine().model_copy(update={"overlap": False}))
    assert estimate.seconds == pytest.approx(4 * (4 + 1.1 + 3) + 4 * (1 + 2 + 1))


def test_layers_that_differ_cannot_live_there():
    profile = toy().model_copy(update={"layers": ("first", "block", "first", "last")})
    with pytest.raises(InputError, match="toy has block and first"):
        evaluate(offloaded(blocks=2), profile, machine())


def fastest(profile, cluster, asked):
    """Of all plans written down: (seconds, offload, micro-batches, recomputation)."""
    found = []
    for offload in offloads(profile.num_layers - 2, ("parameters", "optimizer", "both")):
        for count in asked.micro_batches:
            for recompute in (False, True):
                plan = offloaded(profile.num_layers - 2, 1, asked.batch, count, recompute, **offload.model_dump())
                estimate = evaluate(plan, profile, cluster)
                if estimate.fits:
                    found.append(estimate.seconds)
    return min(found, default=None)


KINDS = (None, "parameters", "optimizer", "both")


@pytest.mark.parametrize("memory", [300, 500, 700, 900, 1100])
@pytest.mark.parametrize("host", [150, 350, 1000])
def test_the_fastest_that_fits_is_found(memory, host):
    profile, cluster = toy(blocks=6), machine(memory=memory, host=host)
    asked = request(4, offload=KINDS[1:])
    expected = fastest(profile, cluster, asked)
    if expected is None:
        with pytest.raises(InputError, match="fits no plan"):
            solve(profile, cluster, asked)
        return
    answer = solve(profile, cluster, asked)
    assert answer.estimate.seconds == pytest.approx(expected) and answer.estimate.fits
    assert answer.gap == pytest.approx(0) and answer.plan.offload is not None


@pytest.mark.parametrize("clip", ["global", "previous"])
@pytest.mark.parametrize("budget", [12, 13, 15, 20])
def test_what_blocks_keep_beside_is_the_best_that_fits(budget, clip):
    """Of every set of names, number of micro-batches and of blocks that stay."""
    settings = {"model.num_layers": 4, "data.batch_size": 8, "memory.offload": "both", "optimizer.clip": clip}
    answer = prepare("gpt-6.7b", cluster="h100x1x1", budget=f"{budget}GiB", overrides=settings).solve()
    names = [one.name for one in answer.model.profile.kinds["block"].tensors[1:] if one.read]
    sets = [SavedTensors(device=some) for size in range(len(names) + 1) for some in itertools.combinations(names, size)]
    seconds = []
    for saved, count, offload in itertools.product(sets, (1, 2, 4, 8), offloads(4, ("both",), clip == "previous")):
        how = {"micro_batches": count, "offload": offload, "recompute": True, "saved": saved}
        estimate = price(answer.plan.model_copy(update=how), answer.model)
        seconds += [estimate.seconds] if estimate.fits else []
    assert answer.estimate.seconds == pytest.approx(min(seconds)) and answer.gap == pytest.approx(0)


@pytest.mark.parametrize("budget", [24, 32])
@pytest.mark.parametrize("faster", [1, 8, 16])
def test_given_names_leave_no_faster_plan_unpriced(budget, faster):
    """The fastest of all plans with CPU offload, over a link that is this many times faster than the catalogue's."""
    cluster = find_cluster("h100x1x1")
    link = cluster.nodes[0].host.model_copy(update={"bandwidth": faster * cluster.nodes[0].host.bandwidth})
    node = cluster.nodes[0].model_copy(update={"host": link})
    names = {"data.batch_size": 16, "memory.recompute": "qkv,mlp_hidden"}
    task = prepare(
        "gpt2-1.5b", cluster=cluster.model_copy(update={"nodes": (node,)}), budget=f"{budget}GiB", overrides=names
    )
    answer = task.solve()
    priced = (price(plan, answer.model) for plan in offloaded_plans(task.request, answer.model))
    assert answer.estimate.seconds <= (1 + 1e-9) * min(one.seconds for one in priced if one.fits)


def test_blocks_on_the_host_keep_some_names():
    """Some percent faster than computing everything again."""
    plans = {
        how: prepare("gpt-13b", cluster="h100x1x1", batch=8, overrides={"memory.recompute": how}).solve()
        for how in ("auto", "full")
    }
    assert plans["auto"].plan.offload and plans["auto"].plan.saved.device == ("qkv", "projection_out", "mlp_hidden")
    assert plans["full"].plan.saved is None
    assert 0.9 < plans["auto"].estimate.seconds / plans["full"].estimate.seconds < 0.97


def test_what_fits_stays_on_the_devices():
    plain = solve(toy(), machine(), request(4))
    assert solve(toy(), machine(), request(4, offload=KINDS)).plan == plain.plan
    assert plain.plan.offload is None


def test_offload_off_forbids():
    with pytest.raises(InputError) as caught:
        solve(toy(blocks=12), machine(memory=1000), request(4))
    assert "CPU offload" not in str(caught.value)
    answer = solve(toy(blocks=12), machine(memory=1000), request(4, offload=KINDS))
    assert answer.plan.offload is not None


def test_refusals_name_what_is_missing():
    profile = toy(blocks=12)
    least = solve(profile, machine(memory=1000), request(4, offload=("both",))).estimate.stages[0]
    with pytest.raises(InputError, match=r"CPU offload it would fit with .* for offloaded state per host"):
        solve(profile, machine(memory=1000, host=least.total_host_bytes / 13), request(4, offload=("both",)))
    with pytest.raises(InputError, match=r"with CPU offload it would fit with .* per device"):
        solve(profile, machine(memory=300), request(4, offload=("both",)))


def test_a_smaller_batch_is_named():
    profile = toy(blocks=12)
    need = evaluate(offloaded(12, 1, 4, 4, True), profile, machine()).stages[0].total_bytes
    with pytest.raises(InputError, match="with CPU offload a batch of 2 would fit"):
        solve(profile, machine(memory=need - 1), request(4, offload=("both",)))


@pytest.mark.parametrize(("host", "room"), [(None, 9e8), (5e8, 5e8), (1e12, 1e9)])
def test_hosts_give_no_more_than_they_have(host, room):
    assert capped(machine(host=1e9), None, host).nodes[0].host_memory == pytest.approx(room)


def test_said_in_words():
    answer = solve(toy(blocks=6), machine(memory=700), request(4, offload=KINDS))
    offload = answer.plan.offload
    assert streamed_layers(answer.plan) == tuple(range(1, 7, 1 + offload.resident))
    where, why, passes = offload_lines(answer)
    assert (
        "CPU offload: " in where
        and "no plan fits; this plan would take 0.0011 MiB per device, where 0.000668 MiB are usable" in why
        and "wait for copies" in passes
    )
    roomy = solve(toy(blocks=6), machine(memory=7000), request(4, offload=("both",)))
    assert offload_lines(roomy)[1] == "why: memory.offload asks for it"
    everywhere = changed(answer)
    (lacking,) = (alternative.missing for alternative in everywhere if alternative.name == "no CPU offload")
    needed = lacking + answer.estimate.stages[0].capacity
    assert f"this plan would take {gib(needed)} per device" in why
    either = solve(toy(blocks=6), machine(memory=7000), request(4, offload=KINDS))
    assert either.plan.offload is None and either.on_devices == either.estimate.seconds
    slow, given = request(1, offload=KINDS), machine(memory=1000, speed=400.0)
    faster, without = solve(toy(blocks=6), given, slow), solve(toy(blocks=6), given, replace(slow, offload=(None,)))
    assert faster.plan.offload is not None and faster.on_devices == without.estimate.seconds > faster.estimate.seconds
    assert offload_lines(faster)[1] == "why: with all state on the devices a step would take 738.600 s"
    text = shape_text(answer.plan)
    assert ("state of every block" in text) == (offload.resident == 0)


@pytest.mark.parametrize("offload", offloads(6, KINDS[1:]), ids=lambda one: f"{one.kind}-{one.resident}")
@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize(("batch", "recompute"), [(1, False), (2, True)])
def test_the_picture_is_the_step(offload, update_in_backward, batch, recompute):
    """As long as the price; a stream does one thing at a time, and no copy outlasts the group in which it began."""
    plan = offloaded(
        6, batch=batch, recompute=recompute, **(offload.model_dump() | {"update_in_backward": update_in_backward})
    )
    step = offloaded_step(plan, CostModel(toy(6, embedding_and_head=3), machine()))
    found = offload_timeline(plan, step)
    assert found.seconds == pytest.approx(evaluate(plan, toy(6, embedding_and_head=3), machine()).seconds)
    streams = {stream: [one for one in found.spans if one.stream == stream] for stream in ("compute", "fetch", "write")}
    for spans in streams.values():
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(spans))
    moved = [sum(one.seconds for one in streams[stream]) for stream in ("fetch", "write")]
    copies, groups = step.copies, step.groups
    coming = groups * (copies.gradient + copies.forward_in + copies.backward_in) + (
        copies.first if update_in_backward else 0.0
    )
    going = groups * (copies.forward_out + copies.backward_out) + (copies.backward_out if update_in_backward else 0.0)
    assert moved == pytest.approx([coming, going])
    svg = svg_timeline(found, "toy")
    assert (
        "from the host" in svg
        and ("fetch of the state of block 1," if update_in_backward else "fetch of block 1,") in svg
    )
    assert (("blocks 2-" if update_in_backward else "blocks 1-") in svg) == (offload.resident > update_in_backward)


def test_a_model_larger_than_the_device_has_a_plan():
    """`jhpt plan gpt-6.7b --cluster h100x1x1 --budget 24GiB --batch 16`: 107 GB of state."""
    answer = prepare("gpt-6.7b", cluster="h100x1x1", budget="24GiB", batch=16).solve()
    (stage,) = answer.estimate.stages
    assert answer.plan.offload == Offload() and answer.plan.recompute
    assert 0.5 * 24 * 2**30 < stage.total_bytes < 24 * 2**30
    assert stage.total_host_bytes == pytest.approx(16 * 32 * 201379840, rel=1e-4)
    console = Console(width=150, file=io.StringIO())
    print_answer(console, answer)
    printed = console.file.getvalue()
    assert "all state of layers 1-32, 96.0 GiB of 209.5 GiB on each host" in printed and "GiB per host" in printed


@pytest.mark.parametrize(
    "settings, said",
    [
        pytest.param({"memory.offload": "off"}, "it would fit with", marks=pytest.mark.exhaustive),
        ({"memory.host_budget_bytes": "64GiB"}, "it would fit with 96.1 GiB for offloaded state per host"),
        (
            {"data.batch_size": 64},
            r"it would fit on 4 such devices, 1 to a node\n(.*\n)*with CPU offload a batch of 16 would fit",
        ),
        (
            {"optimizer.moments": "int8", "optimizer.weights": "bfloat16_kahan"},
            "with CPU offload it would fit, but only with state in float32: optimizer.weights=float32",
        ),
    ],
)
def test_what_the_configuration_rules_out_is_refused(settings, said):
    settings = {"data.batch_size": 16} | settings
    with pytest.raises(InputError, match=said):
        prepare("gpt-6.7b", cluster="h100x1x1", budget="24GiB", overrides=settings).solve()


OTHER_REASONS: list[dict[str, object]] = [
    {"parallel.gradient_compression.kind": "quantize", "parallel.zero": 1},
    {"memory.host_budget_bytes": "64GiB"},
    {"data.batch_size": 64},
]


@pytest.mark.parametrize("settings", quick_and_exhaustive(OTHER_REASONS, OTHER_REASONS[1:2]))
def test_float32_is_no_remedy_where_it_would_not_fit_either(settings):
    settings = {"data.batch_size": 16, "optimizer.moments": "int8"} | settings
    with pytest.raises(InputError) as caught:
        prepare("gpt-6.7b", cluster="h100x1x1", budget="24GiB", overrides=settings).solve()
    assert "in float32" not in str(caught.value)


def test_blocks_are_gathered_twice_and_scattered_once():
    """gpt2-1.5b on four ranks: what the step compiled for as many H100 sends, 8853.6 and 4426.8 MB (jax 0.10.2)."""
    cluster = find_cluster("h100x4x1")
    config = load_config("gpt2-1.5b", {"data.batch_size": 16, "memory.offload": "both", "parallel.micro_batches": 2})
    plan, profile = plan_by_hand(config, 4), analytic_profile(config, cluster.nodes[0].device)
    (sent,) = traffic(plan, profile)
    assert sent["all-gather", "data"].count == 96 and sent["reduce-scatter", "data"].count == 48
    assert sent["all-gather", "data"].bytes == pytest.approx(8853.6e6, rel=1e-3)
    assert sent["reduce-scatter", "data"].bytes == pytest.approx(4426.8e6, rel=1e-3)
