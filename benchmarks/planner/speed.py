"""Seconds to plan large models on large clusters, and how they grow with the problem."""

import itertools
import math
import statistics
import time
from dataclasses import dataclass

from benchmarks.planner.settings import Settings, SpeedCase, planned_seconds
from jhpt.bench.results import Claim, print_table
from jhpt.core.catalogue import cluster_named
from jhpt.core.load import load_config
from jhpt.core.plan import Space
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One planning problem: wall-clock and processor seconds of every repeat, and the plan's seconds."""

    part: str = "speed"
    space: Space
    layers: int
    devices: int
    cluster: str
    batch: int
    samples_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    seconds: float
    lower_bound: float
    gap: float


def speed(settings: Settings) -> tuple[list[SpeedRow], dict[str, Claim]]:
    """Plans large problems and prints how long that takes."""
    cases = dict.fromkeys([*settings.headlines, *itertools.chain(*settings.growth.values())])
    measured = {case: _timed(case, settings.repeats) for case in cases}
    lines = [
        (
            f"{row.space}, {row.layers} layers on {row.cluster}",
            str(row.devices),
            str(row.batch),
            f"{statistics.median(row.samples_s):.2f}",
            f"{min(row.samples_s):.2f} - {max(row.samples_s):.2f}",
            f"{statistics.median(row.cpu_s):.2f}",
            f"{row.gap:.2%}",
        )
        for row in measured.values()
    ]
    print_table("seconds to plan", ("problem", "devices", "batch", "median", "range", "processor", "gap"), lines)
    claims = {}
    for case in settings.headlines:
        row = measured[case]
        setup = f"GPT of {row.layers} layers, {row.devices} devices ({row.cluster}), batch {row.batch}, one process"
        claims[case.claim] = Claim(
            value=statistics.median(row.samples_s), unit="s", setup=f"{setup}, gap {row.gap:.2%}"
        )
    for name, steps in settings.growth.items():
        before, after = (statistics.median(measured[case].cpu_s) for case in steps[-2:])
        sizes = " -> ".join(f"{measured[case].layers} x {measured[case].devices}" for case in steps[-2:])
        gaps = ", ".join(f"{measured[case].gap:.2%}" for case in steps[-2:])
        setup = f"general, layers x devices {sizes}, processor time, gaps {gaps}"
        claims[name] = Claim(value=math.log2(after / before), unit="exponent", setup=setup)
    return list(measured.values()), claims


def _timed(case: SpeedCase, repeats: int) -> SpeedRow:
    cluster = cluster_named(case.cluster)
    profile = analytic_profile(load_config(case.preset, {"model.num_layers": case.layers - 2}), cluster.nodes[0].device)
    wall, processor = [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        answer = solve(profile, cluster, request(case.batch), case.space)
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    seconds, bound = planned_seconds(answer)
    return SpeedRow(
        space=case.space,
        layers=case.layers,
        devices=cluster.num_devices,
        cluster=case.cluster,
        batch=case.batch,
        samples_s=tuple(wall),
        cpu_s=tuple(processor),
        seconds=seconds,
        lower_bound=bound,
        gap=answer.gap,
    )
