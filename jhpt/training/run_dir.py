"""The directory of a run: its name, whether the run can be resumed, and a lock so that only one process writes to it.

config.yaml  plan.json  tokenizer.json  metrics.jsonl  train.log  checkpoints/  tensorboard/  .lock
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jhpt.core.config import CheckpointConfig, Config
from jhpt.core.errors import InputError
from jhpt.core.files import replacing
from jhpt.core.load import CONFIG_FILE, load_config, to_yaml
from jhpt.core.manifest import to_disk, write_to_disk
from jhpt.core.plan import Plan
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.data.left_out import LeftOut
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.metrics import METRICS_FILE, read_metrics
from jhpt.training.processes import from_main, is_main, raise_on_all_processes
from jhpt.training.record import Record, changes_of_note, check_resumable, schedule_of
from jhpt.training.step_folders import Damaged, Say, check_step, copy_step, newest_whole

PLAN_FILE = "plan.json"
"""The plan that a run executes."""

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of file systems without locks; the run then proceeds without one."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a run resumes; notes: messages for the user.  left_out, rewinds: as the record there has them.  goes_back:
    whether later steps are to be left behind."""

    step: int = 0
    notes: tuple[str, ...] = ()
    left_out: LeftOut = ()
    rewinds: int = 0
    goes_back: bool = False


