"""The command line: `jhpt COMMAND ...`.

Exit status: 0 done; 1 training diverged; 2 the input cannot work (one message, nothing written); 3 a command cannot run
on this machine; 130 stopped by a signal (a training run has been saved then).
"""

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
import yaml
from pydantic import BaseModel

from jhpt.bench.registry import NAMES, PACKAGED, Benchmark, load
from jhpt.core.config import GRADIENT_SETTINGS, Config
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.load import dotted, load_config, run_config
from jhpt.core.plan import Schedule
from jhpt.core.presets import DEFAULT, PRESETS
from jhpt.core.unused import check_plan_alone

if TYPE_CHECKING:
    from jhpt.compiled.comparison import Comparison
    from jhpt.planner.search.solve import Answer

USAGE = f"""usage: jhpt COMMAND [ARGUMENTS]

  jhpt train [CONFIG|PRESET] [--out DIR] [--section.key value ...]
                        train a model, or go on with the run in DIR; without arguments: {DEFAULT}
  jhpt plan [CONFIG|PRESET|NETWORK] [--cluster NAME|FILE] [--out FILE] [--section.key value ...]
                        the fastest way to divide a step over a cluster, and why; needs no device
  jhpt profile [CONFIG|PRESET] [--out FILE] [--cluster-out FILE] [--section.key value ...]
                        measure a model's layers and this machine, for jhpt plan
  jhpt bench NAME [--quick] [--json FILE]
                        measure; NAME: {one_of(NAMES)}
  jhpt doctor           what this machine can do
  jhpt COMMAND --help   all options of a command

presets: {", ".join(PRESETS)}
networks, for plan: vgg16, resnet50, gnmt
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
        return error.status
    except BrokenPipeError:  # the reader of the output has closed it, as in `jhpt train --help | head`
        return 0
    except KeyboardInterrupt:
        print(f"jhpt {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The directory of a run and the processes that take part."""

    out: str | None = None
    """Run directory; a run that is there is continued. Default: runs/NAME-TIME."""
    plan: str | None = None
    """File of a plan (`jhpt plan --out`), which takes the place of the section parallel."""
    coordinator: str | None = None
    """HOST:PORT of process 0; needed where no launcher (SLURM, Open MPI, Kubernetes) sets it."""
    process_id: int | None = None
    """Number of this process, from 0."""
    num_processes: int | None = None
    """Number of processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The step that is planned, and the files of the plan."""

    cluster: str | None = None
    """A name such as h100x8x8 or a100x8x4-100gbe, or a JSON or YAML file. Default: this machine by `jhpt profile`."""
    profile: str | None = None
    """A file with the layers' costs (jhpt, PipeDream, Piper). Default: measured here or by the device's datasheet."""
    batch: int | None = None
    """Samples in a step. Default: data.batch_size."""
    microbatches: int | None = None
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


def train_command(arguments: list[str]) -> int:
    """`jhpt train`: the first argument, if it is no flag, names a preset or a YAML file."""
    source, words = _source(arguments), list(arguments)
    base = _with_words(_with_family(run_config(source, _value_of("--out", arguments)), arguments), arguments)
    words = [word for word in words if word not in arguments]
    options, overrides = parse_overrides("jhpt train", base, arguments)
    config = load_config(base, overrides)
    if options.plan is not None:
        check_plan_alone([*overrides, *(word.removeprefix("--").partition("=")[0] for word in words)])

    # jax takes a second to import, so it is imported only after a typing mistake would have been reported.
    from jhpt.training.loop import TrainingDiverged
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    processes = Processes(
        coordinator=options.coordinator, process_id=options.process_id, num_processes=options.num_processes
    )
    try:
        result = train(config, out=options.out, plan=options.plan, processes=processes)
    except TrainingDiverged as error:
        print(f"jhpt train: {error}", file=sys.stderr)
        return 1
    return INTERRUPTED if result.interrupted else 0


