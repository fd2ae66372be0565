"""Records results of jhpt to the last bit, to show that a refactoring changes none of them.

Make a worktree of the commit before the refactoring, record in both trees with this script, and compare:

    git worktree add ../before COMMIT
    PYTHONPATH=../before python benchmarks/same_results/record.py --out /tmp/before --spelling old
    PYTHONPATH=. python benchmarks/same_results/record.py --out /tmp/after
    PYTHONPATH=. python benchmarks/same_results/record.py --out /tmp/after --resume /tmp/before
    python benchmarks/same_results/compare.py /tmp/before /tmp/after

Four parts: `plans` (answers of the planner, about 5 minutes), `training` (losses, norms and final states of small runs
on 8 virtual CPU devices, about 10 minutes), `checkpoints` (run directories of some of these runs after half of the
steps), and with --resume the results of continuing these runs in another tree.  Both recordings have to be made on the
same kind of machine with the same packages.  Enter a rename in `renamed.py`; nothing else needs to change.
"""

import argparse
import os
import time
from pathlib import Path

from lines import write_lines
from renamed import names_of

PARTS = ("plans", "training", "checkpoints")


def main() -> None:
    """Reads the arguments, records, and prints how much was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the recording")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--only", default="", help="only the training runs whose names are in this list, with commas")
    parser.add_argument("--resume", type=Path, help="resume the stopped runs of this recording instead")
    parser.add_argument("--translate", action="store_true", help="resume: spell the run's own files as this tree does")
    parser.add_argument("--spelling", choices=("old", "new"), default="new", help="old: a tree from before the renames")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    _virtual_devices()

    import jhpt

    print(f"jhpt of {Path(jhpt.__file__).parent}")
    for part in ("resumed",) if arguments.resume else arguments.part or PARTS:
        start, cpu = time.perf_counter(), time.process_time()
        count = _record(part, arguments)
        seconds = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of CPU time"
        print(f"{part}: {count} recorded in {seconds}", flush=True)


def _record(part: str, arguments: argparse.Namespace) -> int:
    out, names = arguments.out.absolute(), names_of(arguments.spelling)
    only = tuple(filter(None, arguments.only.split(",")))
    if part == "plans":
        from plans import recorded_plans

        return write_lines(out / "plans.jsonl", recorded_plans(out, names))

    from training import recorded_runs, resumed_runs, stopped_runs  # the first that imports jax

    if part == "training":
        return write_lines(out / "training.jsonl", recorded_runs(out, names, only))
    if part == "checkpoints":
        return stopped_runs(out, names, only)
    stopped = arguments.resume.absolute()
    return write_lines(out / "resumed.jsonl", resumed_runs(stopped, out, names, only, arguments.translate))


def _virtual_devices() -> None:
    """Eight CPU devices, whatever the machine has; before jax is imported."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # programs of several CPUs may hang if they were cached
    # If other programs use the processor too, a device may reach a collective late.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=240")


if __name__ == "__main__":
    main()
