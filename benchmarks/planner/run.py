"""`jhpt bench planner`: whether plans are the best there are, how long finding them takes, and what they are worth.

    brute force   small random problems: the search against every plan of the decision set
    simulator     random pipelines: the closed loop of `schedule.step_seconds` against events played one by one
    speed         seconds to plan large models on large clusters, and how they grow
    worth         known networks on usual clusters: the plan against what one would run without a planner

Nothing runs on a device: the last table compares predicted seconds with predicted seconds.
"""

import dataclasses
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from benchmarks.planner.instances import random_instance
from benchmarks.planner.oracle import optimum, plan_of
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.catalogue import cluster_named
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan, Schedule
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.networks import TABLES, network_profile
from jhpt.planner.report.simulation import simulate
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import Answer, Space, solve
from jhpt.planner.search.spaces import search

T = TypeVar("T")
R = TypeVar("R")

AGREE = 1e-9
"""Relative; the search and the oracle add the same numbers in different orders."""

SHOWN = 5
"""Mismatches that are printed; the file has all."""

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

The layers are narrow enough for the deepest model to fit without recomputation: else the largest problem would be of
another kind than the smaller ones (as wide as gpt-13b, 256 layers on 32 devices have to be recomputed).
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    instances: int = 2400
    layers: tuple[int, int] = (3, 8)
    devices: tuple[int, int] = (2, 6)
    plans: int = 6000
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
    pipelines=40,
    stages=4,
    repeats=1,
    models=("gpt-13b",),
)


def run(*, quick: bool, json_path: str | None) -> int:
    """Runs the benchmark; returns the exit status."""
    if json_path:
        check_writable(json_path)
    settings = QUICK if quick else Settings()
    rows, claims = measure(settings)
    print_claims(claims)
    if json_path:
        described = dataclasses.asdict(settings) | {"quick": quick, "batches": BATCHES}
        write_json(json_path, "planner", described, rows, claims, device=False)
    return 0


def measure(settings: Settings) -> tuple[list[Any], dict[str, Claim]]:
    """All four parts, printed as they come."""
    rows: list[Any] = []
    claims: dict[str, Claim] = {}
    for part in (_brute_force, _simulator, _speed, _worth):
        more, claimed = part(settings)
        rows += more
        claims |= claimed
    return rows, claims


def _in_parallel(function: Callable[[T], R], tasks: Sequence[T], workers: int) -> list[R]:
    if workers == 1:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, tasks, chunksize=4))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


# Brute force.


@dataclass(frozen=True, kw_only=True)
class OracleRow:
    """One random problem.  Seconds are None where nothing fits."""

    part: str = "brute force"
    instance: int
    space: Space
    mixed: bool
    layers: int
    devices: int
    plans: int
    optimum: float | None
    found: float | None
    lower_bound: float | None
    agrees: bool
    oracle_s: float
    search_s: float


def _brute_force(settings: Settings) -> tuple[list[OracleRow], dict[str, Claim]]:
    tasks = [(settings, index) for index in range(settings.instances)]
    rows = _in_parallel(compare, tasks, settings.workers)
    lines = []
    for space, mixed in (("spmd", False), ("general", False), ("general", True)):
        some = [row for row in rows if (row.space, row.mixed) == (space, mixed)]
        lines.append(
            (
                space + (", mixed cluster" if mixed else ""),
                str(len(some)),
                str(sum(row.optimum is None for row in some)),
                f"{sum(row.plans for row in some):,}",
                str(sum(not row.agrees for row in some)),
                f"{sum(row.oracle_s for row in some):.1f}",
                f"{sum(row.search_s for row in some):.1f}",
            )
        )
    columns = ("space", "problems", "nothing fits", "plans", "mismatches", "brute force s", "search s")
    print_table("search against brute force", columns, lines)
    for row in [row for row in rows if not row.agrees][:SHOWN]:
        print(f"mismatch: {row}")
    (few, many), (least, most) = settings.layers, settings.devices
    setup = f"random, {few} to {many} layers, {least} to {most} devices, both spaces, seed {settings.seed}"
    wrong = sum(not row.agrees for row in rows)
    claims = {
        "brute_force_instances": Claim(value=len(rows), unit="problems", setup=setup),
        "brute_force_mismatches": Claim(value=wrong, unit="problems", setup=setup),
    }
    return rows, claims


