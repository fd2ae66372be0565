"""Checkpoints through Orbax: asynchronous, rotated, restorable onto any mesh; those of another run are refused.

A checkpoint holds the training state (parameters stacked `[L, ...]`, whatever the mesh) and a record of what produced
it: configuration, content key of the tokens, versions.  Keys and the data position follow from seed and step.

Leaves are [L, ...].  Offloaded blocks have a row for each block instead.  Copying rows into such leaves would take
twice the memory, and they are offloaded because they are large.  So Orbax is given `Layered` leaves and asks for one
layer after the other while it writes: the same layer of all leaves before the next one.
"""

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jhpt.core.config import CheckpointConfig, Config, DataConfig, OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.families.family import family_settings
from jhpt.core.load import dotted
from jhpt.sharding.types import PyTree
from jhpt.training.optimizer import learning_rate
from jhpt.training.step import Params, TrainState

BOUND = ("seed", "model.", "optimizer.", "data.")
PLACES = ("data.path", "data.validation_path", "data.tokenizer", "data.cache_dir", "data.workers")
"""Paths of files and how they are read, which may differ between hosts and change over time."""

SOURCES = "data.sources"
"""A list of paths with weights."""

FREE = ("model.attention", "model.dtype", "model.nominal_vocab")
"""With `PLACES`, the exceptions from `BOUND`, the settings that a resumed run may not change.  Text and tokenizer are
compared by content, the compute dtype and the vocabulary's size after "auto" is resolved."""

FOLDER = "checkpoints"
"""Where the checkpoints are in a run directory."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name without paths of files; of the sources their weights are left."""
    weights = [source["weight"] for source in settings.get(SOURCES) or ()]
    kept = {name: value for name, value in settings.items() if name not in (*PLACES, SOURCES)}
    return kept | {f"{SOURCES}.weight": weights}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of its run in a checkpoint.  weights_only: whether there is no optimizer state to go on with."""

    config: Mapping[str, Any]
    data_key: str
    dtype: str
    versions: Mapping[str, str]
    weights_only: bool = False


def make_record(config: Config, data_key: str, dtype: str, *, weights_only: bool = False) -> Record:
    """The record of a run on this machine."""
    versions = {"python": sys.version.split()[0]} | {name: version(name) for name in PACKAGES}
    return Record(
        config=config.model_dump(mode="json"),
        data_key=data_key,
        dtype=dtype,
        versions=versions,
        weights_only=weights_only,
    )


def newest(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint of a run, without touching it."""
    if not (run_dir / FOLDER).is_dir():
        return None
    with Checkpoints(run_dir / FOLDER, None) as checkpoints:
        return checkpoints.latest


