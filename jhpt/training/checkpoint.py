"""Checkpoints through Orbax: written in the background, whole or not at all, restorable onto any mesh.

A checkpoint holds the training state (parameters stacked `[L, ...]`, whatever the mesh), a record of what produced it
(configuration, content key of the tokens, versions, digests of the arrays), and a manifest of its files, which is
written last.  Keys and the data position follow from seed and step.
"""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jhpt.core.config import CheckpointConfig
from jhpt.core.errors import Exit, InputError, JhptError
from jhpt.core.manifest import write_to_disk
from jhpt.sharding.gather import gathered
from jhpt.sharding.types import PyTree
from jhpt.training.digests import different, digests
from jhpt.training.layered import Layered, LayeredHandler, by_layer, item_handlers
from jhpt.training.orbax_changes import leave_out_leaks, leave_out_stack_traces
from jhpt.training.processes import from_main, is_main
from jhpt.training.record import Record
from jhpt.training.spikes import Losses
from jhpt.training.step import Params, TrainState
from jhpt.training.step_folders import (
    FOLDER,
    OLD_RECORD,
    RECORD,
    WRITING,
    Damaged,
    Say,
    commit,
    copy_step,
    newest_whole,
    pin,
    remove_unfinished,
    rotate,
    steps_in,
)

REMEDY = "if it is damaged, move it away, and the run resumes from the checkpoint before it"

WAIT = 600
"""Seconds after which processes give up waiting for each other's files."""


class SavingFailed(JhptError):
    """Several checkpoints in a row could not be written."""

    status = Exit.STORAGE


def warn(line: str) -> None:
    """Tells whoever runs a command that only reads a run."""
    print(line, file=sys.stderr)


def newest(run_dir: Path, say: Say = warn) -> int | None:
    """The step of the newest whole checkpoint of a run, without touching it; None: it has none.

    Raises:
      Damaged: none of those that it has is whole.
    """
    return newest_whole(run_dir / FOLDER, say)


