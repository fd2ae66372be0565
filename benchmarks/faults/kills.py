"""Runs that are killed at random instants, or at named moments of a save, and go on; nothing may be lost.

A chain is one run: it is killed, goes on, is killed again, until it ends.  After every kill each checkpoint that has a
name must be whole, and hold what that of the undisturbed run holds bit for bit: the digests of its arrays are compared.
"""

import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

from benchmarks.faults.moments import MOMENTS
from benchmarks.faults.setups import SETUPS, settings_of
from benchmarks.faults.zygote import Death, run
from jhpt.core.manifest import manifest_faults
from jhpt.training.step_folders import FOLDER, RECORD, steps_in

LAST = 24
"""Steps of a run."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One trial.  outcome: "whole", "corrupt" or "unrestorable"; step: the newest checkpoint after it."""

    setup: str
    seed: int
    when: str
    seconds: float
    step: int
    outcome: str
    detail: str = ""


def digests_of(run_dir: Path) -> dict[int, dict[str, str]]:
    """The digests of the arrays of every checkpoint, by step."""
    folder = run_dir / FOLDER
    return {step: json.loads((folder / str(step) / RECORD).read_text())["digests"] for step in steps_in(folder)}


def written_at(run_dir: Path) -> dict[int, int]:
    """When the record of every checkpoint was written, by step."""
    folder = run_dir / FOLDER
    return {step: (folder / str(step) / RECORD).stat().st_mtime_ns for step in steps_in(folder)}


def judged(
    run_dir: Path, expected: dict[int, dict[str, str]], before: Mapping[int, int] = MappingProxyType({})
) -> tuple[str, str]:
    """(outcome, detail) of what a kill has left of a run.

    before: `written_at` when the run was started.  It goes on from the newest checkpoint, so it writes none of them
    again; a run that started from an older one, or from nothing, would end with the same values, but hours later.
    """
    now = written_at(run_dir)
    if again := [step for step, at in before.items() if now.get(step) != at]:
        return "corrupt", f"step {again[0]} was there and was written again, or is gone"
    for step in steps_in(run_dir / FOLDER):
        if faults := manifest_faults(run_dir / FOLDER / str(step)):
            return "corrupt", f"step {step}: {faults[0]}"
    for step, digests in digests_of(run_dir).items():
        if digests != expected[step]:
            return "corrupt", f"step {step} holds other values than the undisturbed run"
    return "whole", ""


def kills(name: str, folder: Path, number: int, seed: int) -> Iterator[Kill]:
    """So many kills of runs of one set-up; half of them at named moments."""
    setup, rng = SETUPS[name], Random(seed)
    settings, home = settings_of(setup, folder), folder / name.replace(" ", "-")
    log = home.with_suffix(".log")
    status, whole = run(setup, settings, home / "undisturbed", log=log)
    if status:
        raise RuntimeError(f"the undisturbed run of {name} ended with status {status}:\n{log.read_text()[-2000:]}")
    expected, done, chain = digests_of(home / "undisturbed"), 0, 0
    while done < number:
        chain += 1
        place = home / f"chain-{chain}"
        while True:
            death, before = _death(rng, whole, place), written_at(place)
            status, seconds = run(setup, settings, place, death, log=log)
            if status == 0:
                break
            outcome, detail = (
                judged(place, expected, before) if status == -signal.SIGKILL else ("unrestorable", str(status))
            )
            done += 1
            when = death.moment or f"{death.seconds:.2f} s"
            newest = max(steps_in(place / FOLDER), default=0)
            yield Kill(setup=name, seed=seed, when=when, seconds=seconds, step=newest, outcome=outcome, detail=detail)
            if outcome != "whole" or done >= number:
                break
        if status == 0 and (fault := judged(place, expected, before))[0] != "whole":
            yield Kill(
                setup=name, seed=seed, when="at its end", seconds=seconds, step=LAST, outcome=fault[0], detail=fault[1]
            )
        if status == 0 and digests_of(place).keys() != expected.keys():
            raise RuntimeError(f"{place} has other checkpoints than the undisturbed run")
        shutil.rmtree(place, ignore_errors=True)


def _death(rng: Random, whole: float, place: Path) -> Death:
    """Uniformly in the time of a whole run, or at a moment of one of the saves that are left."""
    left = range(max(steps_in(place / FOLDER), default=0) + 2, LAST + 1, 2)
    if left and rng.random() < 0.5:
        return Death(step=rng.choice(left[:3]), moment=rng.choice(list(MOMENTS)))
    return Death(seconds=rng.uniform(0.0, 1.1 * whole))
