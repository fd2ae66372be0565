"""What follows a loss spike: its checkpoint is kept, or training goes back and leaves out the data since.

Chowdhery et al. 2022 (arXiv 2204.02311, section 5.1) went back about 100 steps and left out 200 to 500 batches.  Here
the data is left out that training saw from the checkpoint to the spike.  What is left out is part of the record in
every checkpoint, so a run that is resumed reads the same data as one that is not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jhpt.core.config import Config
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.data.left_out import gone_back
from jhpt.training.loop import TrainingDiverged
from jhpt.training.processes import from_main, is_main, raise_on_all_processes
from jhpt.training.record import Record
from jhpt.training.step_folders import FOLDER, Say, faults_of, leave_behind, steps_in


def keep_before(checkpoints: Checkpoints, say: Say, step: int, good: int) -> None:
    """Keeps the newest checkpoint up to the last good step for good."""
    kept = checkpoints.keep(good)
    what = "there is no checkpoint from before"
    if kept is not None:
        what = f"checkpoint {kept} is kept, to go back to with --resume-step {kept}"
    say(f"warning: step {step}: the loss has jumped; {what}")


def go_back_before(
    run_dir: Path, config: Config, record: Record, spike: int, say: Say, *, anew: bool
) -> tuple[int, Record]:
    """Chooses the checkpoint to go back to, and leaves later ones behind.  All processes must call it, with no
    checkpoint being written.

    Args:
      record: of the run so far.  spike: the step whose loss has jumped.  anew: whether the state before the first step
        can be made again.

    Raises:
      TrainingDiverged: the run has gone back often enough, or there is nothing to go back to.
    """
    limit = config.guards.max_rewinds
    if record.rewinds >= limit:
        raise TrainingDiverged(
            f"step {spike}: the loss has jumped again after going back {limit} times (guards.max_rewinds={limit}); "
            f"lower optimizer.learning_rate, which --resume-step allows, or check the data"
        )
    folder = run_dir / FOLDER
    back = from_main(whole_before(folder, spike, config) if is_main() else 0)
    if back == 0 and not anew:
        raise TrainingDiverged(f"step {spike}: the loss has jumped, and there is no checkpoint from before in {folder}")
    what = f"checkpoint {back}" if back else "the beginning"
    say(f"warning: step {spike}: the loss has jumped; going back to {what}, without the data since")
    with raise_on_all_processes():
        if is_main():
            leave_behind(folder, back, say)
    left_out = gone_back(record.left_out, back, spike)
    return back, replace(record, left_out=left_out, rewinds=record.rewinds + 1)


def whole_before(folder: Path, spike: int, config: Config) -> int:
    """`checkpoint_before` among those that are whole."""
    steps = steps_in(folder)
    while (back := checkpoint_before(steps, spike, config)) and faults_of(folder / str(back)):
        steps.remove(back)
    return back


def checkpoint_before(steps: Sequence[int], spike: int, config: Config) -> int:
    """The newest checkpoint at least `guards.rewind_steps` before the spike, or else the oldest before it; 0: none.

    Where there are some, only those of `checkpoint.every` count, so that a run goes back to the same one whether or not
    it was stopped, and so saved, in between.

    Args:
      steps: that are saved.
    """
    before = [step for step in steps if step < spike]
    regular = [step for step in before if step % config.checkpoint.every == 0] or before
    far = [step for step in regular if step <= spike - config.guards.rewind_steps]
    return max(far) if far else min(regular, default=0)
