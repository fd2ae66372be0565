"""Plans of space=general by hand and at random, and what they compute."""

import itertools
import random
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import StagesLayout
from tests.sharding.plans import by_path, on_host

KEY = 7


def general(
    layers: Sequence[int],
    devices: Sequence[int],
    degrees: Sequence[int],
    *,
    batch=16,
    micro_batches=1,
    samples: tuple[int, ...] | None = None,
    **settings,
) -> Plan:
    """layers: of every chunk, in the order of the model.  devices: of every stage.  degrees: of every layer.  samples:
    by data rank of the only stage."""
    edges = [0, *itertools.accumulate(layers)]
    starts = [0, *itertools.accumulate(devices)]
    chunks = [Chunk(first=a, runs=runs_of(degrees[a:b])) for a, b in itertools.pairwise(edges)]
    stages = tuple(
        Stage(device=starts[s], devices=count, samples=samples, chunks=tuple(chunks[s :: len(devices)]))
        for s, count in enumerate(devices)
    )
    settings |= {"space": "general", "batch": batch, "micro_batches": micro_batches, "stages": stages}
    return Plan(model="any", cluster="any", **settings)


def random_plan(seed: int, layers: int, *, batch: int, most_tensor: int) -> Plan:
    """Stages of unequal sizes on two to eight devices, each layer with a tensor degree of its own."""
    rng = random.Random(seed)
    count = rng.randint(2, min(4, layers))
    while True:
        devices = [rng.randint(1, 4) for _ in range(count)]
        if sum(devices) <= 8 and len(set(devices)) > 1:
            break
    cuts = sorted(rng.sample(range(1, layers), count - 1))
    spans = [b - a for a, b in itertools.pairwise([0, *cuts, layers])]
    degrees = [
        rng.choice([t for t in (1, 2, 4) if owned % t == 0 and t <= most_tensor])
        for owned, span in zip(devices, spans, strict=True)
        for _ in range(span)
    ]
    settings = {
        "batch": batch,
        "micro_batches": rng.choice([1, 2, 4]),
        "schedule": rng.choice(["1f1b", "eager-1f1b", "gpipe"]),
    }
    return general(spans, devices, degrees, **settings)


def text(plan: Plan) -> str:
    """A name for a test: devices of the stages and the degrees of their layers."""
    stages = "|".join(
        f"{stage.devices}:{','.join(str(t) for chunk in stage.chunks for t in chunk.tensor)}" for stage in plan.stages
    )
    return f"{stages} x{plan.micro_batches} {plan.schedule}"


def placed(layout: StagesLayout, params):
    """What the chunks store of the model's tree, and a key on every stage."""
    parts = [on_host(layout.part(at, params)) for at in range(len(layout.chunks))]
    stored = tuple(
        jax.device_put(part, chunk.layout.shardings(part)) for chunk, part in zip(layout.chunks, parts, strict=True)
    )
    keys = tuple(jax.device_put(jax.random.key(KEY), chunk.named(PartitionSpec())) for chunk in layout.chunks)
    return stored, keys


def found(execution: StagesExecution, params, rows):
    """(gradients of the mean loss by path, loss, norm, loss of a forward pass alone)."""
    stored, keys = placed(execution.layout, params)
    batches = execution.batches(rows)
    gradients, report = execution.gradients(stored, batches, keys)
    square, *sums = np.asarray(report[0], np.float64)
    sums = jax.tree.unflatten(execution.sums_tree, sums)
    per_token = 1 / (execution.scale * sums.tokens)
    tree = execution.layout.joined([on_host(part) for part in gradients])
    alone = jax.tree.unflatten(execution.sums_tree, np.asarray(execution.sums(stored, batches, keys)[-1], np.float64))
    leaves = {path: leaf * per_token for path, leaf in by_path(tree).items()}
    return leaves, sums.nll / sums.tokens, square**0.5 * per_token, alone.nll / alone.tokens
