"""What blocks save is part of the search: no names and no grid by hand are faster, and no bound is too high."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jhpt.core.divisors import divisors
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import ONE_CHUNK, Chunk, Plan, SavedTensors, Stage, runs_of
from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import search
from tests.covers import quick_and_exhaustive
from tests.planner.brute_force import spmd_plans
from tests.planner.saved import with_every_set

MODELS = {"gpt2-774m": 1024, "gpt-6.7b": 2048, "gpt-13b": 2048, "llama-8b": 8192, "bert-large": 512}
"""Preset and longest sequence."""

CLUSTERS = ("h100x8x1", "h100x4x2", "a100x8x2", "a10040x4x4-25gbe", "v100x4x2-10gbe", "a100x4x1")

GRIDS = 30
"""Grids by hand for every request."""


def with_memory(cluster, memory):
    """The cluster with so many bytes on each device."""
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"memory": memory, "reserve": 0.0})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def tight(seed):
    """A random request that has to save memory, its model on a cluster, and what is found."""
    rng = np.random.default_rng(seed)
    while True:
        preset = str(rng.choice(list(MODELS)))
        length = MODELS[preset] // int(rng.choice([1, 1, 2]))
        changes = {"model.num_layers": int(rng.integers(4, 25)), "data.sequence_length": length}
        batch = int(rng.choice([8, 12, 16, 32, 64]))
        task = prepare(preset, cluster=str(rng.choice(CLUSTERS)), batch=batch, overrides=changes)
        whole = CostModel(task.profile, with_memory(task.cluster, 1e18))
        fastest = search(replace(task.request, recompute=(False,)), whole, "spmd")
        most = max(stage.total_bytes for stage in price(fastest.plan, whole).stages)
        model = CostModel(task.profile, with_memory(task.cluster, most * 10 ** rng.uniform(-1, 0)))
        found = search(task.request, model, "spmd")
        if found.plan is not None and found.plan.recompute:
            return rng, task.request, model, found


def named(profile):
    """Every set of a block's tensors that a backward pass reads."""
    read = [one.name for one in profile.kinds["block"].tensors if one.read and one.name != BLOCK_INPUT]
    return [SavedTensors(device=names) for size in range(len(read) + 1) for names in itertools.combinations(read, size)]


