"""How many bytes the element-wise kernels of jhpt's compiled step move, relative to the least possible.

    python benchmarks/calibration/compiled_traffic.py       # needs the extra deviceless; about ten minutes on two cores

Models of three and of six blocks are compiled for H100s that need not be there; the difference is that of three blocks.
With U bytes of the update, n random numbers and the least traffic E of `jhpt.core.families`:

    traffic = (bytes of a block - U - 8 n) / E

Compiled for one device, blocks stand one after the other in the program, and the median is
`jhpt.core.calibration.UNROLLED_TRAFFIC`.  Compiled for two data-parallel devices, they are in a loop: `LOOP_TRAFFIC`.
"""

import statistics

from jhpt.compiled.element_wise import ElementWise
from jhpt.compiled.hlo import read, text_of
from jhpt.compiled.modelled import Clock
from jhpt.core.calibration import DRAW_BYTES
from jhpt.core.catalogue import cluster_named
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config
from jhpt.core.families.text import TextConfig
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.state import state_of
from jhpt.planner.profiles.analytic import sizes_of, update_bytes
from jhpt.training.compile import compile_for

CASES: tuple[tuple[str, int, float], ...] = (
    ("gpt-6.7b", 4, 0.0),
    ("llama-8b", 2, 0.0),
    ("gpt2-1.5b", 8, 0.0),
    ("gpt2-1.5b", 8, 0.1),
    ("bert-large", 32, 0.1),
    ("bert-large", 32, 0.0),
)
"""(preset, samples, dropout)."""

SHALLOW, DEEP = 3, 6

MEMORY = 7e11
"""Bytes of the device, so that the compiler recomputes nothing."""


def roomy(devices: int) -> Cluster:
    """H100s with more memory than there is."""
    cluster = cluster_named(f"h100x{devices}x1")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"memory": MEMORY})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def config_of(preset: str, batch: int, dropout: float, layers: int, devices: int) -> Config:
    """The preset with so many blocks, all activations saved.  batch: of a device."""
    changes = {"data.batch_size": batch * devices, "model.num_layers": layers, "model.dropout": dropout}
    # With several micro-batches or ZeRO-3 the blocks of one device would be in a loop, too.
    alone = {"parallel.micro_batches": 1, "parallel.zero": 0} if devices == 1 else {}
    return load_config(preset, {**changes, **alone, "memory.recompute": "none", "parallel.data": devices})


def moved(config: Config, cluster: Cluster) -> float:
    """Bytes that a step of a device moves outside of products."""
    compiled, sizes = compile_for(config, plan_by_hand(config, cluster.num_devices), cluster)
    return ElementWise(read(text_of(compiled)), sizes, Clock(cluster), 0).whole().moved


def traffic(preset: str, batch: int, dropout: float, devices: int) -> float:
    """Bytes of a block relative to the least possible."""
    cluster = roomy(devices)
    shallow, deep = (config_of(preset, batch, dropout, layers, devices) for layers in (SHALLOW, DEEP))
    block = (moved(deep, cluster) - moved(shallow, cluster)) / (DEEP - SHALLOW)
    sizes = sizes_of(deep, cluster.nodes[0].device, "bfloat16")
    assert isinstance(deep.model, TextConfig)
    operations = [each for part in deep.model.block_cost(sizes).work(batch, 1) for each in part]
    update = update_bytes(state_of(deep.model, deep.optimizer), sizes.element, sizes.element)
    update *= deep.model.parameter_count().per_layer
    drawn = DRAW_BYTES * sum(each.drawn for each in operations)
    return (block - update - drawn) / sum(each.moved for each in operations if each.kind == "element-wise")


def main() -> None:
    """Compiles and prints."""
    for devices, blocks in ((1, "one after the other"), (2, "in a loop")):
        found = []
        for preset, batch, dropout in CASES:
            found.append(traffic(preset, batch, dropout, devices))
            print(f"{preset:<12} batch {batch:>3}, dropout {dropout}: {found[-1]:.2f}", flush=True)
        print(f"blocks {blocks}: median {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
