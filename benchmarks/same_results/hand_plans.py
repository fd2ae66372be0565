"""Plans drawn from a fixed seed, to record what each costs or that it is refused.

They include what the planner seldom chooses: gpipe, uneven cuts, several tensor degrees, tensors saved on the host.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from requests_for_plans import MIXED

NAMES = ("qkv", "attention_out", "projection_out", "mlp_hidden")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster, for which plans are drawn."""

    model: str
    blocks: int
    cluster: str
    devices: int
    space: str = "spmd"


CASES = (
    Case(model="gpt2-124m", blocks=12, cluster="a100x8x1", devices=8),
    Case(model="bert-base", blocks=12, cluster="v100x2x2-10gbe", devices=4),
    Case(model="llama-8b", blocks=32, cluster="h100x8x2", devices=16),
    Case(model="gpt2-1.5b", blocks=48, cluster="h100x1x1", devices=1),
    Case(model="gpt2-350m", blocks=24, cluster=MIXED, devices=8, space="general"),
)

Plan = dict[str, Any]


def hand_plans(case: Case, count: int = 60) -> Iterator[Plan]:
    """Plans in the keys of the old tree; about a third of them is refused."""
    rng = random.Random(f"{case.model} {case.cluster}")
    for _ in range(count):
        yield _general(case, rng) if case.space == "general" else _spmd(case, rng)


def _spmd(case: Case, rng: random.Random) -> Plan:
    pipe = rng.choice([size for size in (1, 1, 2, 4) if case.devices % size == 0])
    chunks = rng.choice((1, 1, 2)) if pipe > 1 else 1
    devices = case.devices // pipe
    tensor = rng.choice([size for size in (1, 2, 4, 8) if devices % size == 0])
    parts = pipe * chunks
    edges = [0, *sorted(rng.sample(range(2, case.blocks), parts - 1)), case.blocks + 2]
    samples = rng.choice((1, 1, 2))

    def chunk(part: int) -> Plan:
        layers = edges[part + 1] - edges[part]
        run = {"layers": layers, "tensor": tensor, "sample_chunks": samples}
        if parts > 1 or layers < 4 or rng.random() < 0.5:
            return {"first": edges[part], "runs": [run]}
        first = rng.randint(1, layers - 1)
        other = rng.choice([size for size in (1, 2, 4, 8) if devices % size == 0])
        runs = [run | {"layers": first}, run | {"layers": layers - first, "tensor": other}]
        return {"first": edges[part], "runs": runs}

    stages = [
        {"device": s * devices, "devices": devices, "chunks": [chunk(part) for part in range(s, parts, pipe)]}
        for s in range(pipe)
    ]
    schedule = "interleaved" if chunks > 1 else rng.choice(("1f1b", "eager-1f1b", "gpipe"))
    return _common(case, rng) | {"schedule": schedule, "stages": stages} | _decisions(rng)


def _general(case: Case, rng: random.Random) -> Plan:
    stages, device, first, count = [], 0, 0, rng.choice((1, 2, 3, 4))
    edges = [*sorted(rng.sample(range(2, case.blocks), count - 1)), case.blocks + 2]
    for edge in edges:
        devices = rng.choice((1, 2))
        runs = [{"layers": edge - first, "tensor": rng.choice((1, devices))}]
        stages.append({"device": device, "devices": devices, "chunks": [{"first": first, "runs": runs}]})
        device, first = device + devices, edge
    chosen = {
        "schedule": rng.choice(("1f1b", "eager-1f1b", "gpipe")),
        "zero": rng.choice((0, 1)),
        "recompute": rng.random() < 0.4,
    }
    return _common(case, rng) | chosen | {"stages": stages}


def _common(case: Case, rng: random.Random) -> Plan:
    micro_batches = rng.choice((1, 2, 4, 8))
    named = {"model": case.model, "cluster": case.cluster, "space": case.space}
    return named | {"batch": rng.choice((32, 64)), "micro_batches": micro_batches}


def _decisions(rng: random.Random) -> Plan:
    """Choices beside the division of layers."""
    saved = rng.sample(NAMES, rng.choice((1, 2, 3)))
    cut = rng.randint(0, len(saved))
    memory: list[Plan] = [
        {},
        {},
        {"recompute": True},
        {"recompute": True, "kept": {"device": saved[cut:], "host": saved[:cut]}},
        {"recompute": True, "kept": {"device": saved, "host": ["residual_in"]}},
        {
            "recompute": rng.random() < 0.5,
            "offload": {
                "what": rng.choice(("parameters", "optimizer", "both")),
                "resident": rng.choice((0, 1, 2)),
                "ahead": rng.choice((0, 1, 2)),
                "at_once": rng.random() < 0.5,
            },
        },
    ]
    sums: list[Plan] = [
        {},
        {},
        {"sequence": True},
        {"compression": {"bits": 8, "importance": "own"}},
        {"compression": {"bits": 8, "tokens": 0.3, "steps": 2, "importance": "own"}},
        {"gradient_compression": {"kind": "quantize", "bits": 4}},
        {"gradient_compression": {"kind": "topk", "share": 0.05, "momentum": 0.9}},
    ]
    zero = {"zero": rng.choice((0, 1, 3)), "prefetch": rng.choice((0, 1, 2))}
    return zero | rng.choice(memory) | rng.choice(sums)
