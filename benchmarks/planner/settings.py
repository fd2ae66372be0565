"""The settings of `jhpt bench planner`, and functions that its parts share."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from jhpt.core.plan import Space
from jhpt.planner.search.solve import Answer

T = TypeVar("T")
R = TypeVar("R")


CLUSTERS = ("v100x4x4-10gbe", "v100x8x2-25gbe", "a100x8x4-200gib", "h100x8x8-400gib")

BATCHES = {
    "vgg16": 1024,  # 64 images on each of 16 devices, as PipeDream trains it (Narayanan et al. 2019, section 5)
    "resnet50": 2048,  # 128 images on each of 16 devices
    "gnmt": 1024,  # 64 pairs of sentences on each of 16 devices, as PipeDream
    "bert-large": 256,  # Devlin et al. 2018, appendix A.2
    "gpt2-1.5b": 512,  # Radford et al. 2019, section 2.3
    "gpt-13b": 1024,  # 2 M tokens: Brown et al. 2020, table 2.1
}
"""Samples per step, the same on every cluster."""


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """A GPT of `layers` layers, embedding and head included, as wide as `preset`."""

    space: Space
    layers: int
    cluster: str
    batch: int
    claim: str = ""
    """The name under which its seconds are claimed."""
    preset: str = "gpt-13b"


HEADLINES = (
    SpeedCase(space="general", layers=128, cluster="h100x8x8", batch=512, claim="general_128x64_seconds"),
    SpeedCase(space="spmd", layers=128, cluster="h100x8x512", batch=4096, claim="spmd_128x4096_seconds"),
    SpeedCase(space="spmd", layers=96, cluster="h100x8x1250", batch=4096, claim="spmd_96x10000_seconds"),
)

GROWTH = {
    "growth_layers": tuple(
        SpeedCase(space="general", layers=layers, cluster="h100x8x4", batch=512, preset="gpt2-1.5b")
        for layers in (64, 128, 256)
    ),
    "growth_devices": tuple(
        SpeedCase(space="general", layers=64, cluster=f"h100x8x{nodes}", batch=512, preset="gpt2-1.5b")
        for nodes in (4, 8, 16)
    ),
}
"""Sizes that double; the exponent of growth is log2 of the ratio of the last two times.

The layers are narrow enough for the deepest model to fit without recomputation.  Otherwise the largest problem would
differ in kind from the smaller ones (as wide as gpt-13b, 256 layers on 32 devices have to be recomputed).
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    instances: int = 2400
    layers: tuple[int, int] = (3, 8)
    devices: tuple[int, int] = (2, 6)
    plans: int = 6000
    played: int = 6000
    pipelines: int = 500
    stages: int = 8
    repeats: int = 5
    headlines: tuple[SpeedCase, ...] = HEADLINES
    growth: Mapping[str, tuple[SpeedCase, ...]] = field(default_factory=lambda: GROWTH)
    models: tuple[str, ...] = tuple(BATCHES)
    clusters: tuple[str, ...] = CLUSTERS
    spaces: tuple[Space, ...] = ("spmd", "general")
    seed: int = 0
    workers: int = 2


QUICK = Settings(
    instances=120,
    plans=4000,
    played=400,
    pipelines=40,
    stages=4,
    repeats=1,
    models=("gpt-13b",),
)


def in_parallel(function: Callable[[T], R], tasks: Sequence[T], workers: int) -> list[R]:
    """Results in the order of the tasks, from `workers` processes; 1: from this process."""
    if workers == 1:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, tasks, chunksize=4))


def planned_seconds(answer: Answer) -> tuple[float, float]:
    """(seconds, lower bound) of the plan of an answer."""
    assert answer.plan.seconds is not None and answer.plan.lower_bound is not None
    return answer.plan.seconds, answer.plan.lower_bound
