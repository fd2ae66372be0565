"""The directory of a run: which one, whether it can be gone on with, and that only one run writes to it.

config.yaml  metrics.jsonl  train.log  checkpoints/  tensorboard/
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.load import to_yaml
from jhpt.training.checkpoint import Checkpoints, Record, check_resumable
from jhpt.training.processes import is_main


def new_run_dir(config: Config) -> Path:
    """`runs/<name>-<time>`, the same on every process."""
    now = int(time.time())
    if jax.process_count() > 1:
        now = int(multihost_utils.broadcast_one_to_all(np.int64(now) % 2**31))
    stem = Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    candidates = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(2, 100))]
    return next(path for path in candidates if jax.process_count() > 1 or not path.exists())


def resume_step(run_dir: Path, record: Record) -> int:
    """The step to go on from: 0 for a new run.  Writes nothing.

    Raises:
      InputError: the directory cannot be written, holds something else, or holds a run that differs in what a resumed
        run must keep.
    """
    _check_place(run_dir)
    if not (run_dir / "checkpoints").is_dir():
        return 0
    with Checkpoints(run_dir / "checkpoints", Config().checkpoint) as checkpoints:
        step = checkpoints.latest
        if step is not None:
            check_resumable(checkpoints.record(step), record, str(run_dir))
        return step or 0


def _check_place(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"--out {run_dir} is a file; give a directory")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / "config.yaml").is_file():
        raise InputError(f"--out {run_dir} is not empty and holds no run; give a new or empty directory")
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise InputError(
            f"run directory {run_dir} cannot be written: {there} is no writable folder; give another --out"
        )


@contextmanager
def claimed(run_dir: Path, config: Config) -> Iterator[None]:
    """Makes the directory this run's for the time inside: creates it, locks it, writes the configuration.

    Raises:
      InputError: another process trains there, or it cannot be written.
    """
    if not is_main():
        yield
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise InputError(f"run directory {run_dir} cannot be written: {error}; give another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is training in {run_dir}; wait for it or give another --out") from None
        partial = run_dir / "config.yaml.partial"
        partial.write_text(to_yaml(config))
        partial.rename(run_dir / "config.yaml")
        yield
