"""Random models and clusters, small enough that every plan can be priced."""

import numpy as np

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.profile import LayerKind, ModelProfile, Timing


def random_cluster(rng: np.random.Generator, max_devices: int, *, mixed: bool = False) -> Cluster:
    """Up to `max_devices` in nodes of equal size; cheap or dear links, roomy or tight memory."""
    sizes = [(g, n) for g in range(1, max_devices + 1) for n in range(1, max_devices + 1) if g * n <= max_devices]
    per_node, nodes = sizes[rng.integers(len(sizes))]
    memory = float(10 ** rng.uniform(2.0, 4.5))

    def node(count: int) -> Node:
        peak = 1.0 if not mixed else float(rng.choice([1.0, 2.0]))
        device = Device(name="toy", peak_flops={"bfloat16": peak}, memory=memory, memory_bandwidth=1.0)
        inside = Link(bandwidth=float(10 ** rng.uniform(0, 3)), latency=float(rng.choice([0.0, 0.01])))
        return Node(
            device=device,
            devices=per_node,
            inside=inside,
            host=Link(bandwidth=1.0, latency=0.0),
            host_memory=1.0,
            count=count,
        )

    row = tuple(node(1) for _ in range(nodes)) if mixed else (node(nodes),)
    network = Link(
        bandwidth=float(10 ** rng.uniform(-1, 2)), latency=float(rng.choice([0.0, 0.05])), ports=int(rng.integers(1, 3))
    )
    return Cluster(name="toy", nodes=row, network=network)


def random_profile(rng: np.random.Generator, max_layers: int) -> ModelProfile:
    """Layers of uneven cost; half of the models have a tied last layer."""
    n = int(rng.integers(1, max_layers + 1))
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
            max_tensor=int(rng.choice([1, 2, 4, 6])),
            timings=(Timing(batches=(1.0, 2.0, 4.0), forward=times, backward=tuple(ratio * x for x in times)),),
        )
    return ModelProfile(
        name="toy",
        device="toy",
        source="drawn",
        update_seconds=float(rng.choice([0.0, 0.01])),
        kinds=kinds,
        layers=tuple(kinds),
    )
