"""Settings that nothing reads in some configurations: `UNUSED`.

A new run refuses them, so that nobody waits for an effect that cannot come.  A run that is continued only names them in
a note, because an earlier version, which did not refuse them, may have written its configuration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jhpt.core.config import Config
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.optimizers import OPTIMIZERS, OWN_SETTINGS, optimizer_numbers
from jhpt.core.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A setting that nothing reads in some configurations.

    unread: whether nothing reads it.  why: the reason, and what to do about it.
    """

    setting: str
    unread: Callable[[Config], bool]
    why: str


def _by_hand(config: Config) -> bool:
    return not config.parallel.auto


def _all_tokens(config: Config) -> bool:
    return not config.parallel.compression.auto and config.parallel.compression.tokens == 1


def _of_text(config: Config) -> bool:
    return config.model.reads == "text"


OF_TEXT = (
    "path",
    "sources",
    "validation_path",
    "text_key",
    "pair_key",
    "label_key",
    "tokenizer",
    "sequence_length",
    "mask_fraction",
    "whole_words",
    "cache_dir",
    "workers",
)
"""Settings of the section `data` that only models of text read."""


def _of_some_optimizers(setting: str) -> Unused:
    """The rule for a setting that only some update rules have."""
    readers = [name for name, numbers in OPTIMIZERS.items() if setting in numbers.settings]
    return Unused(
        setting=f"optimizer.{setting}",
        unread=lambda config: setting not in optimizer_numbers(config.optimizer.name).settings,
        why=f"it is for optimizer.name={one_of(readers)}; set one of these, or leave it out",
    )


