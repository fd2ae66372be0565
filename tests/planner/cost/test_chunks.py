"""Chunks of samples and compressed sums in the planner: priced consistently, chosen best, off unless asked for."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.comms.two_streams import makespan
from benchmarks.planner.instances import random_cluster, random_profile
from benchmarks.planner.oracle import spmd_plans
from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Compression
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Plan, Run, Stage, runs_of
from jhpt.planner.api import prepare
from jhpt.planner.cost.collectives import Operation
from jhpt.planner.cost.communication import (
    all_gather,
    all_to_all,
    compressed_all_reduce_seconds,
    compression_kernel_seconds,
    stream_of,
)
from jhpt.planner.cost.estimate import evaluate, price, stage_times
from jhpt.planner.cost.layers import layer_strategy, strategy_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.choice import plan_to_run
from jhpt.planner.search.request import COMPRESSIONS, SAMPLE_CHUNKS, compressions, request
from jhpt.planner.search.solve import search, solve
from tests.covers import quick_and_exhaustive

EIGHT = Compression(bits=8)


def tokens_in(profile):
    """The profile as one of sequences of 2 tokens, 4 bytes a token at least."""
    kinds = {
        name: kind.model_copy(update={"boundary_bytes": max(kind.boundary_bytes, 8.0)})
        for name, kind in profile.kinds.items()
    }
    return profile.model_copy(update={"kinds": kinds, "sample": "a sequence of 2 tokens"})


def drawn(seed, devices=4, layers=4, overlap=True):
    """A random model of random layers that chunks may help, on a random cluster."""
    rng = np.random.default_rng(seed)
    profile = tokens_in(random_profile(rng, layers, min_layers=3, degrees=(1, 2, 4)))
    cluster = random_cluster(rng, devices, min_devices=devices).model_copy(update={"overlap": overlap})
    batch = int(rng.choice([4, 6, 8]))
    zero, recompute = (0, int(rng.choice([1, 3]))), (bool(rng.integers(2)),)
    asked = request(batch, (1, 2), zero=zero, recompute=recompute, sample_chunks=SAMPLE_CHUNKS)
    return CostModel(profile, cluster), replace(asked, schedules=("eager-1f1b", "gpipe"))


def chunked(space, stages, batch, micro_batches, zero, recompute):
    """A strategy with all numbers of chunks that the planner may choose."""
    return replace(layer_strategy(space, stages, batch, micro_batches, zero, recompute), sample_chunks=SAMPLE_CHUNKS)


def with_chunks(plan: Plan, model: CostModel, chunks=None) -> Plan:
    """The plan with the chunks that are looked up for it, or with these of every layer."""
    stages = []
    for stage in plan.stages:
        strategy = replace(strategy_of(plan), sample_chunks=SAMPLE_CHUNKS)
        cut = {t: model.sample_chunks(stage.devices, t, strategy) for t in plan.degrees}
        made = tuple(
            Chunk(
                first=chunk.first,
                runs=runs_of(
                    chunk.tensor,
                    [chunks[at] if chunks else cut[t][at] for at, t in enumerate(chunk.tensor, chunk.first)],
                ),
            )
            for chunk in stage.chunks
        )
        stages.append(stage.model_copy(update={"chunks": made}))
    return plan.model_copy(update={"stages": tuple(stages)})


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(24), range(7)))
def test_search_finds_the_best_of_all_plans_with_their_chunks(seed):
    """And the best compression with them, where there is a choice."""
    model, asked = drawn(seed, overlap=seed % 6 > 0)
    asked = replace(asked, compression=[(None,), (EIGHT,), (None, EIGHT)][seed % 3])
    found = search(asked, model, "spmd")
    least = np.inf
    for plan, how in itertools.product(spmd_plans(asked, model), asked.compression):
        on = plan.degrees[-1] > 1 and how is not None
        if plan.schedule == "interleaved" or (plan.sequence and on):
            continue
        plan = plan.model_copy(update={"compression": how if on else Compression()})
        estimate = price(with_chunks(plan, model), model)
        if estimate.fits:
            least = min(least, estimate.seconds)
    assert found.seconds == pytest.approx(least, rel=1e-9)
    if found.plan is not None:
        assert price(found.plan, model).seconds == pytest.approx(found.seconds, rel=1e-12)
        assert found.lower_bound <= found.seconds


def passes(plan, model):
    """Forward and backward seconds of a micro-batch, of all stages."""
    times = stage_times(plan, model)
    return float(times.forward.sum()), float(times.backward.sum())


def one_stage(model, devices, tensor, batch, chunks, recompute=False):
    runs = runs_of((tensor,) * model.num_layers, chunks)
    stage = Stage(device=0, devices=devices, chunks=(Chunk(first=0, runs=runs),))
    return Plan(model="m", cluster="c", batch=batch, micro_batches=1, recompute=recompute, stages=(stage,))


@pytest.mark.parametrize("seed", range(30))
def test_chunks_are_the_best_there_are(seed):
    """Of all assignments to up to four layers between ends, of what does not make a layer alone slower."""
    model, asked = drawn(100 + seed, layers=6)
    tops = [model.kinds[kind].max_tensor for kind in model.index]
    tensor = max((t for t in (4, 2) if all(top % t == 0 for top in tops)), default=1)
    recompute = asked.recompute[0]
    alone = model.profile.layers

    def slower(layer, cut):
        own = model.profile.model_copy(update={"layers": (alone[0], alone[layer], alone[-1])})
        costs = CostModel(own, model.cluster)
        plain, made = (passes(one_stage(costs, 4, tensor, asked.batch, (1, n, 1), recompute), costs) for n in (1, cut))
        return any(one > other * (1 + 1e-12) for one, other in zip(made, plain, strict=True))

    local = -(-asked.batch * tensor // 4)
    choices = [[c for c in SAMPLE_CHUNKS if c <= local and not slower(at, c)] for at in range(1, len(alone) - 1)]
    every = {
        inner: sum(passes(one_stage(model, 4, tensor, asked.batch, (1, *inner, 1), recompute), model))
        for inner in itertools.product(*choices)
    }
    strategy = chunked("spmd", 1, asked.batch, 1, 0, recompute)
    chosen = model.sample_chunks(4, tensor, strategy)
    assert every[chosen[1:-1]] == pytest.approx(min(every.values()), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_chunks_are_never_slower_than_none(seed):
    """Of any plan, stages and mixed degrees included, with recomputation or without; with ZeRO-1 by one filling."""
    model, asked = drawn(200 + seed)
    for plan in itertools.islice(spmd_plans(asked, model), seed % 7, None, 7):
        plain, made, filled = price(plan, model).seconds, with_chunks(plan, model), 0.0
        if plan.zero == 1:
            strategy, stage = replace(strategy_of(made), sample_chunks=(2,)), made.stages[0]
            place = model.places.at(0, stage.devices)
            filled = sum(float(model.table(place, t, strategy).forward_filling.sum()) for t in made.degrees)
        assert price(made, model).seconds <= plain * (1 + 1e-9) + filled


def test_chunks_do_not_expose_the_all_gathers_of_zero3():
    """All-reduces that are hidden take the time in which the all-gathers of the weights hid themselves."""
    cluster = find_cluster("a10040x4x4-25gbe")
    profile = analytic_profile(load_config("gpt2-774m", {"model.num_layers": 11}), cluster.nodes[0].device)
    model, runs = CostModel(profile, cluster), runs_of((4,) * 13, (1,) * 13)
    stage = Stage(device=0, devices=16, chunks=(Chunk(first=0, runs=runs),))
    options = {"batch": 12, "micro_batches": 1, "zero": 3, "sequence": True, "recompute": True}
    plan = Plan(model="m", cluster="c", stages=(stage,), **options)
    assert price(with_chunks(plan, model, (1, *(2,) * 11, 1)), model).seconds > price(plan, model).seconds
    assert price(with_chunks(plan, model), model).seconds <= price(plan, model).seconds


def gpt(layers=8, nodes=1, **changes):
    cluster = find_cluster(f"h100x8x{nodes}").model_copy(update=changes)
    profile = analytic_profile(load_config("gpt-6.7b", {"model.num_layers": layers}), cluster.nodes[0].device)
    return CostModel(profile, cluster)


def tensor_parallel(layers=8, chunks=1, stages=1, batch=8, **options):
    devices, each = 8 // stages, (layers + 2) // stages
    row = tuple(
        Stage(
            device=s * devices,
            devices=devices,
            chunks=(Chunk(first=s * each, runs=(Run(layers=each, tensor=devices, sample_chunks=chunks),)),),
        )
        for s in range(stages)
    )
    return Plan(model="m", cluster="c", batch=batch, stages=row, **({"micro_batches": 1} | options))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_blocks_take_what_the_two_streams_take(chunks):
    """Equal blocks between the ends: the estimate is the simulation, uneven chunks and the ramps included."""
    model, layers = gpt(), 8
    found = np.sum(passes(tensor_parallel(layers, chunks), model))
    embedding_and_head = gpt(1)
    bare = np.sum(passes(tensor_parallel(1), embedding_and_head))
    place = model.places.at(0, 8)
    strategy = layer_strategy("spmd", 1, 8, 1, 0, False)
    one = model.table(place, 8, strategy)
    block = float((one.forward + one.forward_tensor + one.backward + one.backward_tensor)[1])
    played = 0.0
    for direction in (0, 1):
        operation = model.tensor_all_reduce.operation(place, 8, strategy, direction)
        index = int(model.index[1])
        seconds = {n: (float(operation.work(n)[index]), float(operation.travel(n)[index])) for n in range(1, 9)}
        half = Operation(work=lambda n, s=seconds: s[n][0] / 2, travel=lambda n, s=seconds: s[n][1] / 2)
        played += makespan([half] * (2 * layers), [chunks] * (2 * layers), 8)
    assert found == pytest.approx(bare - block + played, rel=1e-9)


def test_gpt_hides_its_sums_behind_chunks():
    """Tensor degree 8 of one node: chosen, and most of what was exposed is hidden; without overlap nothing is."""
    model = gpt()
    strategy = chunked("spmd", 1, 8, 1, 0, False)
    chosen = model.sample_chunks(8, 8, strategy)
    assert set(chosen) in ({2}, {4})
    exposed = {
        c: price(tensor_parallel(chunks=c), model).stages[0].seconds["tensor communication"] for c in (1, chosen[1])
    }
    assert exposed[chosen[1]] < exposed[1] / 2
    inline = gpt(overlap=False)
    assert set(inline.sample_chunks(8, 8, strategy)) == {1}
    assert price(tensor_parallel(chunks=2), inline).seconds >= price(tensor_parallel(chunks=1), inline).seconds


def test_latency_decides_against_chunks():
    node = find_cluster("h100x8x1").nodes[0]
    slow = node.model_copy(update={"inside": node.inside.model_copy(update={"latency": 1.0})})
    model = gpt(nodes=1)
    model = CostModel(model.profile, model.cluster.model_copy(update={"nodes": (slow,)}))
    assert set(model.sample_chunks(8, 8, chunked("spmd", 1, 8, 1, 0, False))) == {1}


def test_pipelines_have_one_number():
    model = gpt(layers=6)
    chosen = model.sample_chunks(4, 4, chunked("spmd", 2, 32, 2, 0, False))
    assert len(set(chosen)) == 1 and chosen[0] > 1
    mixed = tensor_parallel(6, stages=2, chunks=1, micro_batches=2)
    last = mixed.stages[1].chunks[0]
    runs = (last.runs[0].model_copy(update={"sample_chunks": 2}),)
    last = mixed.stages[1].model_copy(update={"chunks": (last.model_copy(update={"runs": runs}),)})
    with pytest.raises(InputError, match="one number of sample chunks, found \\[1, 2\\]"):
        price(mixed.model_copy(update={"stages": (mixed.stages[0], last)}), model)


def test_without_tensor_ranks_chunks_change_nothing():
    model = gpt()
    plan = tensor_parallel()
    for chunks in (1, 4):
        runs = (Run(layers=10, tensor=1, sample_chunks=chunks),)
        stage = plan.stages[0].model_copy(update={"chunks": (Chunk(first=0, runs=runs),)})
        own = price(plan.model_copy(update={"stages": (stage,)}), model)
        other = price(plan.model_copy(update={"stages": (stage,), "compression": EIGHT}), model)
        assert (own.seconds, own.stages) == (other.seconds, other.stages)
        if chunks == 1:
            plain = own
    assert (own.seconds, own.stages) == (plain.seconds, plain.stages)


def test_compressed_sums_by_hand():
    """Two ranks of one link, 1 sample of 4 x 128 numbers of 2 bytes.

    Two rows are 256 bytes of codes and a line of 64 with their ranges, four are 512 and a line.
    """
    model = gpt()
    group = model.places.at(0, 8).tensor_group(2)
    link, stream = group.inside, replace(stream_of(model.profile), tokens=4, width=128)
    steps = Compression(bits=8, steps=2)
    half = 320 / link.rate(320) + link.latency
    assert compressed_all_reduce_seconds(group, steps, stream, 1, 1) == pytest.approx(2 * half)
    assert all_to_all(group, 640.0) == pytest.approx(half) == all_gather(group, 640.0)
    once = Compression(bits=8, steps=1)
    assert compressed_all_reduce_seconds(group, once, stream, 1, 3) == pytest.approx(
        3 * 576 / link.rate(3 * 576) + link.latency
    )
    device = model.cluster.nodes[0].device
    moved = 1024 + 640 + (640 + 4 * 256) + (4 * 256 + 320) + (640 + 1024)
    assert compression_kernel_seconds(2, steps, stream, 1, device) == pytest.approx(moved / device.stream_rate)
    moved = 1024 + 576 + (2 * 576 + 1024)
    assert compression_kernel_seconds(2, once, stream, 1, device) == pytest.approx(moved / device.stream_rate)


def test_compression_is_off_unless_asked_for():
    slow = find_cluster("v100x4x4-10gbe")
    base = {"data.batch_size": 16, "data.sequence_length": 1024}
    plans = {
        word: prepare("gpt2-1.5b", cluster=slow, micro_batches=1, overrides=base | {"parallel.compression": word})
        for word in ("off", "auto")
    }
    assert plans["off"].request.compression == (None,)
    own = COMPRESSIONS[1].model_copy(update={"importance": "own"})
    assert plans["auto"].request.compression == (None, COMPRESSIONS[0], own)
    given = prepare("gpt2-1.5b", cluster=slow, overrides=base | {"parallel.compression.bits": 4})
    assert given.request.compression == (Compression(bits=4),)
    assert given.request.sample_chunks == SAMPLE_CHUNKS
    assert prepare("vgg16", cluster=slow, batch=64).request.sample_chunks == (1,)
    assert compressions(load_config("gpt-tiny")) == (None,)
    bert = compressions(load_config("bert-tiny", {"parallel.compression": {"bits": 8, "tokens": 0.5}}))
    assert bert == (Compression(bits=8, tokens=0.5, importance="attention"),)


@pytest.mark.parametrize("bandwidth", [1e9, 1e10, 1e11])
def test_auto_compresses_where_that_is_faster(bandwidth):
    """A link of 1 GB/s between two devices that need each other's memory; the choice is never slower than off."""
    model = gpt(layers=4)
    node = model.cluster.nodes[0]
    link = node.inside.model_copy(update={"bandwidth": bandwidth, "measured": None, "latency": 1e-6})
    roomy = node.device.model_copy(update={"memory": 13e9})
    cluster = model.cluster.model_copy(
        update={"nodes": (node.model_copy(update={"inside": link, "devices": 2, "device": roomy}),)}
    )
    asked = request(2, 1, zero=(0,), sample_chunks=SAMPLE_CHUNKS)
    off = solve(model.profile, cluster, asked)
    auto = solve(model.profile, cluster, replace(asked, compression=(None, *COMPRESSIONS)))
    assert not off.plan.compression.on
    assert auto.estimate.seconds <= off.estimate.seconds
    assert auto.plan.compression.on == (auto.estimate.seconds < off.estimate.seconds)
    if bandwidth == 1e9 and off.plan.degrees[-1] > 1:
        assert auto.plan.compression in COMPRESSIONS
    run = plan_to_run(auto, replace(asked, compression=(None, *COMPRESSIONS)))
    assert run.compression.on == (auto.estimate.seconds * 1.05 < off.estimate.seconds)
    given = solve(model.profile, cluster, replace(asked, compression=(EIGHT,)))
    assert given.plan.compression == (EIGHT if given.plan.degrees[-1] > 1 else Compression())


