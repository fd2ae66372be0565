"""Files, presets, dicts and overrides -> one validated `Config`, or one message that says what to change."""

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from jhpt.core.config import Config
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.families.family import ModelConfig, families, family_settings
from jhpt.core.families.text import TextConfig
from jhpt.core.presets import DEFAULT, PRESETS
from jhpt.core.renamed import new_name, with_settings_of_today
from jhpt.core.text_files import read_text, tree_of

Source = Config | Mapping[str, Any] | str | Path | None

CONFIG_FILE = "config.yaml"
"""The file of a run directory that holds its complete configuration."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a configuration takes over from the weights that its run starts with (`jhpt train --init`).

    path: of the weights.  model: settings of the model that has them.  tokenizer: `data.tokenizer` of their text, None
    if it is not known.
    """

    path: Path
    model: TextConfig
    tokenizer: str | None

    def default(self) -> dict[str, Any]:
        """The complete nested dict that takes the place of `gpt-tiny`: weights that are learned already ask for a low
        learning rate (Devlin et al. 2018, appendix A.3: 2e-5 to 5e-5)."""
        name = re.sub(r"[^\w.-]", "-", self.path.resolve().name) or DEFAULT
        length = min(self.model.max_length, 512)
        changes = {"data": {"sequence_length": length}, "optimizer": {"learning_rate": 2e-5}}
        tree = Config().model_dump() | {"name": name, "model": self.model.model_dump()}
        return self.adopted(_merge(tree, changes))

    def adopted(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The dict with the tokenizer of the weights, if there is one, and with their vocabulary where it has none."""
        changes: dict[str, Any] = {"data": {"tokenizer": self.tokenizer}} if self.tokenizer is not None else {}
        if tree["model"].get("vocab_size") == "auto":
            changes["model"] = {"vocab_size": self.model.vocab}
        return _merge(tree, changes)

    def check(self, config: Config) -> None:
        """Refuses another model than that of the weights.

        Raises:
          InputError: with the settings that differ.
        """
        free = {
            "task",
            "objective",
            "num_classes",
            "class_names",
        }  # of a head, which begins fresh where it is another one
        free |= {"dropout", "dtype", "matmul_dtype", "logits_dtype", "attention", "nominal_vocab"}
        if not self.model.position_table:
            free.add("max_length")
        # Sizes that follow from others may be written out.
        ours, theirs = (
            {**model.model_dump(), **_vocabulary(model), **model.tensor_sizes} for model in (config.model, self.model)
        )
        different = [
            f"  model.{name}: the weights have {theirs.get(name)!r}, the configuration {ours.get(name)!r}"
            for name in {**theirs, **ours}
            if name not in free and ours.get(name) != theirs.get(name)
        ]
        if different:
            lines = "\n".join(different)
            raise InputError(
                f"--init {self.path} holds another model than the configuration:\n{lines}\nleave these settings out: "
                "the model is that of the weights"
            )


def load_config(
    source: Source = None, overrides: Mapping[str, Any] | None = None, weights: Weights | None = None
) -> Config:
    """The configuration that `source` names, with `overrides` on top.

    Args:
      source: a preset's name, the path of a YAML file, a (nested) dict, a `Config`, or None for `gpt-tiny`.  A file or
        dict lists only what differs from a preset: its own key `preset`, or `gpt-tiny`.
      overrides: values by dotted name, `{"train.steps": 20}`.
      weights: those that the run starts with, whose model and tokenizer take the place of the defaults.

    Raises:
      InputError: unknown preset, key or file, wrong type, impossible value; one line for each fault.
    """
    changes: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        changes = _merge(changes, _nested(name, value))
    return validate(_merge(_tree(source, weights), changes))


def with_nominal_vocabulary(config: Config) -> Config:
    """The configuration with as many token ids as its model is made for, whatever its tokenizer has: what benchmarks
    time."""
    return load_config(config, {f"model.{name}": ids for name, ids in _vocabulary(config.model).items()})


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """`vocab_size` as a number, of a model that has it."""
    return {"vocab_size": model.vocab} if isinstance(model, TextConfig) else {}


def run_config(source: Source, out: str | os.PathLike[str] | None, weights: Weights | None = None) -> Config:
    """The configuration of a run in directory `out`; without a source, that of the run that lies there."""
    if source is None and out is not None and resumes(out):
        source = Path(out) / CONFIG_FILE
    return load_config(source, weights=weights)


def resumes(out: str | os.PathLike[str] | None) -> bool:
    """Whether a run lies in directory `out`, which training would then continue."""
    return out is not None and (Path(out) / CONFIG_FILE).is_file()


def validate(tree: Mapping[str, Any]) -> Config:
    """A `Config` from a complete nested dict; InputError names every fault."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, tree) for fault in error.errors(include_url=False)]
        raise InputError("\n".join(faults)) from None


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML that `load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by dotted name."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def _tree(source: Source, weights: Weights | None) -> dict[str, Any]:
    match source:
        case None:
            return _base(None, weights)
        case Config():
            return source.model_dump()
        case Mapping():
            source = with_settings_of_today(source)
            name = source.pop("preset", None)
            return _merge(_base(name if name is None else str(name), weights), source)
        case _ if str(source) in PRESETS:
            return _base(str(source), weights)
        case _:
            return _tree(_read_yaml(Path(source)), weights)


def _base(name: str | None, weights: Weights | None) -> dict[str, Any]:
    """The complete nested dict that changes start from: a preset, or the defaults."""
    if weights is None:
        return preset(DEFAULT if name is None else name)
    return weights.default() if name is None else weights.adopted(preset(name))


def preset(name: str) -> dict[str, Any]:
    """The complete nested dict of a preset."""
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; presets: {', '.join(PRESETS)}")
    changes = copy.deepcopy(PRESETS[name])
    model = family_settings(changes["model"]["family"])(**changes["model"])
    return _merge(Config(model=model).model_dump(), {"name": name, **changes})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = tree_of(read_text(path))
    except FileNotFoundError:
        hint = did_you_mean(str(path), PRESETS)
        raise InputError(
            f"{path}: neither a file nor a preset{hint}; give the path of a YAML file or one of {', '.join(PRESETS)}"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: cannot be read as a config: {str(error).removeprefix(f'{path}: ')}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected sections such as 'model:' and 'train:', found {type(tree).__name__}")
    return tree


def _nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`.  A model of another family starts from that family's defaults, not from the preset's."""
    merged = dict(base)
    for key, value in changes.items():
        if not (isinstance(value, Mapping) and isinstance(merged.get(key), dict)):
            merged[key] = value
        elif key == "model" and _other_family(merged[key], value):
            merged[key] = dict(value)
        else:
            merged[key] = _merge(merged[key], value)
    return merged


def _other_family(base: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether both name a model family, and not the same one."""
    return "family" in base and "family" in changes and base["family"] != changes["family"]


def _explain(fault: Any, tree: Mapping[str, Any]) -> str:
    """One line for one pydantic error: the dotted name, what is wrong, what to do."""
    # Where a setting may be of several types, its place ends with the type that was tried: str, literal['auto'].
    name = ".".join(str(part) for part in fault["loc"] if part != "str" and re.fullmatch(r"\w+", str(part)))
    if fault["type"] == "extra_forbidden":
        if (now := new_name(name)) is not None:
            return f"{name} is now called {now}; write {now} instead"
        return f"{name}: unknown key{_suggest(name, list(_names(tree)))}"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] == "unknown_family":
        return f"model.family={fault['input'].get('family')!r}: {fault['msg']}"
    message = fault["msg"].removeprefix("Input ")
    return f"{name}={fault['input']!r}: {message}"


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    """All sections and dotted names that a config with this tree's model family may have."""
    model = tree.get("model")
    default = type(Config.model_fields["model"].default)
    settings = families().get(str(model.get("family")), default) if isinstance(model, Mapping) else default
    for section, field in Config.model_fields.items():
        yield section
        section_type = settings if section == "model" else field.annotation
        if isinstance(section_type, type) and issubclass(section_type, BaseModel):
            yield from (f"{section}.{key}" for key in section_type.model_fields)


def _suggest(name: str, names: list[str]) -> str:
    section, _, key = name.rpartition(".")
    elsewhere = [choice for choice in names if choice.rpartition(".")[2] == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    siblings = [choice for choice in names if choice.rpartition(".")[0] == section]
    others = [choice for choice in names if choice != section]
    return did_you_mean(name, siblings) or did_you_mean(name, others) or f"; known here: {', '.join(siblings)}"