def grid_by_hand(rng, request, model: CostModel) -> Plan:
    """A random plan of equal stages, without sample chunks."""
    n, devices = model.num_layers, model.cluster.num_devices
    tensor = int(rng.choice(model.common_degrees(devices)))
    m = int(rng.choice(request.micro_batches))
    data = int(rng.choice(divisors(request.batch // m, up_to=devices // tensor)))
    stages = int(rng.integers(1, min(n, devices // (data * tensor)) + 1))
    v = int(rng.integers(1, 4)) if stages > 1 and m % stages == 0 and 3 * stages <= n else 1
    edges = [n * part // (stages * v) for part in range(stages * v + 1)]
    chunks = [Chunk(first=a, runs=runs_of([tensor] * (b - a))) for a, b in itertools.pairwise(edges)]
    size = data * tensor
    return Plan(
        model="any",
        cluster="any",
        batch=request.batch,
        micro_batches=m,
        schedule="interleaved" if v > 1 else "eager-1f1b",
        zero=int(rng.choice([0, 1, 3])),
        sequence=bool(rng.integers(2)) and tensor > 1,
        recompute=True,
        stages=[Stage(device=s * size, devices=size, chunks=chunks[s::stages]) for s in range(stages)],
    )


def seconds(plan, model):
    """Of a plan that fits."""
    try:
        estimate = price(plan, model)
    except InputError:
        return np.inf
    return estimate.seconds if estimate.fits else np.inf


def miss(seed, searched=1):
    """By how much the best plan by hand is faster than the planner's; at most 0.

    By hand: the planner's own plan and random grids with all sets of names, and searches with given names.
    """
    rng, asked, model, found = tight(seed)
    sets, others = named(model.profile), [plan for _, plan in found.shapes.values()]
    plans = [found.plan, *others[-3:], *(grid_by_hand(rng, asked, model) for _ in range(GRIDS))]
    best, costless = np.inf, CostModel(model.profile, with_memory(model.cluster, 1e18))
    for plan in plans:
        if seconds(plan.model_copy(update={"recompute": False, "saved": None}), costless) < found.seconds:
            every = (plan.model_copy(update={"recompute": True, "saved": saved}) for saved in sets)
            best = min(best, *(seconds(one, model) for one in every))
    for at in rng.choice(len(sets), searched):
        given = CostModel(model.profile, model.cluster, saved=sets[at])
        best = min(best, search(replace(asked, recompute=(True,), saved=sets[at]), given, "spmd").seconds)
    assert best >= found.lower_bound * (1 - 1e-9)
    return found.seconds / best - 1


SMALL = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 2,
    "model.d_ff": 256,
    "model.max_length": 512,
    "data.sequence_length": 512,
}


@pytest.mark.parametrize(
    ("preset", "zero", "m", "share", "host"),
    quick_and_exhaustive(
        itertools.product(("gpt-tiny", "bert-tiny"), (0, 3), (1, 4), (0.3, 0.7), (False, True)),
        [("gpt-tiny", 3, 1, 0.3, False), ("bert-tiny", 0, 4, 0.7, False)],
    ),
)
def test_brute_force_over_plans_and_sets(preset, zero, m, share, host):
    """Four layers on two devices, in a share of the memory between the least that any plan takes and what the fastest
    takes: cuts, degrees, cut sequences and all sets of names."""
    task = prepare(preset, cluster="a100x2x1", batch=8, overrides=SMALL)
    asked = request(8, m, zero=(zero,), host=host, schedules=ONE_CHUNK)
    plenty = CostModel(task.profile, with_memory(task.cluster, 1e18))
    plans = spmd_plans(replace(asked, recompute=(False,)), plenty)
    plans = [plan for plan in plans if plan.chunks == 1]
    every = [*plans, *(each for plan in plans for each in with_every_set(plan, plenty, host=host))]
    estimates = [price(each, plenty) for each in every]
    priced = [(one.seconds, max(stage.total_bytes for stage in one.stages)) for one in estimates]
    least, most = min(size for _, size in priced), min(priced)[1]
    memory = least + share * (most - least)
    found = search(asked, CostModel(task.profile, with_memory(task.cluster, memory)), "spmd")
    assert found.seconds == pytest.approx(min(s for s, size in priced if size <= memory), rel=1e-9)
    assert found.lower_bound == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(200), [4]))
def test_no_names_by_hand_are_faster(seed):
    assert miss(seed) <= 1e-9


@pytest.mark.parametrize(
    ("preset", "cluster", "batch", "layers", "length", "micro_batches", "zero", "schedule", "memory"),
    [
        # Interleaved: stages that save everything fit with other cuts than stages that save less would like best.
        ("llama-8b", "a100x8x2", 32, 23, 4096, 16, 0, "interleaved", 10.7e9),
        # Gathered weights hide all-reduces that run again, but not computation.
        ("gpt2-774m", "v100x4x2-10gbe", 16, 16, 1024, 8, 3, "eager-1f1b", 0.94e9),
    ],
)
def test_no_names_by_hand_are_faster_than_the_plan(
    preset, cluster, batch, layers, length, micro_batches, zero, schedule, memory
):
    changes = {"model.num_layers": layers, "data.sequence_length": length}
    task = prepare(preset, cluster=cluster, batch=batch, overrides=changes)
    asked = replace(task.request, micro_batches=(micro_batches,), zero=(zero,), schedules=(schedule,))
    model = CostModel(task.profile, with_memory(task.cluster, memory))
    found = search(asked, model, "spmd")
    by_hand = [found.plan.model_copy(update={"recompute": True, "saved": saved}) for saved in named(model.profile)]
    assert min(seconds(plan, model) for plan in by_hand) >= found.seconds * (1 - 1e-9)