def new_run_dir(config: Config) -> Path:
    """`runs/<name>-<time>`, the same on every process."""
    now = from_main(int(time.time()) % 2**31)
    stem = Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    candidates = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(2, 100))]
    return next(path for path in candidates if jax.process_count() > 1 or not path.exists())


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Creates and locks the directory for the time inside the context.

    Directories that were created here are removed again if nothing was written.

    Raises:
      InputError: another process trains there, the directory holds something else or cannot be written, or processes
        on other hosts do not see it.
    """
    lock = None
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    with raise_on_all_processes():
        if is_main():
            _check_place(run_dir)
            lock = _lock(run_dir)
    try:
        with raise_on_all_processes():
            _wait_until_seen(run_dir)
        yield
    finally:
        if lock is not None:
            os.close(lock)
            if missing and {path.name for path in run_dir.iterdir()} == {".lock"}:
                (run_dir / ".lock").unlink()
                _remove_empty(missing)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders from the innermost outwards, up to the first that is in use."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _check_place(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"--out {run_dir} is a file; give a directory")
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"--out {run_dir} holds {path.name}, which is no regular file; remove it")
    foreign = [path for path in run_dir.iterdir() if not path.name.startswith(".")] if run_dir.is_dir() else []
    if foreign and not (run_dir / CONFIG_FILE).is_file():
        raise InputError(f"--out {run_dir} is not empty and holds no run; give a new or empty directory")


def _lock(run_dir: Path) -> int:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"run directory {run_dir} cannot be written: {error}; give another --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"another process is training in {run_dir}; wait for it or give another --out") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return lock


def _wait_until_seen(run_dir: Path) -> None:
    """Waits, because network file systems show a new folder to other hosts only after a while."""
    deadline = time.monotonic() + 30
    while not (run_dir / ".lock").exists():
        if time.monotonic() > deadline:
            raise InputError(
                f"run directory {run_dir} of process 0 is not visible to process {jax.process_index()}; "
                "give an --out on a file system that all processes share"
            )
        time.sleep(0.2)


def check_can_go_on(run_dir: Path) -> None:
    """Refuses a directory with weights alone, as `jhpt import` makes it.

    Raises:
      InputError: its newest checkpoint has no state of an optimizer.
    """
    step = newest(run_dir, say=lambda line: None) if is_main() else None  # `find_resume` will tell
    if step is None:
        return
    with Checkpoints(run_dir / FOLDER, None) as checkpoints:
        if checkpoints.record(step).weights_only:
            raise InputError(
                f"{run_dir} holds weights and no state of an optimizer to go on with; start from them with "
                f"--init {run_dir} and another --out"
            )


def find_resume(run_dir: Path, record: Record, checkpoint: CheckpointConfig, resume_step: int | None = None) -> Resume:
    """The newest whole step to resume from, 0 for a new run.  Damaged steps are set aside; nothing else is written.

    Args:
      resume_step: the step to go on from instead.

    Raises:
      InputError: settings that a resumed run must keep have changed, or checkpoints of steps in the metrics are gone.
      Damaged: there are checkpoints, and none is whole.
    """
    notes: list[str] = []
    step = 0
    with raise_on_all_processes():
        if is_main():
            if resume_step is not None:
                check_step(run_dir / FOLDER, resume_step)
            step = resume_step or _whole_step(run_dir, checkpoint, notes.append)
    step = from_main(step)
    if step == 0:
        return Resume(notes=tuple(notes))
    with Checkpoints(run_dir / FOLDER, None) as checkpoints:
        saved = checkpoints.record(step)
    asked = resume_step is not None or _same_schedule(run_dir, record)
    check_resumable(saved, record, str(run_dir), new_schedule=asked)
    notes += changes_of_note(saved, record, step)
    return Resume(
        step=step,
        notes=tuple(notes),
        left_out=saved.left_out,
        rewinds=saved.rewinds,
        goes_back=resume_step is not None,
    )


def _same_schedule(run_dir: Path, record: Record) -> bool:
    """Whether the run was already given this learning rate with --resume-step, before it was stopped or killed: its
    configuration has it, and its newest checkpoint may be older."""
    try:
        config = load_config(run_dir / CONFIG_FILE)
    except InputError:
        return False
    return schedule_of(replace(record, config=config.model_dump(mode="json"))) == schedule_of(record)


def _whole_step(run_dir: Path, checkpoint: CheckpointConfig, say: Say) -> int:
    """The newest whole step of the run or of its mirror, from which it is then copied; 0: there is none.

    A new run may have been killed before its first checkpoint, and has metrics then: up to twice `checkpoint.every`.
    The save that is due there waits for the one before it.
    """
    folder = run_dir / FOLDER
    try:
        step = newest_whole(folder, say, set_aside=True)
    except Damaged:
        if (step := _from_mirror(folder, checkpoint, say)) is None:
            raise
    if step is None:
        step = _from_mirror(folder, checkpoint, say)
    if step is not None:
        return step
    reached = max((int(record["step"]) for record in read_metrics(run_dir)), default=0)
    if reached and (not folder.is_dir() or reached > 2 * checkpoint.every):
        raise InputError(
            f"{run_dir} has metrics of step {reached} and no checkpoint; put {folder} back, give another --out, or "
            f"remove {run_dir / METRICS_FILE} to start from step 0"
        )
    return 0


def _from_mirror(folder: Path, checkpoint: CheckpointConfig, say: Say) -> int | None:
    """Copies the newest whole step of the mirror into the folder; None: there is none."""
    if checkpoint.mirror is None or (step := newest_whole(Path(checkpoint.mirror), say)) is None:
        return None
    say(f"warning: taking step {step} from checkpoint.mirror={checkpoint.mirror}")
    copy_step(Path(checkpoint.mirror) / str(step), folder)
    return step


def write_description(run_dir: Path, config: Config, plan: Plan, tokenizer: Tokenizer) -> None:
    """Writes what the run is made of, each file whole: the complete configuration, the plan, and the tokenizer, unless
    its ids are raw bytes."""
    if is_main():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_config(run_dir, config)
        write_plan(run_dir, plan)
        tokenizer.save(run_dir)


def write_config(run_dir: Path, config: Config) -> None:
    """Writes the complete configuration."""
    write_to_disk(run_dir / CONFIG_FILE, to_yaml(config))


def write_plan(run_dir: Path, plan: Plan) -> None:
    """Writes the plan."""
    with replacing(run_dir / PLAN_FILE) as partial:
        plan.save(partial)
        to_disk(partial)