class Checkpoints:
    """The checkpoints of one run; leaving the context waits until all of them are written.

    config: what is kept; None: they are only read, and the folder stays as it is, also if another process trains there.
    say: told of checkpoints that could not be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig | None, say: Say = warn):
        self._folder, self._config, self._say = folder.absolute(), config, say
        self._layers = LayeredHandler()
        leave_out_stack_traces()
        leave_out_leaks()
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(handler_registry=item_handlers(self._layers)), timeout_secs=WAIT
        )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._missed = 0
        self._begun: int | None = None
        if config is not None and is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint that has been written to the end."""
        return next(reversed(steps_in(self._folder)), None)

    def save(self, step: int, state: TrainState, record: Record) -> None:
        """Copies the state to the host and writes it in the background, unless the step is already saved.

        A checkpoint that cannot be written does not end training: the next one is tried when it is due.  All processes
        must call this.

        Raises:
          SavingFailed: `checkpoint.max_failed` in a row could not be written.
        """
        self.settle()
        if from_main(int(step == self.latest)):
            return
        core = _core(state)
        beside = _beside(state)
        record = replace(record, digests=digests(core | beside))
        if not from_main(int(self._has_room(step))):
            return
        items = {name: ocp.args.StandardSave(part) for name, part in beside.items()}
        items["state"] = ocp.args.PyTreeSave(core, save_args=jax.tree.map(by_layer, core))
        self._layers.begin.clear()
        try:
            self._checkpointer.save(self._unfinished(step), args=ocp.args.Composite(**items))
        finally:
            self._layers.begin.set()
        self._writing, self._begun = self._background.submit(self._finish, step, record), step
        if any(isinstance(leaf, Layered) for leaf in jax.tree.leaves(core)):  # rows must not change meanwhile
            self.settle()

    def keep(self, last: int) -> int | None:
        """Keeps the newest step up to `last` for good, also if it is still being written; which one, or None.

        Only the main process does it.
        """
        steps = [step for step in (*steps_in(self._folder), self._begun) if step is not None and step <= last]
        if not steps or not is_main():
            return None
        with suppress(OSError):  # then no checkpoint can be written either, which is told
            pin(self._folder, max(steps))
        return max(steps)

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"{step}{WRITING}"

    def _has_room(self, step: int) -> bool:
        """Whether the folder can be written at all, which is asked before all processes begin to write."""
        if not is_main():
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
            write_to_disk(self._unfinished(step), "")
            self._unfinished(step).unlink()
        except OSError as error:
            self._note(error)
            return False
        return True

    def _finish(self, step: int, record: Record) -> None:
        """Runs beside the training: waits for the files, gives them manifest and name, and removes what is superseded.

        Only the main process does more than wait.
        """
        self._wait()
        if not is_main() or self._config is None:
            return
        place, unfinished = self._folder / str(step), self._unfinished(step)
        write_to_disk(unfinished / RECORD, json.dumps(asdict(record)))
        commit(unfinished, place)
        rotate(self._folder, self._config)
        if self._config.mirror is not None and (step // self._config.every) % self._config.mirror_every == 0:
            try:
                copy_step(place, Path(self._config.mirror))
                rotate(Path(self._config.mirror), self._config)
            except OSError as error:
                self._say(f"warning: step {step} was not copied to checkpoint.mirror: {error}")

    def _wait(self) -> None:
        """Waits for everything that Orbax is writing; raises the first of its failures, after all have ended.

        Orbax raises one failure a call, and the others where nobody expects them: as the next save begins, or on
        closing.
        """
        try:
            self._checkpointer.wait_until_finished()
        except Exception:
            with suppress(Exception):  # they follow from the first
                self._wait()
            raise

    def settle(self) -> bool:
        """Waits until the step that is being written is on the disk; whether the last one that was begun is.

        All processes must call it.

        Raises:
          SavingFailed: as `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            if (failure := writing.exception()) is not None:
                self._note(failure)
            else:
                self._missed = 0
        missed = int(gathered(np.int64(self._missed)).max()) if jax.process_count() > 1 else self._missed
        if self._config is not None and missed >= self._config.max_failed:
            raise SavingFailed(
                f"{missed} checkpoints in a row could not be written to {self._folder}; make room there, or give "
                f"training another place; {self._last_good()}"
            )
        return missed == 0

    def _last_good(self) -> str:
        latest = self.latest
        return "none was written before" if latest is None else f"step {latest} is whole, and the run resumes from it"

    def _note(self, failure: BaseException) -> None:
        self._missed += 1
        remove_unfinished(self._folder)
        reason = str(failure.__cause__ or failure).partition("\n")[0]
        self._say(
            f"warning: a checkpoint could not be written to {self._folder} ({reason}); training goes on, "
            f"{self._last_good()}"
        )

    def record(self, step: int) -> Record:
        """The record of a checkpoint."""
        place = self._folder / str(step)
        try:
            there = place / RECORD if (place / RECORD).exists() else place / OLD_RECORD
            return Record(**json.loads(there.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"the record in checkpoint {place} cannot be read: {error}; {REMEDY}") from error

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at `step`, laid out as the shapes and shardings of `like` say.

        Feedback comes with the number of ranks that it was saved with; items that were not saved are absent.

        Raises:
          Damaged: an array is not what was saved.
        """
        state, losses = self.part(step, like), self.losses(step, like.losses)
        feedback = None if like.feedback is None else self._items(step, like.feedback)
        return replace(state, feedback=feedback, losses=losses)

    def losses(self, step: int, like: Losses | None) -> Losses | None:
        """What the step knew of losses before it, with as many as were saved; None: it was not asked for, or not
        saved."""
        return None if like is None else self._items(step, {LOSSES: like}).get(LOSSES)

    def _items(self, step: int, like: Mapping[str, PyTree]) -> dict[str, Any]:
        """Those of these items that were saved, their first dims as they were saved."""
        places = {name: self._folder / str(step) / name for name in like}
        items = {
            name: self._read(step, name, ocp.args.StandardRestore(_with_first_dims_of(place, like[name])))
            for name, place in places.items()
            if place.exists()
        }
        self._check(step, items)
        return items

    def part(self, step: int, like: TrainState) -> TrainState:
        """The leaves of the state at `step` that `like`, a tree of shapes, names: leaves with a sharding as device
        arrays, leaves without one as numpy arrays; leaves that are `...` are left out."""
        restore = jax.tree.map(_restored_as, _core(like))
        arguments = ocp.args.PyTreeRestore(item=_core(like), restore_args=restore)
        state = self._read(step, "state", arguments)
        self._check(step, jax.tree.map(lambda leaf: None if leaf is ... else leaf, state))
        return TrainState(**state)

    def parameters(self, step: int, like: Params) -> Params:
        """The parameters at `step` alone, the model's own tree, laid out as the shapes and shardings of `like` say."""
        restore = {"params": jax.tree.map(_restored_as, like)}
        arguments = ocp.args.PyTreeRestore(item={"params": like}, restore_args=restore, partial_restore=True)
        state = self._read(step, "state", arguments)
        self._check(step, state)
        params: Params = state["params"]
        return params

    def _check(self, step: int, restored: Mapping[str, PyTree]) -> None:
        """Compares what was restored with what was saved.  All processes must call it."""
        expected = self.record(step).digests
        if expected is not None and (wrong := different(expected, digests(restored))):
            raise Damaged(f"{wrong[0]} in checkpoint {self._folder / str(step)} is not what was saved; {REMEDY}")

    def opened(self, step: int, leaf: str) -> Any:
        """The parameter at this path of the model's own tree as an open TensorStore, which can be read in pieces."""
        folder = (self._folder / str(step) / "state").absolute()
        place = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{leaf.replace('/', '.')}/"}
        try:
            return tensorstore.open({"driver": "zarr", "kvstore": place}, read=True).result()
        except ValueError as error:
            raise InputError(f"{leaf} in checkpoint {folder.parent} cannot be read: {error}") from None

    def _read(self, step: int, item: str, arguments: ocp.args.CheckpointArgs) -> dict[str, Any]:
        place = self._folder / str(step)
        try:
            return self._checkpointer.restore(place, args=ocp.args.Composite(**{item: arguments}))[item]
        except Exception as error:  # Orbax raises bare Exceptions, too; their cause has the reason
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise InputError(f"the {item} in checkpoint {place} cannot be read: {reason}; {REMEDY}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits until everything is written.

        Raises:
          SavingFailed: the last checkpoint could not be written, unless another error is under way.
        """
        try:
            written = self.settle() if kind is None else True
            if not written:
                raise SavingFailed(f"the last checkpoint could not be written to {self._folder}; {self._last_good()}")
        finally:
            self._background.shutdown()
            self._checkpointer.close()


def _restored_as(leaf: Any) -> ocp.RestoreArgs:
    if leaf is ... or leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _with_first_dims_of(place: Path, like: PyTree) -> Any:
    """`like` with the first dims of the leaves that are saved in `place`: numbers of ranks, or of losses."""
    there = ocp.StandardCheckpointHandler().metadata(place).tree
    return jax.tree.map(
        lambda leaf, saved: jax.ShapeDtypeStruct((saved.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding),
        like,
        there,
    )


LOSSES = "losses"
"""The item, and the field of a state, with what a step knows of losses before it."""


def _core(state: TrainState) -> dict[str, Any]:
    """The state without what is saved as separate items: without those, a checkpoint equals that of a run without
    compressed gradients or guard."""
    return {
        name: part for name, part in _as_dict(state).items() if name not in ("feedback", LOSSES) and part is not None
    }


def _beside(state: TrainState) -> dict[str, Any]:
    """What is saved as separate items."""
    return {**(state.feedback or {}), **({} if state.losses is None else {LOSSES: state.losses})}
