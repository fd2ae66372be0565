"""The command line: `jhpt COMMAND ...`.

Exit status: 0 done; 1 training diverged; 2 the input cannot work (one message, nothing written); 3 a benchmark cannot
run on this machine; 130 stopped by a signal (a training run has been saved then).
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import tyro
import yaml
from pydantic import BaseModel

from jhpt.core.config import Config
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.load import dotted, load_config, run_config
from jhpt.core.presets import DEFAULT, PRESETS

USAGE = f"""usage: jhpt COMMAND [ARGUMENTS]

  jhpt train [CONFIG|PRESET] [--out DIR] [--section.key value ...]
                        train a model, or go on with the run in DIR; without arguments: {DEFAULT}
  jhpt bench NAME [--quick] [--json FILE]
                        measure; NAME: train
  jhpt doctor           what this machine can do
  jhpt COMMAND --help   all options of a command

presets: {", ".join(PRESETS)}
"""


INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h", "help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(f"jhpt: unknown command {command!r}{hint}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[command](rest)
    except InputError as error:
        print(f"jhpt {command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output left, as in `jhpt train --help | head`
        return 0
    except KeyboardInterrupt:
        print(f"jhpt {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run lies and which processes take part."""

    out: str | None = None
    """Run directory; an existing run goes on. Default: runs/NAME-TIME."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where no launcher (SLURM, Open MPI, Kubernetes) says it."""
    process_id: int | None = None
    """Number of this process, from 0."""
    num_processes: int | None = None
    """How many processes there are."""


def train_command(arguments: list[str]) -> int:
    """`jhpt train`: the first argument, if it is no flag, names a preset or a YAML file."""
    source = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    base = run_config(source, _value_of("--out", arguments))
    if family := _value_of("--model.family", arguments):
        base = load_config(base, {"model.family": family})  # its settings are the flags that follow
    options, overrides = parse_overrides("jhpt train", base, arguments)
    config = load_config(base, overrides)

    # Only now the second that jax takes to import: a typing mistake is answered at once.
    from jhpt.training.loop import TrainingDiverged
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    processes = Processes(
        coordinator=options.coordinator, process_id=options.process_id, num_processes=options.num_processes
    )
    try:
        result = train(config, out=options.out, processes=processes)
    except TrainingDiverged as error:
        print(f"jhpt train: {error}", file=sys.stderr)
        return 1
    return INTERRUPTED if result.interrupted else 0


def doctor_command(arguments: list[str]) -> int:
    """`jhpt doctor`."""

    def doctor() -> None:
        """What this machine can do; every fallback is named."""

    tyro.cli(doctor, prog="jhpt doctor", args=arguments)
    from jhpt.measure.doctor import diagnose

    print(diagnose())
    return 0


def bench_command(arguments: list[str]) -> int:
    """`jhpt bench`."""

    def bench(
        name: Annotated[Literal["train"], tyro.conf.Positional], /, quick: bool = False, json: str | None = None
    ) -> int:
        """Measures, prints a table and keeps every raw sample.

        Args:
            name: which benchmark.
            quick: fewer trials, the same keys; ends within a minute.
            json: file for the samples and claims.
        """
        from jhpt.bench.train import run

        return run(quick=quick, json_path=json)

    return tyro.cli(bench, prog="jhpt bench", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "bench": bench_command,
    "doctor": doctor_command,
}


def parse_overrides(program: str, base: Config, arguments: list[str]) -> tuple[RunOptions, dict[str, Any]]:
    """Flags -> run options and overrides by dotted name.

    tyro names, explains and suggests the flags; values stay text here and are read as YAML, so that a flag, a file and
    a dict are validated by the same code and refused with the same words.
    """
    parsed: Any = tyro.cli(
        _flags_of(base), prog=program, args=arguments, config=(tyro.conf.FlagConversionOff,), use_underscores=True
    )
    given = dotted({name: _as_dict(value) for name, value in _as_dict(parsed).items() if name != "options"})
    changed = {name: text for name, text in given.items() if not isinstance(text, _Default)}
    return parsed.options, {name: _from_text(text, _kind_of(base, name)) for name, text in changed.items()}


class _Default(str):
    """The text of a flag that was not given: tyro hands its default back as the very object it got."""


def _flags_of(base: Config) -> type:
    """A dataclass with one text field per setting of `base`, default and description included."""

    def fields_of(section: BaseModel) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = []
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                kind = dataclasses.make_dataclass(name, fields_of(value), frozen=True)
                fields.append((name, kind, dataclasses.field(default_factory=kind)))
            else:
                default = _Default(_as_text(section.model_dump(mode="json")[name]))
                argument = tyro.conf.arg(help=info.description or "", metavar="VALUE")
                fields.append((name, Annotated[str, argument], dataclasses.field(default=default)))
        return fields

    options = ("options", Annotated[RunOptions, tyro.conf.arg(name="")], dataclasses.field(default_factory=RunOptions))
    kind = dataclasses.make_dataclass("Train", [options, *fields_of(base)], frozen=True)
    kind.__doc__ = "Trains a model. CONFIG: a YAML file or a preset, before all flags."
    return kind


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def _kind_of(base: Config, name: str) -> Any:
    """The annotation of a setting."""
    *sections, key = name.split(".")
    return type(functools.reduce(getattr, sections, base)).model_fields[key].annotation


def _from_text(text: str, kind: Any) -> Any:
    """A flag's text as YAML would read it; text that is no YAML stays text.

    Where text is wanted it is not interpreted, so the prompt `def f():` is no mapping and the folder `2024` no number.
    """
    try:
        value = yaml.safe_load(text) if text.strip() and kind is not str else text
    except yaml.YAMLError:
        return text
    return value if str not in get_args(kind) or isinstance(value, str | list | None) else text


def _as_dict(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: _as_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The value of a flag that has to be known before the others can be parsed."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            return arguments[index + 1] if index + 1 < len(arguments) else None
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None
