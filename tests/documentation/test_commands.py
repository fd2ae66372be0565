"""Every documented command is run with small sizes or by `.ci/run`, or parsed if it needs what is not here."""

import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from benchmarks.gpu import prepare as gpu_prepare
from benchmarks.gpu import run as gpu_run
from benchmarks.gpu.stages import STAGES
from jhpt import cli, cli_launch
from jhpt import flags as command_flags
from jhpt.bench import registry
from jhpt.core.load import load_config
from jhpt.planner import api
from jhpt.training import profiling, run
from tests.documentation.commands import CI, PARSED, RUN, SLOW, STEPS, WORDS, flags
from tests.documentation.extraction import (
    ROOT,
    Command,
    Piece,
    all_commands,
    block_commands,
    blocks,
    inline,
    pages,
    single_commands,
    without_environment,
)
from tests.test_cli import status_of

WHAT_TO_DO = (
    "no test runs `{0.text}` ({0.place}): put it into RUN of tests/documentation/commands.py with flags that make it "
    "small; into SLOW if it is slow even so; into PARSED if it needs what is not here; into CI if .ci/run runs it"
)

PLACEHOLDERS = {"NAME": tuple(registry.NAMES), "STAGE": tuple(STAGES)}
"""Words of documented commands that stand for each of these."""


def test_every_command_is_run_or_parsed_once():
    tables = (RUN, SLOW, PARSED, CI)
    for command in all_commands():
        count = sum(command.text in table for table in tables)
        assert count, WHAT_TO_DO.format(command)
        assert count == 1, f"`{command.text}` is in several tables of tests/documentation/commands.py"
    documented = {command.text for command in all_commands()}
    stale = [name for table in tables for name in table if name not in documented]
    assert not stale, f"the documentation no longer has {stale}: take them out of tests/documentation/commands.py"


def test_commands_stand_in_blocks_of_the_shell():
    """Indented lines and blocks of no language are drawings and formulas: a command there would not be run."""
    programs = re.compile(r"^ {4,}(\.venv/bin/)?(jhpt|python3?|pip|pytest|ruff|mypy|\.ci/run)\b", re.MULTILINE)
    for page, content in pages().items():
        assert not programs.search(content), f"{page}: put the indented commands between ```bash and ```"
    for block in blocks():
        assert block.language in ("bash", "yaml", "python", ""), f"{block.place}: no test reads {block.language}"
        assert block.language or not re.search(r"^\s*(jhpt|pip|pytest) ", block.text, re.MULTILINE), block.place


# --- what runs -------------------------------------------------------------------------------------------------


def run_command(command: Command, more: str) -> None:
    """Runs a command of jhpt in this process, with more flags behind it."""
    words = shlex.split(without_environment(command.text))
    for variable in shlex.split(command.text.removesuffix(without_environment(command.text))):
        name, _, value = variable.partition("=")
        assert os.environ[name] == value, f"tests/conftest.py does not set {variable}"
    if words[0] == "python":  # a script finds its modules beside itself
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, check=True)
        return
    assert words[0] == "jhpt", f"{command.place}: `{command.text}` is no command of jhpt"
    status = status_of([*words[1:], *shlex.split(more)])
    assert status == 0, f"{command.place}: `{command.text} {more}` ended with {status}"


SHELL = [block for block in blocks() if block.language == "bash"]


def ids(pieces: list[Piece]) -> list[str]:
    return [piece.place for piece in pieces]


@pytest.mark.parametrize("block", SHELL, ids=ids(SHELL))
def test_the_commands_of_a_block_run_one_after_the_other(block, workplace):
    before = {command.text for other in SHELL[: SHELL.index(block)] for command in block_commands(other)}
    for command in block_commands(block):
        if command.text in RUN and command.text not in before:
            run_command(command, RUN[command.text])


IN_BLOCKS = {command.text for block in SHELL for command in block_commands(block)}
SINGLE = {command.text: command for command in single_commands() if command.text not in IN_BLOCKS}


@pytest.mark.parametrize("command", [c for name, c in SINGLE.items() if name in RUN and name.startswith("jhpt ")])
def test_a_command_in_a_sentence_runs(command, workplace):
    run_command(command, RUN[command.text])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ())
        for name in SINGLE
        if name.startswith("python examples/")
    ],
)
def test_an_example_runs(name, workplace, small, capsys):
    runpy.run_path(str(ROOT / name.removeprefix("python ")), run_name="__main__")
    assert capsys.readouterr().out


# --- what is slow ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in SLOW if without_environment(name).startswith("jhpt train")])
def test_a_slow_run_ends(name, workplace):
    run_command(Command(place="SLOW", text=name), SLOW[name])