@pytest.mark.parametrize("how", [None, *COMPRESSIONS])
def test_more_bandwidth_is_never_slower(how):
    model = gpt(layers=4)
    node, seconds = model.cluster.nodes[0], []
    for factor in (0.01, 0.1, 0.5, 1, 2, 10):
        link = node.inside.model_copy(update={"bandwidth": node.inside.bandwidth * factor, "measured": None})
        cluster = model.cluster.model_copy(update={"nodes": (node.model_copy(update={"inside": link}),)})
        costs = CostModel(model.profile, cluster)
        plan = with_chunks(tensor_parallel(4, compression=how or Compression()), costs)
        seconds.append(price(plan, costs).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_what_is_not_compressed():
    model = gpt()
    with pytest.raises(InputError, match="within one SPMD program only"):
        price(tensor_parallel(space="general", compression=EIGHT), model)
    with pytest.raises(InputError, match="within one SPMD program only"):
        price(tensor_parallel(space="general", chunks=2), model)
    images = model.profile.model_copy(update={"sample": "an image"})
    with pytest.raises(InputError, match="tokens of a sequence"):
        evaluate(tensor_parallel(compression=EIGHT), images, model.cluster)
    asked = replace(request(8), compression=(EIGHT,))
    for profile, space, words in ((model.profile, "general", "space=general"), (images, "spmd", "an image")):
        with pytest.raises(InputError, match=words):
            solve(profile, model.cluster, asked, space)