def compare(task: tuple[Settings, int]) -> OracleRow:
    """One problem, drawn from its number alone, searched and enumerated."""
    settings, index = task
    rng = np.random.default_rng([settings.seed, index])
    space: Space = "general" if index % 2 else "spmd"
    mixed = index % 4 == 3
    layers = int(rng.integers(settings.layers[0], settings.layers[1] + 1))
    devices = int(rng.integers(settings.devices[0], settings.devices[1] + 1))
    instance = random_instance(rng, space, layers=layers, devices=devices, plans=settings.plans, mixed=mixed)
    asked, model = instance.asked, instance.model
    start = time.perf_counter()
    truth = optimum(asked, model, space)
    middle = time.perf_counter()
    found = search(asked, model, space)
    end = time.perf_counter()
    if truth.draft is None:
        agrees = found.plan is None
    else:
        estimate = price(plan_of(truth.draft, asked, model, space), model)
        times = (found.seconds, estimate.seconds)
        agrees = estimate.fits and all(abs(seconds - truth.seconds) <= AGREE * truth.seconds for seconds in times)
        agrees = bool(agrees and found.lower_bound <= truth.seconds * (1 + AGREE))
    return OracleRow(
        instance=index,
        space=space,
        mixed=mixed,
        layers=layers,
        devices=devices,
        plans=truth.plans,
        optimum=_finite(truth.seconds),
        found=_finite(found.seconds),
        lower_bound=_finite(found.lower_bound),
        agrees=agrees,
        oracle_s=middle - start,
        search_s=end - middle,
    )


# Simulator.


@dataclass(frozen=True, kw_only=True)
class SimulatorRow:
    """One random pipeline; error: relative."""

    part: str = "simulator"
    schedule: Schedule
    overlap: bool
    stages: int
    chunks: int
    micro_batches: int
    seconds: float
    simulated: float
    error: float


def _simulator(settings: Settings) -> tuple[list[SimulatorRow], dict[str, Claim]]:
    tasks = [(settings, index) for index in range(settings.pipelines)]
    rows = _in_parallel(play, tasks, settings.workers)
    lines = []
    for schedule, overlap in itertools.product(("gpipe", "1f1b", "interleaved"), (True, False)):
        errors = [row.error for row in rows if (row.schedule, row.overlap) == (schedule, overlap)]
        if errors:
            transfers = "beside" if overlap else "in line"
            figures = f"{statistics.median(errors):.1e}", f"{max(errors):.1e}"
            lines.append((schedule, transfers, str(len(errors)), *figures))
    columns = ("schedule", "transfers", "pipelines", "median error", "largest")
    print_table("closed loop against simulated events", columns, lines, words=2)
    setup = (
        f"{len(rows)} random pipelines: 2 to {settings.stages} uneven stages, M from S to 8 S, transfers up to half "
        "of a mean stage, beside computation or in line with it"
    )
    worst = max(row.error for row in rows)
    return rows, {"simulator_error_max": Claim(value=worst, unit="relative error of a step", setup=setup)}


def play(task: tuple[Settings, int]) -> SimulatorRow:
    """One pipeline, drawn from its number alone: stage times within a factor of 4, backward 0.3 to 3 x forward."""
    settings, index = task
    rng = np.random.default_rng([settings.seed, index])
    schedule: Schedule = ("gpipe", "1f1b", "interleaved")[index % 3]
    overlap = index % 2 == 0
    stages = int(rng.integers(2, settings.stages + 1))
    chunks = int(rng.integers(2, 5)) if schedule == "interleaved" else 1
    micro_batches = int(rng.integers(stages, 8 * stages + 1))
    if chunks > 1:
        micro_batches -= micro_batches % stages
    forward = rng.uniform(0.5, 2.0, (stages, chunks))
    backward = forward / rng.uniform(0.3, 3.0)
    mean = float(np.mean(forward + backward))
    cut = rng.uniform(0.0, 0.5, stages * chunks - 1) * mean
    sync = backward[:, 0] + rng.uniform(0.0, 2.0, stages) * mean
    update = rng.uniform(0.0, 0.5, stages) * mean
    times = forward, backward, cut, sync, update
    seconds = float(step_seconds(schedule, micro_batches, *times, overlap=overlap))
    simulated = simulate(schedule, micro_batches, *times, overlap=overlap).seconds
    return SimulatorRow(
        schedule=schedule,
        overlap=overlap,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        seconds=seconds,
        simulated=simulated,
        error=abs(seconds / simulated - 1),
    )


# Speed.


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One planning problem: wall-clock and processor seconds of every repeat, and what was found."""

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


def _speed(settings: Settings) -> tuple[list[SpeedRow], dict[str, Claim]]:
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
    seconds, bound = _found(answer)
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


def _found(answer: Answer) -> tuple[float, float]:
    """Seconds and lower bound of a plan that was searched for."""
    assert answer.plan.seconds is not None and answer.plan.lower_bound is not None
    return answer.plan.seconds, answer.plan.lower_bound


# Worth.


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A baseline beside the plan: its seconds over the plan's."""

    seconds: float | None
    ratio: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorthRow:
    """One model on one cluster.  reason: why nothing fits, else empty."""

    part: str = "worth"
    model: str
    cluster: str
    batch: int
    space: Space
    plan: str
    seconds: float | None
    lower_bound: float | None
    gap: float | None
    reason: str
    others: Mapping[str, Alternative]
    search_s: float

    @property
    def best(self) -> float | None:
        """The fastest baseline's seconds over the plan's."""
        return min(
            (alternative.ratio for alternative in self.others.values() if alternative.ratio is not None), default=None
        )


