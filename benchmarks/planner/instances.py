"""Random models, clusters and requests, small enough that every plan can be priced."""

from dataclasses import dataclass

import numpy as np

from benchmarks.planner.decisions import count
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.divisors import divisors
from jhpt.core.plan import Space, Zero
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.request import ZERO, Request, request

DEGREES = (1, 2, 4, 6)
"""The possible largest tensor degrees of a layer."""

WIDTHS: tuple[tuple[tuple[int, ...], bool], ...] = ((DEGREES, False), (DEGREES, True), ((1, 2), True), ((1,), True))
"""(degrees, whether there is one choice of micro-batches, ZeRO and recomputation); each entry has fewer plans than the
one before."""

TOKENS = 8
"""Of a sample.  Some tensor degrees divide it."""

ATTEMPTS = 8
"""Draws with one entry of `WIDTHS` before the next is tried."""


TIED_ELSEWHERE = 0.2
"""Share of the models whose first layer shares a parameter with any layer, not with the last one."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One planning problem.  plans: how many it has."""

    space: Space
    asked: Request
    model: CostModel
    plans: int


def random_instance(
    rng: np.random.Generator, space: Space, *, layers: int, devices: int, plans: int, mixed: bool = False
) -> Instance:
    """A problem of `layers` layers, on `devices` devices, with at most `plans` plans."""
    for degrees, single in WIDTHS:
        for _ in range(ATTEMPTS):
            profile = random_profile(rng, layers, min_layers=layers, degrees=degrees)
            if rng.random() < TIED_ELSEWHERE:
                profile = _tied_anywhere(rng, profile)
            model = CostModel(profile, random_cluster(rng, devices, min_devices=devices, mixed=mixed))
            levels = tuple(level for level in ZERO if space == "spmd" or level != 2)
            drawn = random_request(rng, single=single, levels=levels)
            if (number := count(drawn, model, space)) <= plans:
                return Instance(space=space, asked=drawn, model=model, plans=number)
    raise ValueError(f"{layers} layers on {devices} devices always have more than {plans} plans of space {space}")


def _tied_anywhere(rng: np.random.Generator, profile: ModelProfile) -> ModelProfile:
    tied, parameters = profile.layers[rng.integers(len(profile.layers))], int(rng.integers(1, 20))
    kinds = {
        name: kind.model_copy(update={"tied_parameters": parameters if name == tied != profile.layers[0] else 0})
        for name, kind in profile.kinds.items()
    }
    return profile.model_copy(update={"kinds": kinds})


def random_request(rng: np.random.Generator, *, single: bool = False, levels: tuple[Zero, ...] = ZERO) -> Request:
    """A batch, and the micro-batches, ZeRO levels, recomputation and sequence parallelism to choose from.

    single: one of each.  levels: of ZeRO.
    """
    batch = int(rng.choice([1, 2, 3, 4, 6, 8, 12]))
    zero, recompute = _some(rng, levels, single), _some(rng, (False, True), single)
    counts = _some(rng, tuple(divisors(batch)), single)
    return request(batch, counts, zero=zero, recompute=recompute, sequence=not single and rng.random() < 0.5)


def _some(rng: np.random.Generator, values: tuple, single: bool) -> tuple:
    """A random subset that is not empty."""
    size = 1 if single else int(rng.integers(1, len(values) + 1))
    return tuple(values[i] for i in sorted(rng.choice(len(values), size, replace=False)))


def random_cluster(rng: np.random.Generator, max_devices: int, *, min_devices: int = 1, mixed: bool = False) -> Cluster:
    """Up to `max_devices` in nodes of equal size, with fast or slow links and much or little memory.

    mixed: each node is of one of two kinds, which differ in their links and may in rates and memory.
    """
    sizes = [
        (g, n)
        for g in range(1, max_devices + 1)
        for n in range(1, max_devices + 1)
        if min_devices <= g * n <= max_devices
    ]
    per_node, nodes = sizes[rng.integers(len(sizes))]
    memory = float(10 ** rng.uniform(2.0, 4.5))

    def node(count: int) -> Node:
        peak, rate, room = (float(rng.choice([1.0, 2.0])) if mixed else 1.0 for _ in range(3))
        device = Device(name="toy", peak_flops={"bfloat16": peak}, memory=room * memory, memory_bandwidth=rate)
        inside = Link(bandwidth=float(10 ** rng.uniform(0, 3)), latency=float(rng.choice([0.0, 0.01])))
        return Node(
            device=device,
            devices=per_node,
            inside=inside,
            host=Link(bandwidth=1.0, latency=0.0),
            host_memory=1.0,
            count=count,
        )

    kinds = [node(1), node(1)] if mixed else [node(nodes)]
    row = tuple(kinds[rng.integers(2)] for _ in range(nodes)) if mixed else tuple(kinds)
    network = Link(
        bandwidth=float(10 ** rng.uniform(-1, 2)), latency=float(rng.choice([0.0, 0.05])), ports=int(rng.integers(1, 3))
    )
    return Cluster(name="toy", nodes=row, network=network, overlap=bool(rng.random() < 0.75))


def random_profile(
    rng: np.random.Generator, max_layers: int, *, min_layers: int = 1, degrees: tuple[int, ...] = DEGREES
) -> ModelProfile:
    """Layers of uneven cost; half of the models have a tied last layer."""
    n = int(rng.integers(min_layers, max_layers + 1))
    kinds = {}
    for i in range(n):
        forward = float(rng.uniform(0.2, 2.0))
        curve = float(rng.uniform(0.5, 1.0))
        times = (forward * curve, forward * 2 * curve**0.5, forward * 4)
        ratio = float(rng.uniform(0.3, 3.0))
        kinds[f"layer{i}"] = LayerKind(
            parameters=int(rng.integers(0, 30)),
            tied_parameters=int(rng.integers(0, 20)) if i == n - 1 and i > 0 and rng.random() < 0.5 else 0,
            boundary_bytes=float(rng.uniform(0, 10)),
            activation_bytes=float(rng.uniform(0, 20)),
            replicated_bytes=float(rng.uniform(0, 5)),
            tensor_forward_bytes=float(rng.uniform(0, 10)),
            tensor_backward_bytes=float(rng.uniform(0, 10)),
            max_tensor=int(rng.choice(degrees)),
            timings=(
                Timing(
                    batches=(1.0, 2.0, 4.0),
                    forward=times,
                    backward=tuple(ratio * x for x in times),
                    # Of every second layer sequence parallelism divides a part of the seconds.
                    repeated=tuple((0.3 * x, 0.2 * ratio * x) for x in times) if i % 2 else (),
                ),
            ),
        )
    return ModelProfile(
        name="toy",
        device="toy",
        source="drawn",
        sample=f"a sequence of {TOKENS} tokens",
        update_seconds=float(rng.choice([0.0, 0.01])),
        kinds=kinds,
        layers=tuple(kinds),
    )