def plan_command(arguments: list[str]) -> int:
    """`jhpt plan`: the first argument, if it is no flag, names a preset, a YAML file or a network."""
    from jhpt.planner.api import network_of, prepare
    from jhpt.planner.report.answer import make_console, print_answer, timeline, to_json
    from jhpt.planner.report.timeline import svg_timeline
    from jhpt.planner.search.baselines import baselines

    source = _source(arguments)
    # A network and a profile alone have no settings.
    alone = network_of(source) is not None or (source is None and _value_of("--profile", arguments) is not None)
    base = None if alone else _with_words(_with_family(load_config(source), arguments), arguments)
    options, overrides = parse_overrides("jhpt plan", base, arguments, PlanOptions)
    for name in filter(_decided_by_planner, overrides):
        print(f"note: jhpt plan decides {name} itself, so --{name} is not used", file=sys.stderr)
    for flag, path in (("--out", options.out), ("--svg", options.svg)):
        _check_writable(flag, path)
    config = None if base is None else load_config(base, overrides)
    if options.compile:
        _check_compilable(source, config, options)
    task = prepare(
        source if config is None else config,
        cluster=options.cluster,
        profile=options.profile,
        batch=options.batch,
        micro_batches=options.microbatches,
        space=options.space,
        schedule=options.schedule,
        budget=options.budget,
    )
    answer = task.solve()
    compared = baselines(task.request, answer.model)
    compiled = _compiled(config, answer) if options.compile and config else None
    if options.out:
        answer.plan.save(options.out)
    if options.svg:
        title = f"{answer.plan.model} on {answer.plan.cluster}"
        Path(options.svg).write_text(svg_timeline(timeline(answer), title), encoding="utf-8")
    if options.json:
        print(json.dumps(to_json(answer, compared) | ({"compiled": compiled.to_json()} if compiled else {}), indent=1))
    else:
        print_answer(make_console(), answer, compared)
        if compiled:
            compiled.print(make_console())
    return 0


def _decided_by_planner(setting: str) -> bool:
    """Whether a setting is a choice of the plan, and not one that limits the planner's choices."""
    read = ("parallel.auto", "parallel.compression", "parallel.gradient_compression")
    return setting.startswith("parallel.") and not setting.startswith(read)


def _check_compilable(source: str | None, config: Config | None, options: PlanOptions) -> None:
    """Refuses --compile before any planning if there is no program to compile."""
    if config is None:
        problem = f"{source} is a table of layers" if source else "a profile alone has no program"
        raise InputError(f"--compile: {problem}; name a GPT or BERT preset or a YAML file, or leave out --compile")
    if options.space != "spmd":
        raise InputError(
            f"--compile: plans of space={options.space} are not run by one program, so there is none to compile; "
            "use --space spmd or leave out --compile"
        )


def _compiled(config: Config, answer: "Answer") -> "Comparison":
    """The plan's real step, compiled for its cluster, compared with the plan's estimate."""
    from jhpt.compiled.quiet import quiet

    with quiet():  # jax loads CUDA's libraries if they are installed
        from jhpt.compiled.comparison import compare
        from jhpt.training.compile import compiled_step

    reading = compiled_step(config, answer.plan, answer.model.cluster)
    return compare(reading, answer.plan, answer.estimate, answer.model.profile)


def profile_command(arguments: list[str]) -> int:
    """`jhpt profile`: the first argument, if it is no flag, names a preset or a YAML file."""
    base = _with_family(load_config(_source(arguments)), arguments)
    options, overrides = parse_overrides("jhpt profile", base, arguments, ProfileOptions)
    config = load_config(base, overrides)
    from jhpt.training.profiling import profile_command as measure

    return measure(config, out=options.out, cluster_out=options.cluster_out, quick=options.quick, again=options.again)


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
        name: Annotated[Benchmark, tyro.conf.Positional],
        /,
        quick: bool = False,
        json: str | None = None,
        only: str | None = None,
        out: str | None = None,
        published: str | None = None,
    ) -> int:
        """Measures, prints a table and keeps every raw sample.

        Args:
            name: which benchmark.
            quick: fewer trials with the same keys; ends within a minute.
            json: file for the samples and claims.
            only: for train, predict, memory and kernels: the parts to run, separated by commas. Default: all.
            out: for convergence and precision: folder of finished cells, which are not run again. Default: runs/NAME.
            published: for predict: CSV file of published runs, which are priced without a device instead.
        """
        of_cells = name in ("convergence", "precision")
        if out is not None and not of_cells:
            raise InputError(
                f"--out is the folder of finished cells of bench convergence and bench precision; bench {name} has "
                "none, leave it out"
            )
        if only is not None and name not in PACKAGED:
            raise InputError(f"--only is for {one_of(PACKAGED)}; leave it out of bench {name}")
        if published is not None:
            return _bench_published(name, published, json, alone=not quick and only is None)
        options: dict[str, Any] = {"folder": out} if of_cells else {}
        if only is not None:
            options["only"] = only.split(",")
        return load(name).run(quick=quick, json_path=json, **options)

    return tyro.cli(bench, prog="jhpt bench", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def _bench_published(name: Benchmark, path: str, json_path: str | None, *, alone: bool) -> int:
    """`jhpt bench predict --published`.  alone: whether no other option selects what is run."""
    if name != "predict":
        raise InputError(f"--published is for bench predict; leave it out of bench {name}")
    if not alone:
        raise InputError("--published prices every run of the file at once; leave out --quick and --only")
    from jhpt.bench.published import run_published

    return run_published(path, json_path=json_path)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "plan": plan_command,
    "profile": profile_command,
    "bench": bench_command,
    "doctor": doctor_command,
}


