"""Many kills of one run under `jhpt launch` with two processes, which must end as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.faults.kills import digests_of
from benchmarks.faults.setups import SMALL, SetUp, settings_of
from benchmarks.faults.zygote import start, waited
from jhpt.training.step_folders import FOLDER, steps_in

STEPS_PER_CYCLE = 3
"""Steps that a cycle makes at most, so that the run is long enough."""

SETUP = SetUp(
    changes={"parallel.data": 2, "checkpoint.every": 1, "checkpoint.keep": 2, "evaluation.every": 10**6}, processes=2
)

QUICK = SetUp(changes={**SETUP.changes, **SMALL}, processes=2)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The outcome: kills, whether the last checkpoint is that of the undisturbed run, seconds."""

    cycles: int
    bitwise: bool
    status: int
    seconds: float


def soak(folder: Path, cycles: int, seed: int, setup: SetUp = SETUP) -> Soak:
    """Kills one of the two processes again and again, each time after a new checkpoint.

    The run that nothing disturbs goes on beside it, without `jhpt launch`.
    """
    last = STEPS_PER_CYCLE * cycles + 5
    settings = settings_of(setup, folder) | {"train.steps": last}
    rng, started = Random(seed), time.monotonic()
    launcher, done, seen = _launch(settings, folder / "soak"), 0, 0
    undisturbed = start(setup, settings, folder / "soak-undisturbed", logs=[folder / "soak-undisturbed.log"] * 2)
    while launcher.poll() is None:
        newest = max(steps_in(folder / "soak" / FOLDER), default=0)
        pids = _children(launcher.pid)
        if done < cycles and seen < newest < last - 2 and len(pids) == 2:
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(rng.choice(pids), signal.SIGKILL)
            done += 1
            seen = max(steps_in(folder / "soak" / FOLDER), default=0)
            while launcher.poll() is None and set(_children(launcher.pid)) & set(pids):
                time.sleep(0.02)
        time.sleep(0.01)
    if status := waited(undisturbed, deadline=1800):
        raise RuntimeError(f"the undisturbed run ended with status {status}; see {folder / 'soak-undisturbed.log'}")
    same = digests_of(folder / "soak").get(last) == digests_of(folder / "soak-undisturbed")[last]
    return Soak(cycles=done, bitwise=same, status=launcher.returncode, seconds=time.monotonic() - started)


def _launch(settings: Mapping[str, object], out: Path) -> subprocess.Popen[bytes]:
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jhpt", "launch", "--processes", "2", "--pause", "0", "--max-restarts", "100000"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--", "train", *flags, "--out", str(out)], env=environment, stdout=log, stderr=log
        )


def _children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []
