"""What a checkpoint says of the run that wrote it, and whether a run with other settings may go on from it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax.numpy as jnp

from jhpt.core.config import Config, DataConfig, OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.families.family import family_settings
from jhpt.core.load import dotted
from jhpt.training.data.left_out import LeftOut
from jhpt.training.optimizer import learning_rate

BOUND = ("seed", "model.", "optimizer.", "data.")
PLACES = ("data.path", "data.validation_path", "data.tokenizer", "data.cache_dir", "data.workers")
"""Paths of files and how they are read, which may differ between hosts and change over time."""

SOURCES = "data.sources"
"""A list of paths with weights."""

FREE = ("model.attention", "model.dtype", "model.nominal_vocab")
"""With `PLACES`, the exceptions from `BOUND`, the settings that a resumed run may not change.  Text and tokenizer are
compared by content, the compute dtype and the vocabulary's size after "auto" is resolved."""

SCHEDULE = tuple(
    f"optimizer.{name}" for name in ("learning_rate", "schedule", "warmup_steps", "final_fraction", "decay_fraction")
)
"""The settings that decide the learning rate of a step and nothing else: they may change where that is asked for."""

SECTIONS = ("model", "data", "optimizer", "train")
"""Parts of a configuration without which a run cannot be compared with another."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name without paths of files; of the sources their weights are left."""
    weights = [source["weight"] for source in settings.get(SOURCES) or ()]
    kept = {name: value for name, value in settings.items() if name not in (*PLACES, SOURCES)}
    return kept | {f"{SOURCES}.weight": weights}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of its run in a checkpoint.

    weights_only: whether there is no optimizer state to go on with.
    digests: those of the arrays by their paths (`training.digests`); None: the checkpoint is older than manifests.
    left_out: data that the run leaves out, because the loss jumped on it.  rewinds: how often it has gone back.
    """

    config: Mapping[str, Any]
    data_key: str
    dtype: str
    versions: Mapping[str, str]
    weights_only: bool = False
    digests: Mapping[str, str] | None = None
    left_out: LeftOut = ()
    rewinds: int = 0

    def __post_init__(self) -> None:
        """Raises TypeError for what cannot be the description of a run, whose sections are read later."""
        sections = [self.config.get(name) for name in SECTIONS] if isinstance(self.config, Mapping) else [None]
        if not all(isinstance(each, Mapping) for each in (*sections, self.versions)) or not isinstance(
            self.data_key, str
        ):
            raise TypeError(f"it has no {', '.join(SECTIONS)} and versions")


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


def check_resumable(saved: Record, now: Record, place: str, *, new_schedule: bool = False) -> None:
    """Refuses to resume with another model, text, optimizer or seed.

    Args:
      new_schedule: whether the learning rate and its schedule may be others.

    Raises:
      InputError: lists every difference with both values.
    """
    before, after = without_places(dotted(saved.config)), without_places(dotted(now.config))
    before = _defaults(saved) | before  # settings that are newer than the checkpoint had their defaults
    before["compute dtype"], after["compute dtype"] = saved.dtype, now.dtype
    names = [name for name in {**before, **after} if name.startswith(BOUND) and name not in FREE]
    differ = [name for name in (*names, "compute dtype") if before.get(name) != after.get(name)]
    kept = [name for name in differ if not (new_schedule and name in SCHEDULE)]
    changed = [f"  {name}: the run has {before.get(name)!r}, now {after.get(name)!r}" for name in kept]
    if saved.data_key != now.data_key and not changed:
        changed.append(
            f"  text or tokenizer: the run has {_paths(saved)!r} with content {saved.data_key[:8]}, "
            f"now {_paths(now)!r} with content {now.data_key[:8]}"
        )
    if changed:
        only_schedule = kept and set(kept) <= set(SCHEDULE)
        raise InputError(
            f"{place} holds a run with other settings that a resumed run must keep:\n"
            + "\n".join(changed)
            + "\nrestore these settings, or give another --out"
            + (
                "; to change the learning rate, also say from which checkpoint: --resume-step N"
                if only_schedule
                else ""
            )
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
    before, optimizer = schedule_of(saved), schedule_of(now)
    changes = [
        f"{name}={optimizer[name]} instead of {before[name]}" for name in SCHEDULE if optimizer[name] != before[name]
    ]
    if changes or (steps != more and now.config["optimizer"]["schedule"] != "constant"):
        settings = [
            OptimizerConfig(
                **now.config["optimizer"] | {name.removeprefix("optimizer."): rule[name] for name in SCHEDULE}
            )
            for rule in (before, optimizer)
        ]
        old, new = (
            float(learning_rate(rule, total, jnp.asarray(step)))
            for rule, total in zip(settings, (steps, more), strict=True)
        )
        spans = [f"the learning-rate schedule now spans {more} steps instead of {steps}"] if steps != more else []
        notes.append(
            f"note: {', '.join([*changes, *spans])}: a learning rate of {new:.2e} at step {step}, where it would have "
            f"been {old:.2e}"
        )
    return notes


def schedule_of(record: Record) -> dict[str, Any]:
    """The settings of its learning rate, by dotted name."""
    settings = _defaults(record) | dotted(record.config)
    return {name: settings[name] for name in SCHEDULE}
