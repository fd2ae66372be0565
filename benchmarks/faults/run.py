"""`jhpt bench faults`: the campaign."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults.cost import COURSES, SETTLED, STEADY_EVERY, STEADY_STEPS, USUAL, cost, growth, steady
from benchmarks.faults.flips import flips
from benchmarks.faults.kills import Kill, digests_of, kills
from benchmarks.faults.peers import LIMITS, POINTS, STALL, peers, tried
from benchmarks.faults.setups import SETUPS, SMALL, settings_of, write_text
from benchmarks.faults.soak import QUICK, SETUP, Soak, soak
from benchmarks.faults.zygote import begin, prepare
from benchmarks.faults.zygote import run as train
from jhpt.bench.results import Claim, Report, chosen, print_claims, print_table

TRIALS, QUICK_TRIALS = 300, 3
"""Kills in all; there are about four times as many flips, and a third as many cycles of the soak."""

SEED = 20261125

PARTS = ("kills", "flips", "peers", "soak", "cost")
"""The last one needs a machine that does nothing else; `--quick` leaves it out."""


def run(
    *, quick: bool = False, json_path: str | None = None, trials: int | None = None, only: Sequence[str] = ()
) -> int:
    """Runs the campaign; returns the exit status: 1 if anything was lost, or came later than promised.

    Args:
      trials: kills; the others follow from it.
      only: these of `PARTS` alone.
    """
    parts = chosen(PARTS[:-1] if quick else PARTS, only)
    number = trials or (QUICK_TRIALS if quick else TRIALS)
    settings = {"quick": quick, "trials": number, "seed": SEED, "setups": list(SETUPS), "parts": parts}
    report = Report(path=json_path, bench="faults", settings=settings, device=False)
    prepare()
    folder = Path(tempfile.mkdtemp(prefix="jhpt-faults-"))
    try:
        write_text(folder)
        print(f"seed {SEED}, files in {folder}")
        faults: list[str] = []
        if "kills" in parts:
            faults += _kills(folder, number, report, quick)
        if "flips" in parts:
            faults += _flips(folder, 20 if quick else max(4 * number, 20), report)
        cycles = 1 if quick else max(number // 3, 2)
        soaked: Callable[[], Soak] = partial(soak, folder, cycles, SEED, QUICK if quick else SETUP)
        if quick and "soak" in parts:  # peers wait more than they compute, so there is room for it beside them
            soaked = begin(soaked)
        if "peers" in parts:
            faults += _peers(folder, quick, report)
        if "soak" in parts:
            faults += _soak(soaked(), cycles, report)
        if "cost" in parts:
            _costs(folder, report)
        print_claims(report.claims)
        for fault in faults:
            print(f"NOT AS PROMISED: {fault}")
        return int(bool(faults))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kills(folder: Path, number: int, report: Report, quick: bool) -> list[str]:
    names = ["plain"] if quick else list(SETUPS)
    found: list[Kill] = []
    for index, name in enumerate(names):
        share = number * (index + 1) // len(names) - number * index // len(names)
        found += kills(name, folder, share, SEED + index)
        counts = Counter(trial.outcome for trial in found)
        setup = f"{', '.join(names[: index + 1])}; half at random instants, half at six moments of a save"
        report.add(
            [trial for trial in found if trial.setup == name],
            {
                "kills": Claim(value=len(found), unit="kills", setup=setup),
                "corrupt": Claim(value=counts["corrupt"] + counts["unrestorable"], unit="kills", setup=setup),
            },
        )
    lines = [
        (
            name,
            *(
                str(sum(trial.setup == name and trial.outcome == outcome for trial in found))
                for outcome in ("whole", "corrupt", "unrestorable")
            ),
        )
        for name in names
    ]
    print_table("kill -9", ("set-up", "whole", "corrupt", "unrestorable"), lines)
    return [str(trial) for trial in found if trial.outcome != "whole"]


def _peers(folder: Path, quick: bool, report: Report) -> list[str]:
    found = list(peers(folder, tried(quick), at_once=3 if quick else 2, changes=SMALL if quick else {}))
    worst: dict[str, float] = {}
    for met in found:
        worst[met.fault] = max(met.seconds, worst.get(met.fault, 0.0))
    setup = f"two processes, stall_seconds and --wait {STALL:g}, worst of {len(found)} trials"
    claims = {
        "dead_peer_seconds": worst["killed"],
        "stuck_peer_seconds": max(worst[fault] for fault in ("stopped", "stuck") if fault in worst),
        "absent_peer_seconds": worst["absent"],
    }
    report.add(found, {name: Claim(value=value, unit="s", setup=setup) for name, value in claims.items()})
    phases = list(POINTS)
    lines = []
    for fault in worst:
        seconds = {
            phase: [met.seconds for met in found if (met.fault, met.phase) == (fault, phase)] for phase in phases
        }
        cells = (f"{max(of):.1f}" if of else "" for of in seconds.values())
        lines.append((fault, *cells, f"{LIMITS[fault]:g}"))
    print_table("seconds until the other process ends", ("fault", *phases, "limit"), lines)
    return [str(met) for met in found if not met.held]


def _soak(soaked: Soak, cycles: int, report: Report) -> list[str]:
    claims = {
        "soak_cycles": Claim(value=soaked.cycles, unit="kills", setup="jhpt launch, two processes"),
        "soak_bitwise": Claim(value=float(soaked.bitwise), unit="1: yes", setup="last checkpoint, all arrays"),
    }
    report.add([soaked], claims)
    return [] if soaked.bitwise and soaked.cycles == cycles else [str(soaked)]


def _costs(folder: Path, report: Report) -> None:
    """What saving costs; needs a machine that does nothing else."""
    costs = [cost(course, folder) for course in COURSES]
    with_saves, without = steady(folder, saves=True), steady(folder, saves=False)
    setup = f"of the time of a run that saves every {USUAL} steps; median of trials with and without saves, in turn"
    claims = {
        f"saving_share_{name}": Claim(value=each.share, unit="share", setup=f"{each.course}: {setup}")
        for name, each in zip(("tiny", "100m"), costs, strict=True)
    }
    number = STEADY_STEPS // STEADY_EVERY - SETTLED
    saves = f"{number} saves in {number * STEADY_EVERY} steps, after {SETTLED} others"
    same = f"{number * STEADY_EVERY} steps without saves, after {SETTLED * STEADY_EVERY} others"
    claims |= {
        "saving_memory_growth": Claim(value=growth(with_saves.memory), unit="bytes", setup=saves),
        "saving_files_growth": Claim(value=growth(with_saves.files), unit="descriptors", setup=saves),
        "steps_memory_growth": Claim(value=growth(without.memory), unit="bytes", setup=same),
    }
    report.add([*costs, with_saves, without], claims)


def _flips(folder: Path, number: int, report: Report) -> list[str]:
    setup = SETUPS["plain"]
    finished = folder / "finished" / "run"
    finished.parent.mkdir()
    if train(setup, settings_of(setup, folder), finished, log=folder / "finished.log")[0]:
        raise RuntimeError(f"the run failed; see {folder / 'finished.log'}")
    found = list(flips(settings_of(setup, folder), finished, digests_of(finished), number, SEED))
    counts = Counter((trial.kind, trial.outcome) for trial in found)
    undetected = sum(count for (_, outcome), count in counts.items() if outcome in ("undetected", "traceback"))
    where = "single bits and cut ends in checkpoints, their manifests, token caches and metrics"
    report.add(
        found,
        {
            "flips": Claim(value=len(found), unit="faults", setup=where),
            "flips_undetected": Claim(value=undetected, unit="faults", setup=where),
        },
    )
    outcomes = ("detected", "harmless", "undetected", "traceback")
    kinds = sorted({trial.kind for trial in found})
    lines = [(kind, *(str(counts[kind, outcome]) for outcome in outcomes)) for kind in kinds]
    print_table("flipped bits and cut ends", ("in", *outcomes), lines)
    return [str(flip) for flip in found if flip.outcome in ("undetected", "traceback")]
