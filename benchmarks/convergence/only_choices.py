"""The comparison of choices of tokens alone.

    python -m benchmarks.convergence.only_choices [--out FOLDER] [--seeds N] [--cores N] [--json FILE]

runs the cells that the folder lacks, one at a time on each core, and prints what there is.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.convergence import choices
from benchmarks.convergence.held_out import checked
from benchmarks.convergence.run import FOLDER, complete, finished, opened
from jhpt.bench.results import print_claims, print_table, write_json
from jhpt.core.config import DataConfig


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=FOLDER, help="folder of finished cells, which are not run again")
    parser.add_argument("--seeds", type=int, default=len(choices.SEEDS), help="how many seeds; 0: run nothing")
    parser.add_argument("--cores", type=int, default=None, help="how many cells run at a time; default: one per core")
    parser.add_argument("--json", help="file for the samples and claims")
    options = parser.parse_args(arguments)
    text, place = checked(DataConfig()), opened(options.out)
    wanted = choices.cells(quick=False, seeds=range(options.seeds))
    complete(list(wanted), place, sorted(os.sched_getaffinity(0))[: options.cores])
    kinds = choices.cells(quick=False)
    results = finished(list(kinds), place)
    print_table("which tokens are sent in 8 bits", choices.COLUMNS, choices.lines(results, kinds), words=1)
    claims = choices.claims_of(results, kinds) | text
    print_claims(claims)
    if options.json:
        write_json(options.json, "convergence", {"group": choices.GROUP}, list(results.values()), claims, device=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
