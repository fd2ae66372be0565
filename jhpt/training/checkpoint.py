"""Checkpoints through Orbax: asynchronous, rotated, restorable onto any mesh, and refused where they do not fit.

A checkpoint holds the training state (parameters stacked `[L, ...]`, whatever the mesh) and a record of what produced
it: configuration, content key of the tokens, versions.  Keys and the data position follow from seed and step.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jhpt.core.config import CheckpointConfig, Config, OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig
from jhpt.core.load import dotted
from jhpt.training.layered import Layered, LayeredHandler, by_layer, item_handlers
from jhpt.training.optimizer import learning_rate
from jhpt.training.step import TrainState

BOUND = ("seed", "model.", "optimizer.", "data.")
PLACES = ("data.path", "data.validation_path", "data.tokenizer", "data.cache_dir")
"""Where files lie, which may differ from host to host and from time to time."""

FREE = ("model.attention", "model.dtype", *PLACES)
"""What a resumed run may not change, less what it may.  Text and tokenizer are compared by content, the compute dtype
as it came out; everything else is free."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint says about its run."""

    config: Mapping[str, Any]
    data_key: str
    dtype: str
    versions: Mapping[str, str]


def make_record(config: Config, data_key: str, dtype: str) -> Record:
    """The record of a run on this machine."""
    versions = {"python": sys.version.split()[0]} | {name: version(name) for name in PACKAGES}
    return Record(config=config.model_dump(mode="json"), data_key=data_key, dtype=dtype, versions=versions)


class Checkpoints:
    """The checkpoints of one run; leaving the context waits for those that are still being written."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            keep_period=config.keep_every,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,  # of a process that was killed while it saved
        )
        self._folder = folder
        self._layers = LayeredHandler()
        handlers = item_handlers(self._layers)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, handler_registry=handlers)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, record: Record) -> None:
        """Copies the state to the host and writes it in the background; a step that is already saved is left alone."""
        if step == self.latest:
            return
        items = {name: ocp.args.StandardSave(part) for name, part in (state.feedback or {}).items()}
        own = _without_feedback(state)
        items["state"] = ocp.args.PyTreeSave(own, save_args=jax.tree.map(by_layer, own))
        self._layers.begin.clear()
        try:
            self._manager.save(step, args=ocp.args.Composite(**items, record=ocp.args.JsonSave(_as_dict(record))))
        finally:
            self._layers.begin.set()
        if any(isinstance(leaf, Layered) for leaf in jax.tree.leaves(own)):  # what is being written must not change
            self._manager.wait_until_finished()

    def record(self, step: int) -> Record:
        """The record of a checkpoint."""
        return Record(**self._read(step, "record", ocp.args.JsonRestore()))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at `step`, laid out as the shapes and shardings of `like` say.

        Feedback comes with as many ranks as it was saved with; what of it was not saved is left out.
        """
        state = self.part(step, like)
        if like.feedback is None:
            return state
        places = {name: self._manager.directory / str(step) / name for name in like.feedback}
        found = {
            name: self._read(step, name, ocp.args.StandardRestore(_with_ranks_of(place, like.feedback[name])))
            for name, place in places.items()
            if place.exists()
        }
        return replace(state, feedback=found)

    def part(self, step: int, like: TrainState) -> TrainState:
        """Of the state at `step` the leaves of `like`, a tree of shapes: with a sharding laid out so, without one numpy
        arrays; those that are `...` are left out."""
        restore = jax.tree.map(_restored_as, _without_feedback(like))
        how = ocp.args.PyTreeRestore(item=_without_feedback(like), restore_args=restore)
        return TrainState(**self._read(step, "state", how))

    def _read(self, step: int, item: str, how: Any) -> dict[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # Orbax raises bare Exceptions, too; their cause says what is wrong
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise InputError(
                f"the {item} in checkpoint {self._folder / str(step)} cannot be read: {reason}; "
                "if it is damaged, move it away and the run goes on from the checkpoint before"
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _restored_as(leaf: Any) -> ocp.RestoreArgs:
    if leaf is ... or leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _with_ranks_of(place: Any, like: Any) -> Any:
    """`like` with as many ranks, the first dim, as what is saved in `place`."""
    there = ocp.StandardCheckpointHandler().metadata(place).tree
    return jax.tree.map(
        lambda own, saved: jax.ShapeDtypeStruct((saved.shape[0], *own.shape[1:]), own.dtype, sharding=own.sharding),
        like,
        there,
    )


def _without_feedback(state: TrainState) -> dict[str, Any]:
    """Feedback has items of its own: a checkpoint without it is one as from a run without compression."""
    return {name: part for name, part in _as_dict(state).items() if name != "feedback" and part is not None}


def check_resumable(saved: Record, now: Record, place: str) -> None:
    """Refuses to go on with another model, text, optimizer or seed.

    Raises:
      InputError: lists every difference with both values.
    """
    before, after = dotted(saved.config), dotted(now.config)
    model = {"matmul_dtype": ModelConfig.model_fields["matmul_dtype"].default}
    defaults = dotted({"optimizer": OptimizerConfig().model_dump(mode="json"), "model": model})
    before = defaults | before  # what is new since the run was saved: as it was
    before["compute dtype"], after["compute dtype"] = saved.dtype, now.dtype
    names = [name for name in {**before, **after} if name.startswith(BOUND) and name not in FREE]
    changed = [
        f"  {name}: the run has {before.get(name)!r}, now {after.get(name)!r}"
        for name in (*names, "compute dtype")
        if before.get(name) != after.get(name)
    ]
    if saved.data_key != now.data_key and not changed:
        changed.append(
            f"  text or tokenizer: the run has {before['data.path']!r} with content {saved.data_key[:8]}, "
            f"now {after['data.path']!r} with content {now.data_key[:8]}"
        )
    if changed:
        raise InputError(
            f"{place} holds a run that differs in what a resumed run must keep:\n"
            + "\n".join(changed)
            + "\nput these back, or give another --out"
        )


def changes_of_note(saved: Record, now: Record, step: int) -> list[str]:
    """What is allowed to differ and yet may surprise."""
    notes = []
    pairs = {name: (saved.versions.get(name), found) for name, found in now.versions.items()}
    different = [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]
    if different:
        notes.append(f"note: other versions than when the run was saved ({', '.join(different)}); bits may differ")
    steps, more = saved.config["train"]["steps"], now.config["train"]["steps"]
    if steps != more and now.config["optimizer"]["schedule"] != "constant":
        optimizer = OptimizerConfig(**now.config["optimizer"])
        old, new = (float(learning_rate(optimizer, total, jnp.asarray(step))) for total in (steps, more))
        notes.append(
            f"note: the learning-rate schedule now spans {more} steps instead of {steps}: "
            f"{new:.2e} at step {step}, where it would have been {old:.2e}"
        )
    return notes
