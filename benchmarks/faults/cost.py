"""What checkpoints cost: the time that they add to a run, and whether its memory and its open files grow.

`python -m benchmarks.faults.cost SETTINGS OUT SAVES` is one run, with settings in JSON; it prints a `Measured`.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.setups import SETTINGS

USUAL = 50
"""Steps between two saves, for which the share of time is given."""

QUIET: Mapping[str, object] = {
    "evaluation.every": 10**6,
    "evaluation.batches": 1,
    "evaluation.sample_tokens": 0,
    "log.tensorboard": False,
    "log.every": 5,
    "checkpoint.keep": 2,
    "optimizer.warmup_steps": 2,
}


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run with saves, compared with one that saves at its end only.  trials: of each, in turn."""

    name: str
    changes: Mapping[str, object]
    steps: int
    every: int
    trials: int


COURSES = (
    Course(name="gpt-tiny", changes={}, steps=250, every=25, trials=3),
    Course(
        name="100 M parameters",
        changes={
            "model.num_layers": 12,
            "model.d_model": 832,
            "model.num_heads": 13,
            "model.d_ff": 3328,
            "data.batch_size": 8,
            "log.every": 1,
            "train.max_bad_steps": 100,
        },
        steps=9,
        every=2,
        trials=2,
    ),
)

STEADY_STEPS, STEADY_EVERY = 15_000, 50
SETTLED = 200
"""Saves after which memory and open files must not grow any more.  Up to then a heap in which pieces are free grows in
steps of some blocks, until there is room for whatever a save needs.  The other 100 saves take 5,000 steps."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run.  seconds: of a step, all wall time after the first line of metrics; step_seconds: without saves.
    memory, files: resident bytes (`_anonymous`) and open descriptors when each save begins, or would begin."""

    seconds: float
    step_seconds: float
    memory: Sequence[int]
    files: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a save adds to a run, in seconds, in every trial; share: of a run that saves every `USUAL` steps."""

    course: str
    step_seconds: float
    extra: Sequence[float]
    share: float


def cost(course: Course, folder: Path) -> Cost:
    """Runs with and without saves in turn."""
    extra: list[float] = []
    steps: list[float] = []
    for trial in range(course.trials):
        base = {**QUIET, "train.steps": course.steps, **course.changes}
        place = folder / f"{course.name.replace(' ', '-')}-{trial}"
        without = measured(base | {"checkpoint.every": 10**6}, place.with_suffix(".without"))
        saving = measured(base | {"checkpoint.every": course.every}, place.with_suffix(".saving"))
        saves = (course.steps - 1) // course.every  # the one at the end is in both
        extra.append((saving.seconds - without.seconds) * course.steps / saves)
        steps.append(without.step_seconds)
    step = statistics.median(steps)
    return Cost(course=course.name, step_seconds=step, extra=extra, share=statistics.median(extra) / (USUAL * step))


def steady(folder: Path, *, saves: bool) -> Measured:
    """A long run of a tiny model with many saves, or with none."""
    changes = {**QUIET, "train.steps": STEADY_STEPS, "checkpoint.every": STEADY_EVERY, "log.every": STEADY_EVERY}
    return measured({**SETTINGS, **changes}, folder / f"steady-{saves}", saves=saves)


def growth(values: Sequence[int]) -> int:
    """By how much the median of the last ten exceeds that of the first ten after `SETTLED`."""
    settled = values[SETTLED:]
    return round(statistics.median(settled[-10:]) - statistics.median(settled[:10]))


def measured(settings: Mapping[str, object], out: Path, *, saves: bool = True) -> Measured:
    """A run of the preset gpt-tiny with these settings, in a process of its own; saves: whether it writes any."""
    command = [sys.executable, "-m", "benchmarks.faults.cost", json.dumps(settings), str(out), json.dumps(saves)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"a run ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _main(settings: Mapping[str, object], out: str, saves: bool) -> None:
    import jhpt
    from jhpt.core.load import load_config
    from jhpt.training.checkpoint import Checkpoints

    memory: list[int] = []
    files: list[int] = []
    save = Checkpoints.save

    def noted(self: Any, *arguments: Any) -> None:
        self.settle()  # the save before this one has ended
        memory.append(_anonymous())
        files.append(len(os.listdir("/proc/self/fd")))
        if saves:
            save(self, *arguments)

    setattr(Checkpoints, "save", noted)  # noqa: B010  (mypy knows methods)
    result = jhpt.train("gpt-tiny", out=out, overrides=settings)
    assert result.tokens_per_s and result.step_seconds
    data = load_config("gpt-tiny", settings).data
    seconds = data.batch_size * data.sequence_length / result.tokens_per_s
    print(json.dumps(asdict(Measured(seconds=seconds, step_seconds=result.step_seconds, memory=memory, files=files))))


def _anonymous() -> int:
    """Resident bytes of this process that are no pages of files, which the kernel keeps while there is room."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
