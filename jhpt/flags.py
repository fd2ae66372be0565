"""The flags of commands: options of their own, and one for each setting of a configuration."""

import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal, get_args

import tyro
import yaml
from pydantic import BaseModel

from jhpt.core.config import GRADIENT_SETTINGS, Config
from jhpt.core.errors import InputError
from jhpt.core.load import dotted, load_config
from jhpt.core.plan import Schedule
from jhpt.core.text_files import value_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The directory of a run and the processes that take part."""

    out: str | None = None
    """Run directory; a run that is there is continued. Default: runs/NAME-TIME."""
    plan: str | None = None
    """File of a plan (`jhpt plan --out`), which takes the place of the section parallel."""
    init: str | None = None
    """Run or folder in Hugging Face's layout, whose weights a new run starts with; its model is theirs."""
    resume_step: int | None = None
    """Go on from this checkpoint of the run; later ones are left behind, under another name. The learning rate and its
    schedule may then be others. Default: the newest."""
    coordinator: str | None = None
    """HOST:PORT of process 0; needed where no launcher (SLURM, Open MPI, Kubernetes) sets it."""
    process_id: int | None = None
    """Number of this process, from 0."""
    num_processes: int | None = None
    """Number of processes."""
    wait: str | None = None
    """Seconds to wait until all processes are there; sets peers.wait_seconds. Default: 300."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The step that is planned, and the files of the plan."""

    cluster: str | None = None
    """A name such as h100x8x8 or a100x8x4-100gbe, or a JSON or YAML file. Default: this machine by `jhpt profile`."""
    clusters: str | None = None
    """Clusters to compare, separated by commas: one table, the cheapest first with --price, else the fastest."""
    list_clusters: bool = False
    """List the devices and networks that clusters are named by, and plan nothing; --json adds every figure's source."""
    tokens: str | None = None
    """Tokens to train on, such as 260B: adds days, GPU-hours and, with --price, the cost."""
    price: str | None = None
    """Price of a GPU for an hour, such as 2.5, or h100=2.5,a100=1.3."""
    profile: str | None = None
    """A file with the layers' costs (jhpt, PipeDream, Piper). Default: measured here or by the device's datasheet."""
    batch: int | None = None
    """Samples in a step. Default: data.batch_size."""
    micro_batches: int | None = None
    """Micro-batches (gradient accumulation steps). Default: the planner decides."""
    space: Literal["spmd", "general"] = "spmd"
    """spmd: one program, all stages of the same size; general: stages of any size, on mixed clusters too."""
    schedule: Schedule | None = None
    """Pipeline schedule. Default: the planner decides."""
    budget: str | None = None
    """Memory of each device that may be used, such as 24GiB, 80GB or 16e9. Default: all."""
    out: str | None = None
    """File for the plan, as JSON."""
    json: bool = False
    """Print everything as JSON, and nothing else."""
    svg: str | None = None
    """File for the timeline of the step, as SVG."""
    compile: bool = False
    """Compile the real step for the cluster, which need not be attached, and compare it with the plan's estimate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The extent of the measurement, and the files of its results."""

    out: str | None = None
    """File for the profile. Default: the cache."""
    cluster_out: str | None = None
    """File for the machine's rates. Default: the cache."""
    quick: bool = False
    """Fewer sizes and rounds."""
    again: bool = False
    """Measure again what was measured before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What is evaluated beside, or instead of, the text of data.path."""

    documents: str | None = None
    """.jsonl file of texts, or of contexts with their continuations, whose log-likelihoods are computed instead."""
    out: str | None = None
    """With --documents: file for the log-likelihoods, as lines of JSON."""
    batch: int | None = None
    """With --documents: texts that are read at once. Default: 8."""
    plan: str | None = None
    """With --documents: file of a plan, over whose devices the parameters are cut. Default: all on one device."""
    json: bool = False
    """Print the figures as JSON."""