@pytest.mark.exhaustive
def test_the_documented_configuration_runs_on_its_devices(workplace):
    run_command(Command(place="README.md", text="jhpt train my.yaml --out runs/mine"), flags(STEPS | WORDS))


@pytest.mark.exhaustive
def test_measured_layers_and_links_make_a_plan(workplace, capsys):
    for name in SLOW:
        if name.startswith("jhpt profile"):
            run_command(Command(place="SLOW", text=name), SLOW[name])
    run_command(Command(place="README.md", text="jhpt plan gpt2-124m"), RUN["jhpt plan gpt2-124m"])
    assert "measured" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", registry.NAMES)
def test_a_benchmark_runs(name, tmp_path):
    command = [sys.executable, "-m", "jhpt", "bench", name, "--quick", "--json", "file.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr)  # the machine lacks a GPU, or network namespaces
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "file.json").stat().st_size


# --- what is parsed --------------------------------------------------------------------------------------------


class Parsed(BaseException):
    """Raised where a command would begin its work."""


@pytest.fixture
def before_the_work(workplace, monkeypatch) -> None:
    """Commands read all their arguments and files, and end where the work begins."""

    def stop(*_, **__):
        raise Parsed

    def stop_after(function: Callable) -> Callable:
        def stopped(*arguments, **options):
            function(*arguments, **options)
            raise Parsed

        return stopped

    monkeypatch.setattr(cli_launch, "launched", stop)

    def load(name):
        signature = inspect.signature(registry.load(name).run)
        return SimpleNamespace(run=stop_after(signature.bind))

    monkeypatch.setattr(run, "train", stop_after(read_settings))
    monkeypatch.setattr(profiling, "profile_command", stop)
    monkeypatch.setattr(api, "prepare", stop_after(api.prepare))
    monkeypatch.setattr(cli, "load", load)
    monkeypatch.setattr(gpu_run, "run_stage", stop)
    monkeypatch.setattr(gpu_prepare, "prepare", stop)


@pytest.mark.parametrize("name", [*SLOW, *PARSED])
def test_what_is_not_run_is_parsed(name, before_the_work):
    for command in spelled_out(without_environment(name)):
        parse(shlex.split(command))


def read_settings(source=None, *, overrides=None, **_) -> None:
    load_config(source, overrides)


def spelled_out(command: str) -> list[str]:
    """A command with its options, once for every value of a placeholder."""
    commands = [command.replace("[", "").replace("]", "") if command.startswith("jhpt bench") else command]
    for word, values in PLACEHOLDERS.items():
        commands = [re.sub(rf"\b{word}\b", value, text) for text in commands for value in values]
    return list(dict.fromkeys(commands))


def parse(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    match words:
        case ["jhpt", *arguments]:
            with pytest.raises(Parsed):
                status_of(arguments)
        case ["python", script]:
            with pytest.raises(Parsed):
                runpy.run_path(str(ROOT / script), run_name="__main__")
        case ["python3" | "python3.12", "-m", module, *arguments]:
            main = importlib.import_module(module).main
            with pytest.raises(Parsed):
                main([*arguments, "--dry"] if "run" in module else arguments)  # no wheels are installed
        case ["pytest", "-m", marker, *paths]:
            assert marker in {text.partition(":")[0] for text in project["tool"]["pytest"]["ini_options"]["markers"]}
            assert all((ROOT / path).exists() for path in paths)
        case ["pip", "install", "-e", extras]:
            assert re.fullmatch(r"\.\[(.+)\]", extras)[1] in project["project"]["optional-dependencies"]
        case ["pip", "list", "--format=freeze"]:
            pass  # pip's own
        case _:
            pytest.fail(f"{words}: say in parse() how these arguments are parsed")


def test_flags_in_sentences_are_flags_of_a_command(capsys):
    for command in cli.COMMANDS:
        assert status_of([command, "--help"]) == 0
    for main in (gpu_run.main, gpu_prepare.main):
        with pytest.raises(SystemExit):
            main(["--help"])
    known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out)) | {f"--{section}" for section in command_flags.WORDS}
    known |= {flag.replace("_", "-") for flag in known}
    for piece in inline():
        if piece.text.startswith("--"):
            for flag in re.findall(r"(?:^|\s)(--[\w.-]+)", piece.text):
                assert flag in known, f"{piece.place}: no command has {flag}"


# --- what .ci/run runs -----------------------------------------------------------------------------------------


def test_ci_runs_what_it_is_said_to():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    lines = [line.strip() for line in script.splitlines()]
    for command, line in CI.items():
        present = line in lines if " " not in line else any(line in text for text in lines)
        assert present, f".ci/run has no line {line!r}, which would run `{command}`"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in CI:
        if named := re.search(r"\.\[(.+)\]", command):
            assert named[1] in extras, command
