"""`jhpt bench faults`: the campaign."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.faults.flips import Flip, flips
from benchmarks.faults.kills import Kill, digests_of, kills
from benchmarks.faults.peers import LIMITS, POINTS, STALL, Met, peers, tried
from benchmarks.faults.setups import SETUPS, settings_of, write_text
from benchmarks.faults.soak import soak
from benchmarks.faults.zygote import prepare
from benchmarks.faults.zygote import run as train
from jhpt.bench.results import Claim, Report, print_claims, print_table

TRIALS, QUICK_TRIALS = 300, 4
"""Kills in all; there are about four times as many flips, and a third as many cycles of the soak."""

SEED = 20261125


def run(*, quick: bool = False, json_path: str | None = None, trials: int | None = None) -> int:
    """Runs the campaign; returns the exit status: 1 if anything was lost.

    Args:
      trials: kills; the others follow from it.
    """
    number = trials or (QUICK_TRIALS if quick else TRIALS)
    settings = {"quick": quick, "trials": number, "seed": SEED, "setups": list(SETUPS)}
    report = Report(path=json_path, bench="faults", settings=settings, device=False)
    prepare()
    folder = Path(tempfile.mkdtemp(prefix="jhpt-faults-"))
    try:
        write_text(folder)
        print(f"seed {SEED}, files in {folder}")
        killed = _kills(folder, number, report, quick)
        flipped = _flips(folder, 30 if quick else max(4 * number, 20), report)
        met = _peers(folder, quick, report)
        soaked = soak(folder, 1 if quick else max(number // 3, 2), SEED)
        report.add(
            [soaked],
            {
                "soak_cycles": Claim(value=soaked.cycles, unit="kills", setup="jhpt launch, two processes"),
                "soak_bitwise": Claim(value=float(soaked.bitwise), unit="1: yes", setup="last checkpoint, all arrays"),
            },
        )
        print_claims(report.claims)
        trials_of: list[Kill | Flip] = [*killed, *flipped]
        lost = [trial for trial in trials_of if trial.outcome not in ("whole", "detected", "harmless")]
        for trial in lost:
            print(f"LOST: {trial}")
        late = [each for each in met if not each.held]
        for each in late:
            print(f"NOT AS PROMISED: {each}")
        return int(bool(lost or late) or not soaked.bitwise)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kills(folder: Path, number: int, report: Report, quick: bool) -> list[Kill]:
    names = ["plain", "ZeRO-3"] if quick else list(SETUPS)
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
    return found


def _peers(folder: Path, quick: bool, report: Report) -> list[Met]:
    found = list(peers(folder, tried(quick)))
    worst: dict[str, float] = {}
    for met in found:
        worst[met.fault] = max(met.seconds, worst.get(met.fault, 0.0))
    setup = f"two processes, stall_seconds and --wait {STALL:g}, worst of {len(found)} trials"
    claims = {
        "dead_peer_seconds": worst["killed"],
        "stuck_peer_seconds": max(worst["stopped"], worst["stuck"]),
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
    return found


def _flips(folder: Path, number: int, report: Report) -> list[Flip]:
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
    return found