def parse_overrides(
    program: str, base: Config | None, arguments: list[str], kind: type = RunOptions
) -> tuple[Any, dict[str, Any]]:
    """Flags -> options of this kind, and overrides of `base` by dotted name.

    tyro names, explains and suggests the flags.  Values stay text here and are read as YAML, so that the same code
    validates a flag, a file and a dict, with the same messages.
    """
    for flag in (word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")):
        if flag in RENAMED:
            raise InputError(f"--{flag} is now called --{RENAMED[flag]}; write --{RENAMED[flag]} instead")
    parsed: Any = tyro.cli(
        _flags_of(base, kind, _sections_named(base, kind, arguments)),
        prog=program,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
        use_underscores=True,
    )
    flags = dotted({name: _as_dict(value) for name, value in _as_dict(parsed).items() if name != "options"})
    changed = {name: text for name, text in flags.items() if not isinstance(text, _Default)}
    return parsed.options, {name: _from_text(text, _kind_of(base, name)) for name, text in changed.items()}


RENAMED = {"microbatches": "micro-batches"}
"""Flags of earlier versions, and what they are called now."""


class _Default(str):
    """The text of a flag that is not set: tyro returns the same object that it was given as the default."""


_MEANING = {
    RunOptions: "Trains a model. CONFIG: a YAML file or a preset, before all flags.",
    PlanOptions: "Plans a training step. CONFIG: a YAML file, a preset or a network, before all flags; of its section "
    "parallel only compression and gradient_compression are used.",
    EvaluateOptions: "Evaluates a trained run, which stays as it is. RUN: its directory, before all flags. It is "
    "evaluated on all text of data.path, or on the text that it held out; devices as parallel says, by default "
    "data-parallel.",
    ProfileOptions: "Measures a model's layers and this machine. CONFIG: a YAML file or a preset, before all flags.",
}


def _sections_named(base: Config | None, kind: type, arguments: Sequence[str]) -> frozenset[str]:
    """The sections that flags set: a parser of these alone is built in less time.  All of them where a flag is not
    known, for then the help or the nearest names are printed."""
    if base is None:
        return frozenset()
    settings = dotted(base.model_dump())
    options = {field.name for field in dataclasses.fields(kind)}
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:1] == "-"}
    known = names <= options | settings.keys()
    return frozenset(name.partition(".")[0] for name in (names - options if known else settings))


def _flags_of(base: Config | None, options_kind: type, sections: Container[str]) -> type:
    """The options, and one text field per setting of these sections of `base`, default and description included."""

    def fields_of(section: BaseModel) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = []
        for name, info in type(section).model_fields.items():
            if section is base and name not in sections:
                continue
            value = getattr(section, name)
            # Without a help text tyro looks for one in the source of the class, which these have not.
            text = info.description or ""
            if isinstance(value, BaseModel):
                kind = dataclasses.make_dataclass(name, fields_of(value), frozen=True)
                argument = tyro.conf.arg(help=text)
                fields.append((name, Annotated[kind, argument], dataclasses.field(default_factory=kind)))
            else:
                default = _Default(_as_text(section.model_dump(mode="json")[name]))
                argument = tyro.conf.arg(help=text, metavar="VALUE")
                fields.append((name, Annotated[str, argument], dataclasses.field(default=default)))
        return fields

    argument = Annotated[options_kind, tyro.conf.arg(name="")]  # type: ignore[valid-type]
    options = ("options", argument, dataclasses.field(default_factory=options_kind))
    kind = dataclasses.make_dataclass("Flags", [options, *(fields_of(base) if base else [])], frozen=True)
    kind.__doc__ = _MEANING[options_kind]
    return kind


def source_of(arguments: list[str]) -> str | None:
    """Removes and returns the first argument, if it is no flag."""
    return arguments.pop(0) if arguments and not arguments[0].startswith("-") else None


def with_family(base: Config, arguments: Sequence[str]) -> Config:
    """`base` with the model family that a flag names, whose settings are then flags."""
    family = value_of("--model.family", arguments)
    return load_config(base, {"model.family": family}) if family else base


WORDS = {
    "parallel": ("auto",),
    "parallel.compression": ("auto", "off"),
    "parallel.gradient_compression": tuple(GRADIENT_SETTINGS),
}
"""Words that stand for a whole section."""


def with_words(base: Config, arguments: list[str]) -> Config:
    """`base` with the sections that a flag sets to a word, such as `--parallel auto`; removes those flags."""
    for section, words in WORDS.items():
        for flag in ([f"--{section}", word] for word in words):
            for form in (flag, ["=".join(flag)]):
                for at in range(len(arguments) - len(form), -1, -1):
                    if arguments[at : at + len(form)] == form:
                        del arguments[at : at + len(form)]
                        base = load_config(base, {section: flag[1]})
    return base


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def _kind_of(base: Config | None, name: str) -> Any:
    """The annotation of a setting."""
    assert base is not None, f"{name} is a setting of no configuration"
    *sections, key = name.split(".")
    return type(functools.reduce(getattr, sections, base)).model_fields[key].annotation


def _from_text(text: str, kind: Any) -> Any:
    """A flag's text as YAML would read it; text that is not YAML stays text.

    The text of a setting that is text is not interpreted, so that the prompt `def f():` does not become a mapping and
    the folder `2024` does not become a number.
    """
    value = value_in(text) if text.strip() and kind is not str else text
    return value if str not in get_args(kind) or isinstance(value, str | list | None) else text


def _as_dict(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: _as_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The value of a flag that is needed before the others can be parsed."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            return arguments[index + 1] if index + 1 < len(arguments) else None
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """The arguments without a flag and its value."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            rest.append(word)
    return rest
