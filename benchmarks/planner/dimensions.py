"""What a dimension of the search gains: known models on usual clusters, planned without it and with it.

    python -m benchmarks.planner.dimensions

Predicted seconds are compared with predicted seconds, at space=spmd.
"""

import argparse
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.planner.settings import BATCHES, CLUSTERS, in_parallel, planned_seconds
from benchmarks.planner.worth import described, profile_of
from jhpt.bench.results import print_table
from jhpt.core.catalogue import cluster_named
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve

WITHOUT: Mapping[str, Mapping[str, Any]] = {"ZeRO-2": {"zero": (0, 1, 3)}, "hybrid sharding": {"hybrid": False}}
"""What a request says where a dimension is left out."""

WORKERS = 2
"""Processes that plan at the same time."""

Row = tuple[str, str, str, float, str, str]
"""(dimension, model, cluster, seconds without it / with it, plan without it, plan with it)."""


def gain(task: tuple[str, str, str]) -> Row:
    """One model on one cluster."""
    dimension, name, place = task
    cluster, batch = cluster_named(place), BATCHES[name]
    profile = profile_of(name, cluster.nodes[0].device)
    before, now = (solve(profile, cluster, request(batch, **options)) for options in (WITHOUT[dimension], {}))
    ratio = planned_seconds(before)[0] / planned_seconds(now)[0]
    return dimension, name, place, ratio, described(before.plan), described(now.plan)


def main() -> None:
    """Prints where each dimension is chosen, and the mean and the largest of its gains there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    asked = parser.parse_args()
    rows = in_parallel(gain, list(itertools.product(WITHOUT, asked.models, asked.clusters)), WORKERS)
    chosen = [row for row in rows if row[3] > 1 + 1e-9]
    columns = ("dimension", "model", "cluster", "without / with", "plan without", "plan with")
    print_table("where it is chosen", columns, [(*row[:3], f"{row[3]:.4f}", *row[4:]) for row in chosen], words=3)
    for dimension in WITHOUT:
        ratios = [row[3] for row in chosen if row[0] == dimension]
        all_of = sum(row[0] == dimension for row in rows)
        mean = f"geometric mean {statistics.geometric_mean(ratios):.4f}, largest {max(ratios):.4f}" if ratios else ""
        print(f"{dimension}: chosen in {len(ratios)} of {all_of}; {mean}")


if __name__ == "__main__":
    main()