SHORT = {
    "data parallel": "data",
    "tensor parallel": "tensor",
    "gpipe, equal layers": "gpipe",
    "1f1b, equal layers": "1f1b",
    "best 3-D grid": "3-D",
}
"""Baselines as the table's columns name them."""


def _worth(settings: Settings) -> tuple[list[WorthRow], dict[str, Claim]]:
    tasks = list(itertools.product(settings.models, settings.clusters, settings.spaces))
    rows = _in_parallel(weigh, tasks, settings.workers)
    lines = [
        (
            f"{row.model} x {row.batch}, {row.cluster}",
            row.space,
            row.plan or row.reason,
            f"{row.seconds:.4g}" if row.seconds else "-",
            *(_ratio(row.others[name].ratio) for name in SHORT),
            _ratio(row.best),
            f"{row.gap:.2%}" if row.gap is not None else "-",
        )
        for row in rows
    ]
    columns = ("model x batch, cluster", "space", "plan", "seconds", *SHORT.values(), "best", "gap")
    print_table("the plan, and seconds of each baseline / seconds of the plan", columns, lines, words=3)
    return rows, _worth_claims(rows)


def _worth_claims(rows: list[WorthRow]) -> dict[str, Claim]:
    unit = "predicted seconds of the baseline / of the plan"
    claims = {}
    for claim, name in (("vs_data_parallel_max", "data parallel"), ("vs_gpipe_max", "gpipe, equal layers")):
        ratios = [(alternative.ratio, row) for row in rows if (alternative := row.others[name]).ratio is not None]
        if ratios:
            value, row = max(ratios, key=lambda pair: pair[0] or 0.0)
            claims[claim] = Claim(value=value or 0.0, unit=unit, setup=_setup(row, name))
    ratios = [(row.best, row) for row in rows if row.best is not None]
    if ratios:
        value, row = min(ratios, key=lambda pair: pair[0] or 0.0)
        setup = f"least of {len(ratios)} entries: {_setup(row, 'the best baseline')}"
        claims["worst_vs_best_baseline"] = Claim(value=value or 0.0, unit=unit, setup=setup)
    return claims


def _setup(row: WorthRow, baseline: str) -> str:
    return f"{row.model}, batch {row.batch}, on {row.cluster}, space {row.space}, {row.plan}, against {baseline}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def weigh(task: tuple[str, str, Space]) -> WorthRow:
    """One model on one cluster, planned and compared."""
    name, place, space = task
    cluster, batch = cluster_named(place), BATCHES[name]
    profile, asked = _profile(name, cluster.nodes[0].device), request(batch)
    start = time.perf_counter()
    seconds = bound = gap = None
    plan = reason = ""
    try:
        answer = solve(profile, cluster, asked, space)
        seconds, bound = _found(answer)
        gap, plan = answer.gap, _described(answer.plan)
    except InputError as error:
        reason = str(error).splitlines()[0]
    end = time.perf_counter()
    others = {
        alternative.name: Alternative(
            seconds=alternative.seconds,
            ratio=alternative.seconds / seconds if alternative.seconds and seconds else None,
            reason=alternative.reason,
        )
        for alternative in baselines(asked, CostModel(profile, cluster), space)
    }
    return WorthRow(
        model=name,
        cluster=place,
        batch=batch,
        space=space,
        plan=plan,
        seconds=seconds,
        lower_bound=bound,
        gap=gap,
        reason=reason,
        others=others,
        search_s=end - start,
    )


def _profile(name: str, device: Device) -> ModelProfile:
    return network_profile(name, device) if name in TABLES else analytic_profile(load_config(name), device)


def _described(plan: Plan) -> str:
    """The plan in a few words: devices and tensor degrees of every stage, and what all share."""
    stages = []
    for stage in plan.stages:
        degrees = sorted({run.tensor for chunk in stage.chunks for run in chunk.runs})
        stages.append(f"{stage.devices}" + (f" (tensor {', '.join(map(str, degrees))})" if degrees != [1] else ""))
    runs = [(key, len(list(group))) for key, group in itertools.groupby(stages)]
    devices = " | ".join(f"{count} x {key}" if count > 1 else key for key, count in runs)
    extras = [f"M {plan.micro_batches}"]
    extras += [plan.schedule] if len(plan.stages) > 1 else []
    extras += [f"ZeRO-{plan.zero}"] if plan.zero else []
    extras += ["recompute"] if plan.recompute else []
    return f"{devices} devices, " + ", ".join(extras)
