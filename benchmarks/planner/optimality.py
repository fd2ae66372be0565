"""Small random problems: the search compared with every plan of the decision set."""

import math
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.instances import random_instance
from benchmarks.planner.oracle import optimum, plan_of
from benchmarks.planner.settings import Settings, in_parallel
from jhpt.bench.results import Claim, print_table
from jhpt.core.plan import Space
from jhpt.planner.cost.estimate import price
from jhpt.planner.search.solve import search

AGREE = 1e-9
"""Relative tolerance: the search and the oracle add the same numbers in different orders."""

SHOWN = 5
"""Mismatches that are printed, at most; the file has all."""


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


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


def brute_force(settings: Settings) -> tuple[list[OracleRow], dict[str, Claim]]:
    """Searches and enumerates random problems, and prints where the two disagree."""
    tasks = [(settings, index) for index in range(settings.instances)]
    rows = in_parallel(compare, tasks, settings.workers)
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
    """One problem, which depends on its number alone, searched and enumerated."""
    settings, index = task
    rng = np.random.default_rng([settings.seed, index])
    space: Space = "general" if index % 2 else "spmd"
    mixed = index % 4 == 3
    layers = int(rng.integers(settings.layers[0], settings.layers[1] + 1))
    devices = int(rng.integers(settings.devices[0], settings.devices[1] + 1))
    instance = random_instance(rng, space, layers=layers, devices=devices, plans=settings.plans, mixed=mixed)
    request, model = instance.asked, instance.model
    start = time.perf_counter()
    truth = optimum(request, model, space)
    middle = time.perf_counter()
    answer = search(request, model, space)
    end = time.perf_counter()
    if truth.draft is None:
        agrees = answer.plan is None
    else:
        estimate = price(plan_of(truth.draft, request, model, space), model)
        times = (answer.seconds, estimate.seconds)
        agrees = estimate.fits and all(abs(seconds - truth.seconds) <= AGREE * truth.seconds for seconds in times)
        agrees = bool(agrees and answer.lower_bound <= truth.seconds * (1 + AGREE))
    return OracleRow(
        instance=index,
        space=space,
        mixed=mixed,
        layers=layers,
        devices=devices,
        plans=truth.plans,
        optimum=_finite(truth.seconds),
        found=_finite(answer.seconds),
        lower_bound=_finite(answer.lower_bound),
        agrees=agrees,
        oracle_s=middle - start,
        search_s=end - middle,
    )