class Checkpoints:
    """The checkpoints of one run; leaving the context waits until all of them are written.

    config: what is kept; None: they are only read, and the folder stays as it is, also if another process trains there.
    """

    def __init__(self, folder: Path, config: CheckpointConfig | None):
        options = ocp.CheckpointManagerOptions(create=False)
        if config is not None:
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
        """Copies the state to the host and writes it in the background, unless the step is already saved."""
        if step == self.latest:
            return
        items = {name: ocp.args.StandardSave(part) for name, part in (state.feedback or {}).items()}
        core = _without_feedback(state)
        items["state"] = ocp.args.PyTreeSave(core, save_args=jax.tree.map(by_layer, core))
        self._layers.begin.clear()
        try:
            self._manager.save(step, args=ocp.args.Composite(**items, record=ocp.args.JsonSave(_as_dict(record))))
        finally:
            self._layers.begin.set()
        if any(
            isinstance(leaf, Layered) for leaf in jax.tree.leaves(core)
        ):  # rows must not change while they are written
            self._manager.wait_until_finished()

    def record(self, step: int) -> Record:
        """The record of a checkpoint."""
        return Record(**self._read(step, "record", ocp.args.JsonRestore()))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at `step`, laid out as the shapes and shardings of `like` say.

        Feedback comes with the number of ranks that it was saved with; items that were not saved are absent.
        """
        state = self.part(step, like)
        if like.feedback is None:
            return state
        places = {name: self._manager.directory / str(step) / name for name in like.feedback}
        feedback = {
            name: self._read(step, name, ocp.args.StandardRestore(_with_ranks_of(place, like.feedback[name])))
            for name, place in places.items()
            if place.exists()
        }
        return replace(state, feedback=feedback)

    def part(self, step: int, like: TrainState) -> TrainState:
        """The leaves of the state at `step` that `like`, a tree of shapes, names: leaves with a sharding as device
        arrays, leaves without one as numpy arrays; leaves that are `...` are left out."""
        restore = jax.tree.map(_restored_as, _without_feedback(like))
        arguments = ocp.args.PyTreeRestore(item=_without_feedback(like), restore_args=restore)
        return TrainState(**self._read(step, "state", arguments))

    def parameters(self, step: int, like: Params) -> Params:
        """The parameters at `step` alone, the model's own tree, laid out as the shapes and shardings of `like` say."""
        restore = {"params": jax.tree.map(_restored_as, like)}
        arguments = ocp.args.PyTreeRestore(item={"params": like}, restore_args=restore, partial_restore=True)
        params: Params = self._read(step, "state", arguments)["params"]
        return params

    def opened(self, step: int, leaf: str) -> Any:
        """The parameter at this path of the model's own tree as an open TensorStore, which can be read in pieces."""
        folder = (self._folder / str(step) / "state").absolute()
        place = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{leaf.replace('/', '.')}/"}
        try:
            return tensorstore.open({"driver": "zarr", "kvstore": place}, read=True).result()
        except ValueError as error:
            raise InputError(f"{leaf} in checkpoint {folder.parent} cannot be read: {error}") from None

    def _read(self, step: int, item: str, arguments: ocp.args.CheckpointArgs) -> dict[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: arguments}))[item]
        except Exception as error:  # Orbax raises bare Exceptions, too; their cause has the reason
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise InputError(
                f"the {item} in checkpoint {self._folder / str(step)} cannot be read: {reason}; "
                "if it is damaged, move it away, and the run resumes from the checkpoint before it"
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


def _with_ranks_of(place: Path, like: PyTree) -> Any:
    """`like` with the number of ranks, the first dim, of the leaves that are saved in `place`."""
    there = ocp.StandardCheckpointHandler().metadata(place).tree
    return jax.tree.map(
        lambda leaf, saved: jax.ShapeDtypeStruct((saved.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding),
        like,
        there,
    )


def _without_feedback(state: TrainState) -> dict[str, Any]:
    """The state without feedback, which is saved as separate items: without them, a checkpoint equals that of a run
    without compression."""
    return {name: part for name, part in _as_dict(state).items() if name != "feedback" and part is not None}


def check_resumable(saved: Record, now: Record, place: str) -> None:
    """Refuses to resume with another model, text, optimizer or seed.

    Raises:
      InputError: lists every difference with both values.
    """
    before, after = without_places(dotted(saved.config)), without_places(dotted(now.config))
    before = _defaults(saved) | before  # settings that are newer than the checkpoint had their defaults
    before["compute dtype"], after["compute dtype"] = saved.dtype, now.dtype
    names = [name for name in {**before, **after} if name.startswith(BOUND) and name not in FREE]
    changed = [
        f"  {name}: the run has {before.get(name)!r}, now {after.get(name)!r}"
        for name in (*names, "compute dtype")
        if before.get(name) != after.get(name)
    ]
    if saved.data_key != now.data_key and not changed:
        changed.append(
            f"  text or tokenizer: the run has {_paths(saved)!r} with content {saved.data_key[:8]}, "
            f"now {_paths(now)!r} with content {now.data_key[:8]}"
        )
    if changed:
        raise InputError(
            f"{place} holds a run with other settings that a resumed run must keep:\n"
            + "\n".join(changed)
            + "\nrestore these settings, or give another --out"
        )


def _defaults(record: Record) -> dict[str, Any]:
    """The defaults of all settings that a resumed run must keep, by dotted name."""
    family = family_settings(str(record.config["model"]["family"]))
    model = {name: field.default for name, field in family.model_fields.items() if not field.is_required()}
    sections = {"data": DataConfig().model_dump(mode="json"), "optimizer": OptimizerConfig().model_dump(mode="json")}
    return without_places(dotted({"model": model, **sections}))


def _paths(record: Record) -> Any:
    """What names the text of a run."""
    data = record.config["data"]
    return [source["path"] for source in data.get("sources") or ()] or data["path"]


def changes_of_note(saved: Record, now: Record, step: int) -> list[str]:
    """Notes on differences that are allowed but may surprise."""
    notes = []
    pairs = {name: (saved.versions.get(name), current) for name, current in now.versions.items()}
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


@dataclass(frozen=True, eq=False)
class Layered:
    """A leaf [L, ...] that is written layer by layer.

    layer: index -> that layer.  All processes call it in the same order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layer: Callable[[int], np.ndarray]

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.size // self.shape[0] * self.dtype.itemsize


SMALL = 1 << 20
"""Bytes; leaves with smaller layers are collected and written whole, because such small chunks would be slow."""


def by_layer(leaf: PyTree) -> ocp.SaveArgs:
    """How a leaf is saved: a `Layered` leaf with a chunk of the file for each layer, unless layers are small."""
    if not isinstance(leaf, Layered) or leaf.layer_bytes < SMALL:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=leaf.layer_bytes, shard_axes=(0,))


class LayeredHandler(ocp.type_handlers.NumpyHandler):
    """Writes `Layered` leaves like numpy arrays; they are restored like any others.

    Orbax writes in its own thread, and reading a layer may involve all processes (an all-gather).  Nothing else may
    communicate meanwhile, or the processes would communicate in different orders.  So layers are read only once
    `begin` is set, when the thread that saves does nothing but wait.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._files: dict[int, Any] = {}
        self.begin = threading.Event()

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
        """Opens the file of the leaf; called only on the process that writes."""
        spec = tensorstore.Spec(tspec)
        self._files[id(value)] = await tensorstore.open(spec, create=True, open=True, context=ts_context)

    async def _background_serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> None:
        await super()._background_serialize(values, infos, args)
        files = [self._files.pop(id(value), None) for value in values]
        gathered = [np.empty(value.shape, value.dtype) if value.layer_bytes < SMALL else None for value in values]
        await asyncio.to_thread(self.begin.wait)
        failure: Exception | None = None
        for layer in range(max(value.shape[0] for value in values)):
            pieces, writing = [value.layer(layer) for value in values], []
            for file, small, piece in zip(files, gathered, pieces, strict=True):
                if small is not None:
                    small[layer] = piece
                elif file is not None:
                    writing.append(file[layer].write(piece))
            try:
                await asyncio.gather(*writing)
            except Exception as error:  # other processes continue to read layers, so this one must, too
                failure, files = error, [None] * len(files)
        if failure:
            raise failure
        rest = [file.write(small) for file, small in zip(files, gathered, strict=True) if file and small is not None]
        await asyncio.gather(*rest)


def item_handlers(layers: LayeredHandler) -> ocp.handlers.CheckpointHandlerRegistry:
    """Handlers for the items of a checkpoint: JSON, and trees of jax arrays, numpy arrays or `Layered` leaves."""
    leaves = ocp.type_handlers
    known = leaves.create_type_handler_registry(
        (Layered, layers),
        (jax.Array, leaves.ArrayHandler()),
        (np.ndarray, leaves.NumpyHandler(deepcopy_host_arrays=False)),
    )
    tree, text = ocp.PyTreeCheckpointHandler(type_handler_registry=known), ocp.JsonCheckpointHandler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for arguments, handler in (
        (ocp.args.PyTreeSave, tree),
        (ocp.args.PyTreeRestore, tree),
        (ocp.args.StandardSave, ocp.StandardCheckpointHandler()),
        (ocp.args.StandardRestore, ocp.StandardCheckpointHandler()),
        (ocp.args.JsonSave, text),
        (ocp.args.JsonRestore, text),
    ):
        registry.add(None, arguments, handler)
    return registry