def parse_overrides(
    program: str, base: Config | None, arguments: list[str], kind: type = RunOptions
) -> tuple[Any, dict[str, Any]]:
    """Flags -> options of this kind, and overrides of `base` by dotted name.

    tyro names, explains and suggests the flags.  Values stay text here and are read as YAML, so that the same code
    validates a flag, a file and a dict, with the same messages.
    """
    parsed: Any = tyro.cli(
        _flags_of(base, kind),
        prog=program,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
        use_underscores=True,
    )
    flags = dotted({name: _as_dict(value) for name, value in _as_dict(parsed).items() if name != "options"})
    changed = {name: text for name, text in flags.items() if not isinstance(text, _Default)}
    return parsed.options, {name: _from_text(text, _kind_of(base, name)) for name, text in changed.items()}


class _Default(str):
    """The text of a flag that is not set: tyro returns the same object that it was given as the default."""


_MEANING = {
    RunOptions: "Trains a model. CONFIG: a YAML file or a preset, before all flags.",
    PlanOptions: "Plans a training step. CONFIG: a YAML file, a preset or a network, before all flags; of its section "
    "parallel only compression and gradient_compression are used.",
    ProfileOptions: "Measures a model's layers and this machine. CONFIG: a YAML file or a preset, before all flags.",
}


def _flags_of(base: Config | None, options_kind: type) -> type:
    """The options, and one text field per setting of `base`, default and description included."""

    def fields_of(section: BaseModel) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = []
        for name, info in type(section).model_fields.items():
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


def _source(arguments: list[str]) -> str | None:
    """Removes and returns the first argument, if it is no flag."""
    return arguments.pop(0) if arguments and not arguments[0].startswith("-") else None


def _with_family(base: Config, arguments: Sequence[str]) -> Config:
    """`base` with the model family that a flag names, whose settings are then flags."""
    family = _value_of("--model.family", arguments)
    return load_config(base, {"model.family": family}) if family else base


WORDS = {
    "parallel": ("auto",),
    "parallel.compression": ("auto", "off"),
    "parallel.gradient_compression": tuple(GRADIENT_SETTINGS),
}
"""Words that stand for a whole section."""


def _with_words(base: Config, arguments: list[str]) -> Config:
    """`base` with the sections that a flag sets to a word, such as `--parallel auto`; removes those flags."""
    for section, words in WORDS.items():
        for flag in ([f"--{section}", word] for word in words):
            for form in (flag, ["=".join(flag)]):
                for at in range(len(arguments) - len(form), -1, -1):
                    if arguments[at : at + len(form)] == form:
                        del arguments[at : at + len(form)]
                        base = load_config(base, {section: flag[1]})
    return base


def _check_writable(flag: str, path: str | None) -> None:
    """Refuses a file that could not be written once the planning is done; leaves no trace."""
    if path is None:
        return
    try:
        if Path(path).exists():
            Path(path).open("ab").close()
        else:
            tempfile.TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None


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
    """The value of a flag that is needed before the others can be parsed."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            return arguments[index + 1] if index + 1 < len(arguments) else None
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None
