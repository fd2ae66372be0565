"""A cluster whose nodes are of two kinds, in the keys of the old tree."""

from typing import Any


def mixed_cluster() -> dict[str, Any]:
    """Two nodes of two large devices, then two of two small ones, on 25 Gb/s Ethernet."""
    return {
        "name": "mixed",
        "nodes": [node(flops=2.5e14, memory=7.5e10, moved=2e12), node(flops=9e13, memory=2.9e10, moved=8e11)],
        "network": {"bandwidth": 2.9e9, "latency": 3e-5},
    }


def node(flops: float, memory: float, moved: float) -> dict[str, Any]:
    """Two nodes of two devices."""
    rates = {"bfloat16": flops, "float16": flops, "float32": flops / 2}
    return {
        "device": {"name": "device", "peak_flops": rates, "memory": memory, "memory_bandwidth": moved},
        "devices": 2,
        "inside": {"bandwidth": 1e11, "latency": 2e-6},
        "host": {"bandwidth": 2e10, "latency": 1e-5},
        "host_memory": 2.5e11,
        "count": 2,
    }