UNUSED: tuple[Unused, ...] = (
    Unused(
        setting="parallel.cluster",
        unread=_by_hand,
        why="it names the cluster that parallel.auto plans for; set parallel.auto=true, or leave it out",
    ),
    Unused(
        setting="parallel.space",
        unread=_by_hand,
        why="it is where parallel.auto searches a plan; set parallel.auto=true, or leave it out",
    ),
    Unused(
        setting="parallel.trials",
        unread=_by_hand,
        why="it is how many plans parallel.auto tries; set parallel.auto=true, or leave it out",
    ),
    Unused(
        setting="parallel.sequence",
        unread=lambda config: _by_hand(config) and config.parallel.tensor == 1,
        why="it cuts activations over the tensor axis, and parallel.tensor=1; raise parallel.tensor, or leave it out",
    ),
    Unused(
        setting="parallel.compression",
        unread=lambda config: (
            _by_hand(config) and config.parallel.tensor == 1 and config.parallel.compression.settings.on
        ),
        why="it compresses all-reduces over the tensor axis, and parallel.tensor=1; raise parallel.tensor, or leave it "
        "out",
    ),
    Unused(
        setting="parallel.schedule",
        unread=lambda config: _by_hand(config) and config.parallel.pipe == 1,
        why="it orders the passes of several stages, and parallel.pipe=1; raise parallel.pipe, or leave it out",
    ),
    Unused(
        setting="memory.recompute_blocks",
        unread=lambda config: config.parallel.auto or config.memory.recompute in ("auto", "none"),
        why="it is how many blocks memory.recompute=full or names are for in a layout by hand; set these and "
        "parallel.auto=false, or leave it out: the planner chooses",
    ),
    Unused(
        setting="parallel.compression.importance",
        unread=_all_tokens,
        why="it chooses the important tokens, and parallel.compression.tokens=1 makes all of them important; lower "
        "parallel.compression.tokens, or leave it out",
    ),
    Unused(
        setting="parallel.compression.rest_bits",
        unread=_all_tokens,
        why="it is for the other tokens, and parallel.compression.tokens=1 makes all of them important; lower "
        "parallel.compression.tokens, or leave it out",
    ),
    *(
        Unused(
            setting=setting,
            unread=lambda config: _of_text(config) and (not config.model.masked or config.model.classifies),
            why="only a model that predicts masked tokens, such as BERT in pre-training, reads it; set "
            "model.family=bert with model.task=pretrain, or leave it out",
        )
        for setting in ("data.mask_fraction", "data.whole_words")
    ),
    *(
        Unused(
            setting=setting,
            unread=lambda config: _of_text(config) and not config.model.classifies,
            why="only texts with labels have it; set model.task=classify (BERT), or leave it out",
        )
        for setting in ("data.pair_key", "data.label_key")
    ),
    *(
        Unused(
            setting=setting,
            unread=lambda config: _of_text(config) and config.model.classifies,
            why="model.task=classify has a row for each text, and tokenises all of them anew; leave it out",
        )
        for setting in ("data.packing", "data.sources", "data.cache_dir", "data.workers")
    ),
    *(
        Unused(
            setting=f"data.{setting}",
            unread=lambda config: not _of_text(config),
            why="it is about text, and a model of images trains on synthetic ones (data.images, data.noise); leave it "
            "out",
        )
        for setting in OF_TEXT
    ),
    *(
        Unused(
            setting=f"data.{setting}",
            unread=_of_text,
            why="it is about synthetic images; set model.family=vgg, or leave it out",
        )
        for setting in ("images", "noise")
    ),
    Unused(
        setting="evaluation.prompt",
        unread=lambda config: not config.model.generates,
        why="only a model that generates text, such as GPT, writes a sample; set model.family=gpt, or leave it out",
    ),
    Unused(
        setting="optimizer.decay_fraction",
        unread=lambda config: config.optimizer.schedule != "wsd",
        why="it is the share of steps in which optimizer.schedule=wsd decays; set that, or leave it out",
    ),
    Unused(
        setting="optimizer.final_fraction",
        unread=lambda config: config.optimizer.schedule == "constant",
        why="it is what other schedules end with, and optimizer.schedule=constant ends as it began; set another "
        "optimizer.schedule, or leave it out",
    ),
    *(
        Unused(
            setting=f"guards.{setting}",
            unread=lambda config: config.guards.spike != "rewind",
            why="it is for guards.spike=rewind; set that, or leave it out",
        )
        for setting in ("rewind_steps", "max_rewinds")
    ),
    Unused(
        setting="guards.repair_replicas",
        unread=lambda config: config.guards.replicas_every is None,
        why="copies of the state are compared only with guards.replicas_every; set that, or leave it out",
    ),
    *map(_of_some_optimizers, OWN_SETTINGS),
)


def unused_settings(config: Config) -> list[str]:
    """What is set and not read when this configuration trains, one message each; defaults do not count, nor what the
    preset sets whose name the configuration has."""
    return [
        f"{rule.setting}={_text(value)} is not used: {rule.why}"
        for rule in UNUSED
        if rule.unread(config) and (value := _changed(config, rule.setting)) is not None
    ]


def _changed(config: Config, setting: str) -> Any:
    """The value of a setting; None where it is the default or the preset's."""
    *sections, key = setting.split(".")
    section: Any = config
    preset: Any = PRESETS.get(config.name, {})
    for name in sections:
        section, preset = getattr(section, name), preset.get(name, {})
    value, default = getattr(section, key), type(section).model_fields[key].default
    return None if value in (default, preset.get(key, default)) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    if not hasattr(value, "model_dump"):
        return str(value).lower() if isinstance(value, bool) else str(value)
    changes = value.model_dump(exclude_defaults=True)
    return "{" + ", ".join(f"{name}: {_text(each)}" for name, each in changes.items()) + "}"


def check_plan_alone(settings: Iterable[str]) -> None:
    """Refuses settings of the section `parallel` beside a plan, which takes that section's place.

    Args:
      settings: dotted names of what the user has set.

    Raises:
      InputError: with their names.
    """
    beside = sorted(name for name in settings if name == "parallel" or name.startswith("parallel."))
    if beside:
        raise InputError(
            f"--plan decides everything of the section parallel, so {' and '.join(beside)} would not be read; leave "
            "out the one or the other"
        )
