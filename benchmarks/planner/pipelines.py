"""Random pipelines: the closed form of `schedule.step_seconds` compared with the simulation of single events."""

import itertools
import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.settings import Settings, in_parallel
from jhpt.bench.results import Claim, print_table
from jhpt.core.plan import Schedule
from jhpt.planner.cost.schedule import step_seconds
from jhpt.planner.report.simulation import simulate


@dataclass(frozen=True, kw_only=True)
class SimulatorRow:
    """One random pipeline.  error: relative."""

    part: str = "simulator"
    schedule: Schedule
    overlap: bool
    stages: int
    chunks: int
    micro_batches: int
    seconds: float
    simulated: float
    error: float


def simulator(settings: Settings) -> tuple[list[SimulatorRow], dict[str, Claim]]:
    """Times random pipelines both ways, and prints the errors."""
    tasks = [(settings, index) for index in range(settings.pipelines)]
    rows = in_parallel(play, tasks, settings.workers)
    lines = []
    for schedule, overlap in itertools.product(("gpipe", "1f1b", "eager-1f1b", "interleaved"), (True, False)):
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
    """One pipeline, which depends on its number alone: stage times within a factor of 4, backward 0.3 to 3 x
    forward."""
    settings, index = task
    rng = np.random.default_rng([settings.seed, index])
    schedule: Schedule = ("gpipe", "1f1b", "eager-1f1b", "interleaved")[index % 4]
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
