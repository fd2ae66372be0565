"""`jhpt bench planner`: whether plans are optimal, how long planning takes, and how much plans gain over baselines.

    brute force   small random problems: the search compared with every plan of the decision set
    events        random plans: the price compared with the events of the step, from raw profile numbers
    simulator     random pipelines: the closed form of `schedule.step_seconds` compared with simulated events
    speed         seconds to plan large models on large clusters, and how they grow
    worth         known networks on usual clusters: the plan compared with the usual layouts

Nothing runs on a device: the last table compares predicted seconds with predicted seconds.
"""

import dataclasses
from typing import Any

from benchmarks.planner.optimality import brute_force
from benchmarks.planner.pipelines import simulator
from benchmarks.planner.played import played
from benchmarks.planner.settings import BATCHES, QUICK, Settings
from benchmarks.planner.speed import speed
from benchmarks.planner.worth import worth
from jhpt.bench.results import Claim, check_writable, print_claims, write_json


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
    """Runs all parts and prints each when it is done."""
    rows: list[Any] = []
    claims: dict[str, Claim] = {}
    for part in (brute_force, played, simulator, speed, worth):
        part_rows, part_claims = part(settings)
        rows += part_rows
        claims |= part_claims
    return rows, claims
