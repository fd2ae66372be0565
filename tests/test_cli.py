"""The command line: what it answers without jax, its exit statuses, and a refusal for everything that cannot work.

A refusal is status 2 and one message that names the thing and the remedy, with nothing written and nothing lost.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import pytest
import yaml

from jhpt import cli
from jhpt.cli import main
from jhpt.core.errors import Exit
from jhpt.core.families.bert import BERTConfig
from jhpt.core.load import dotted, load_config, to_yaml
from jhpt.core.manifest import MANIFEST
from jhpt.core.presets import PRESETS
from jhpt.flags import parse_overrides
from jhpt.training import run
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.loop import TrainingDiverged
from tests.conftest import text
from tests.malformed.case import TINY


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a case finds things; `{name}` in its arguments stands for these."""

    here: Path
    """The working folder, new for each case, with `tiny.yaml` and the case's files."""
    text: Path
    cache: Path
    run: Path | None = None
    """A finished run of `tiny.yaml`."""


def make_places(here: Path, shared: Path, run: Path | None = None) -> Places:
    places = Places(here=here, text=shared / "text.txt", cache=shared / "cache", run=run)
    here.mkdir()
    data = TINY["data"] | {"path": str(places.text), "cache_dir": str(places.cache)}
    (here / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": data}))
    return places


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A text, and the token caches of everything that reads it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text.txt").write_text(text(4000))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shared) -> Path:
    """A run of two steps, made by the command line; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    places = make_places(folder / "here", shared)
    jax.config.update("jax_disable_most_optimizations", True)  # two steps are sooner run than optimised
    try:
        assert main(["train", str(places.here / "tiny.yaml"), "--out", str(folder / "run")]) == 0
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return folder / "run"


def tree(*folders: Path) -> dict[Path, bytes | None]:
    """Everything that lies in these folders."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def status_of(arguments: list[str]) -> int:
    """The exit status; tyro exits by itself where a flag cannot be parsed."""
    try:
        return main(arguments)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


# --- what cannot work ------------------------------------------------------------------------------------------

TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1}, "unk_token": "[UNK]"},
    "added_tokens": [],
}
BIG_TOKENIZER = TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": {"[UNK]": 0, "the": 300}}}
LINE = b'{"text": "the mesh"}\n'


@dataclass(frozen=True, kw_only=True)
class Bad:
    """Arguments that must be refused, the words that the message must have, and files that must be there."""

    arguments: str
    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    prepare: Callable[[Places], object] = lambda places: None
    resumes: bool = False
    status: int = Exit.INPUT


def bad(arguments: str, *words: str, **others) -> Bad:
    return Bad(arguments=arguments, words=words, **others)


def with_data(name: str, content: bytes, *words: str) -> Bad:
    """Data that cannot be used."""
    return bad(f"train tiny.yaml --data.path {name}", name, *words, files={name: content})


def with_config(content: bytes, *words: str) -> Bad:
    """A YAML file that cannot be used."""
    return bad("train mine.yaml", *words, files={"mine.yaml": content})


def with_damaged_cache(damage: Callable[[Path], object], *words: str) -> Bad:
    """A token cache that was whole when it was written, by a version without manifests."""

    def prepare(places: Places) -> None:
        data = load_config(places.here / "tiny.yaml", {"data.cache_dir": str(places.here / "cache")}).data
        folder = token_cache(data, load_tokenizer(data.tokenizer)).folder
        (folder / MANIFEST).unlink()
        damage(folder)

    return bad("train tiny.yaml --data.cache_dir cache", *words, "rm -r cache", prepare=prepare)


def resumed(arguments: str, *words: str, **others) -> Bad:
    """A change that the finished run must refuse."""
    return bad(f"train --out {{run}} {arguments}", *words, "{run}", "another --out", resumes=True, **others)


def copy_run_without_record(places: Places) -> None:
    assert places.run is not None
    shutil.copytree(places.run, places.here / "run")
    (places.here / "run" / "checkpoints" / "2" / "record.json").write_text('{"config": ')


BAD = {
    # The command line itself.
    "unknown command": bad("trian", "'trian'", "did you mean train?", "doctor"),
    "unknown bench": bad("bench nope", "'nope'", "'train'"),
    "launches of a benchmark without hosts": bad("bench train --launches 2", "--launches", "bench hybrid"),
    "no launches": bad("bench hybrid --launches 0", "--launches", "at least 1"),
    "bench without a name": bad("bench", "which benchmark", "jhpt bench --help"),
    "unknown flag": bad("train tiny.yaml --frobnicate 3", "--frobnicate", "jhpt train --help"),
    "misspelt flag": bad("train tiny.yaml --train.stepz 3", "--train.stepz", "Perhaps you meant", "--train.steps"),
    "misspelt section in a flag": bad("train tiny.yaml --trian.steps 3", "--trian.steps", "--train.steps"),
    "flag without a value": bad("train tiny.yaml --train.steps", "--train.steps", "jhpt train --help"),
    "out without a value": bad("train tiny.yaml --out", "--out", "jhpt train --help"),
    "two configs": bad("train tiny.yaml bert-tiny", "bert-tiny"),
    # Values.
    "wrong type": bad("train tiny.yaml --train.steps many", "train.steps='many'", "integer"),
    "out of range": bad("train tiny.yaml --model.dropout 1.5", "model.dropout=1.5", "less than 1"),
    "zero steps": bad("train tiny.yaml --train.steps 0", "train.steps=0", "greater than or equal to 1"),
    "unknown choice": bad("train tiny.yaml --model.dtype fp16", "model.dtype='fp16'", "'bfloat16' or 'float32'"),
    "unknown family": bad("train tiny.yaml --model.family rnn", "model.family='rnn'", "bert, gpt"),
    "heads that do not divide": bad("train tiny.yaml --model.num_heads 3", "model.num_heads=3", "use 1, 2 or 4 heads"),
    "groups that do not divide": bad("train tiny.yaml --model.num_kv_heads 3", "model.num_kv_heads=3", "use 1 or 2"),
    "tensor and heads": bad(
        "train tiny.yaml --parallel.tensor 4", "model.num_heads=2", "parallel.tensor=4", "use 1 or 2"
    ),
    "tensor and d_ff": bad(
        "train tiny.yaml --parallel.tensor 2 --model.d_ff 33", "model.d_ff=33", "parallel.tensor=2", "use 1"
    ),
    "micro-batches": bad(
        "train tiny.yaml --parallel.micro_batches 3", "data.batch_size=4", "micro_batches", "multiple of 3"
    ),
    "devices and batch": bad(
        "train tiny.yaml --parallel.data null", "data.batch_size=4", "8 data-parallel", "parallel.data to 1, 2 or 4"
    ),
    "too many devices": bad(
        "train tiny.yaml --parallel.data 64 --data.batch_size 64",
        "parallel.data=64",
        "needs 64 devices",
        "there are 8",
        "JAX_NUM_CPU_DEVICES=64",
    ),
    "a schedule without stages": bad(
        "train tiny.yaml --parallel.schedule gpipe",
        "parallel.schedule=gpipe is not used",
        "parallel.pipe=1",
        "leave it",
    ),
    "a cluster without the planner": bad(
        "train tiny.yaml --parallel.cluster h100x8x1", "parallel.cluster=h100x8x1", "set parallel.auto=true"
    ),
    "a plan beside flags": bad(
        "train tiny.yaml --plan plan.json --parallel.tensor 2 --parallel.compression off",
        "--plan decides",
        "parallel.compression and parallel.tensor would not be read",
        "leave out",
    ),
    "an old name": with_config(b"parallel: {recompute: full}\n", "parallel.recompute is now called memory.recompute"),
    "sequence too long": bad(
        "train tiny.yaml --data.sequence_length 17", "data.sequence_length=17", "model.max_length=16", "shorten"
    ),
    "cudnn on a cpu": bad("train tiny.yaml --model.attention cudnn", "cudnn", "is a cpu", "model.attention=auto"),
    # Configuration files.
    "unknown preset": bad("train gpt2-124", "gpt2-124", "did you mean gpt2-124m?", "bert-large"),
    "missing file": bad("train no.yaml", "no.yaml", "neither a file nor a preset", "gpt-tiny"),
    "preset in a file": with_config(b"preset: bert-tinny\n", "'bert-tinny'", "did you mean bert-tiny?"),
    "unknown key": with_config(b"train: {stepz: 3}\n", "train.stepz: unknown key", "did you mean train.steps?"),
    "misspelt section": with_config(b"optimiser: {}\n", "optimiser: unknown key", "did you mean optimizer?"),
    "two faults": with_config(b"train: {steps: 0}\nlog: {every: x}\n", "train.steps=0", "log.every='x'"),
    "invalid yaml": with_config(b"train: [steps\n", "mine.yaml", "not valid YAML", "line 2"),
    "yaml list": with_config(b"- train\n- steps\n", "mine.yaml", "expected sections", "list"),
    "empty yaml": with_config(b"", "mine.yaml", "expected sections"),
    "yaml in another encoding": with_config("name: é\n".encode("latin-1"), "mine.yaml", "UTF-8"),
    "a folder as config": bad(
        "train folder", "folder", "YAML", prepare=lambda places: (places.here / "folder").mkdir()
    ),
    # Data.
    "missing data": bad("train tiny.yaml --data.path no.txt", "data.path=no.txt", "no text found", "existing file"),
    "missing validation data": bad(
        "train tiny.yaml --data.validation_path no.txt", "data.validation_path=no.txt", "no text found"
    ),
    "empty data": with_data("empty.txt", b"", "empty", "a file with text"),
    "data that is no utf-8": with_data("bad.txt", b"abc\xff\n", "not UTF-8 at byte 3", "iconv"),
    "bad json": with_data("bad.jsonl", LINE + b'{"text": \n', "line 2", "not valid JSON", "one object"),
    "json without the key": with_data("keys.jsonl", b'{"body": "x"}\n', "line 1", "'text'", "body", "data.text_key"),
    "json with half a character": with_data("half.jsonl", b'{"text": "\\ud800"}\n', "line 1", "surrogate", "remove"),
    "no tokens at all": bad(
        "train tiny.yaml --data.path blank.jsonl",
        "training text has 0 tokens",
        "give more text",
        files={"blank.jsonl": b"\n\n"},
    ),
    "too short a text": bad(
        "train tiny.yaml --data.path short.txt",
        "training text has",
        "too few for one sequence of 16",
        "data.sequence_length",
        files={"short.txt": b"the mesh"},
    ),
    "too short a held-out text": bad(
        "train tiny.yaml --data.validation_path short.txt", "validation text has", files={"short.txt": b"the mesh"}
    ),
    "truncated cache": with_damaged_cache(
        lambda folder: os.truncate(folder / "train-00000.bin", 9), "train-00000.bin", "9 bytes"
    ),
    "damaged index": with_damaged_cache(
        lambda folder: (folder / "index.json").write_text('{"format": 1, '), "no readable index"
    ),
    "unusable cache folder": bad(
        "train tiny.yaml --data.cache_dir file/cache", "file/cache", "data.cache_dir", files={"file": b""}
    ),
    # Tokenizers.
    "missing tokenizer": bad("train tiny.yaml --data.tokenizer no.json", "data.tokenizer=no.json", "no such file"),
    "malformed tokenizer": bad(
        "train tiny.yaml --data.tokenizer t.json",
        "data.tokenizer=t.json",
        "not a tokenizers JSON file",
        files={"t.json": b'{"model": {'},
    ),
    "tokenizer larger than the vocabulary": bad(
        "train tiny.yaml --data.tokenizer t.json --model.vocab_size 256",
        "301 ids",
        "model.vocab_size=256",
        "301 or more",
        files={"t.json": json.dumps(BIG_TOKENIZER).encode()},
    ),
    "bert without a mask": bad(
        "train tiny.yaml --data.tokenizer t.json --model.family bert",
        "no mask, start, separator token",
        "[MASK]",
        files={"t.json": json.dumps(TOKENIZER).encode()},
    ),
    # Where the run goes.
    "out is a file": bad("train tiny.yaml --out file", "file", "is a file", "a directory", files={"file": b"kept"}),
    "out below a file": bad("train tiny.yaml --out file/run", "file/run", "another --out", files={"file": b"kept"}),
    "out where nobody can write": bad("train tiny.yaml --out /proc/jhpt/run", "/proc/jhpt/run", "another --out"),
    "out is no run": bad(
        "train tiny.yaml --out other", "other", "holds no run", "empty directory", files={"other/notes.txt": b"kept"}
    ),
    "out is no run but has checkpoints": bad(
        "train tiny.yaml --out other",
        "other",
        "holds no run",
        files={"other/checkpoints/epoch-1.pt": b"kept", "other/notes.txt": b"kept"},
    ),
    "out with a broken config": bad(
        "train --out old", "old/config.yaml", "not valid YAML", files={"old/config.yaml": b"train: ["}
    ),
    # What a resumed run must keep.
    "another model": resumed("--model.num_layers 2", "model.num_layers", "the run has 1, now 2"),
    "another seed": resumed("--seed 7", "seed", "the run has 0, now 7"),
    "another optimizer": resumed("--optimizer.b2 0.99", "optimizer.b2", "the run has 0.95, now 0.99"),
    "another batch": resumed("--data.batch_size 8", "data.batch_size", "the run has 4, now 8"),
    "another text": resumed("--data.path other.txt", "text or tokenizer", "other.txt", files={"other.txt": b"x" * 999}),
    "another family": resumed("--model.family bert", "model.family", "'gpt', now 'bert'"),
    "a damaged checkpoint": bad(
        "train --out run --train.steps 4",
        "no checkpoint in run/checkpoints is whole",
        "2/record.json has ",
        "another --out",
        prepare=copy_run_without_record,
        resumes=True,
        status=Exit.DAMAGED,
    ),
    "another config": bad("train bert-tiny --out {run}", "{run}", "model.family", "'gpt', now 'bert'", resumes=True),
    # Several processes.
    "half of the process flags": bad("train tiny.yaml --num-processes 2", "--coordinator", "--process-id", "together"),
    "process beyond the last": bad(
        "train tiny.yaml --coordinator localhost:1 --process-id 2 --num-processes 2", "--process-id 2", "not below"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused(name, tmp_path, shared, request, capsys, monkeypatch):
    case = BAD[name]
    finished = request.getfixturevalue("finished") if case.resumes else None
    places = make_places(tmp_path / "here", shared, finished)
    for file, content in case.files.items():
        (places.here / file).parent.mkdir(parents=True, exist_ok=True)
        (places.here / file).write_bytes(content)
    case.prepare(places)
    monkeypatch.chdir(places.here)
    saved = [tmp_path, *([finished.parent] if finished else [])]
    before = tree(*saved)
    capsys.readouterr()

    status = status_of(shlex.split(case.arguments.format(**vars(places))))

    out, error = capsys.readouterr()
    assert status == case.status, out + error
    for word in case.words:
        assert word.format(**vars(places)) in error, error
    assert "Traceback" not in out + error
    # A cache may gain the tokens of good text, or the memory of seen files; no run folder, no change to a run.
    after = tree(*saved)
    ignored = places.here / "cache"
    assert {path: after[path] for path in after if ignored not in path.parents} == {
        path: before[path] for path in before if ignored not in path.parents
    }


# --- what works ------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_config_its_metrics_and_a_checkpoint(finished):
    assert {"config.yaml", "plan.json", "metrics.jsonl", "train.log", "checkpoints", ".lock"} == {
        path.name for path in finished.iterdir()
    }
    assert load_config(finished / "config.yaml").train.steps == 2
    assert (finished / "checkpoints" / "2").is_dir()


def test_a_run_of_before_resumes_and_says_what_is_not_used(finished, tmp_path, capsys):
    """Its configuration may have what a new run refuses."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = load_config(run / "config.yaml", {"parallel.schedule": "gpipe"})
    (run / "config.yaml").write_text(to_yaml(config))
    assert main(["train", "--out", str(run)]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "note: parallel.schedule=gpipe is not used" in out and "nothing to do" in out


def test_a_finished_run_is_left_alone(finished, capsys):
    before = tree(finished)
    assert main(["train", "--out", str(finished)]) == 0
    assert "nothing to do; raise --train.steps" in capsys.readouterr().out
    assert tree(finished) == before


def test_divergence_is_status_1(monkeypatch, capsys):
    """The loop's own tests provoke it; here it is only told."""

    def diverge(*_, **__):
        raise TrainingDiverged("10 steps in a row had a loss that is not finite")

    monkeypatch.setattr(run, "train", diverge)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "jhpt train: 10 steps in a row had a loss that is not finite\n"


def test_a_loss_that_is_not_finite_at_the_end_is_status_1(monkeypatch, tmp_path):
    result = run.RunResult(step=3, losses={1: 2.0, 3: float("nan")}, validation_losses={}, run_dir=tmp_path)
    monkeypatch.setattr(run, "train", lambda *_, **__: result)
    assert main(["train"]) == Exit.DIVERGED
    assert "finished, and diverged: step 3, loss nan" in run.closing_lines(result, load_config())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_usage_names_every_command_and_preset(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for name in (*cli.COMMANDS, *PRESETS):
        assert name in out


def test_help_has_every_setting_with_its_meaning(capsys):
    assert status_of(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for name in dotted(load_config().model_dump(mode="json")):
        assert f"--{name} " in out, name
    assert f"optimizer steps (default: {load_config().train.steps})" in out
    assert "or the word auto, short for {auto: true}" in out, "what a section has to say"


def test_doctor_reports(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "jax" in printed and "host memory" in printed


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_how_a_command_ends(error, status, monkeypatch):
    def end(arguments):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", end)
    assert main(["doctor"]) == status


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--train.steps 7", {"train.steps": 7}),
        ("--train.steps=7 --seed=3", {"train.steps": 7, "seed": 3}),
        ("--seed 0", {"seed": 0}),  # the default, but said
        ("--optimizer.clip_norm null", {"optimizer.clip_norm": None}),
        ("--log.tensorboard false", {"log.tensorboard": False}),
        ("--data.path '[a.txt, b.txt]'", {"data.path": ["a.txt", "b.txt"]}),
        ("--data.path 2024", {"data.path": "2024"}),
        (
            "--data.sources '[{path: a.txt, weight: 2}, {path: [b, c], weight: 1}]'",
            {"data.sources": [{"path": "a.txt", "weight": 2}, {"path": ["b", "c"], "weight": 1}]},
        ),
        ("--data.path '*.txt'", {"data.path": "*.txt"}),
        ("--name 7", {"name": "7"}),
        ("--evaluation.prompt 'def f():'", {"evaluation.prompt": "def f():"}),
        ("--evaluation.prompt '# yes'", {"evaluation.prompt": "# yes"}),
        ("--evaluation.prompt no", {"evaluation.prompt": "no"}),
        ("--evaluation.prompt=", {"evaluation.prompt": ""}),
    ],
)
def test_flags_are_read_as_their_settings_mean_them(flags, changes):
    _, given = parse_overrides("jhpt train", load_config(), shlex.split(flags))
    assert given == changes
    loaded = dotted(load_config(None, given).model_dump(mode="json"))
    assert {name: loaded[name] for name in changes} == changes


def test_a_flag_that_repeats_the_old_familys_value_counts():
    """gpt2-124m has 12 layers and BERT's own default is 4: asked for 12, BERT has 12."""
    base = load_config("gpt2-124m")
    flags = "--model.family bert --model.num_layers 12 --model.max_length 1024"
    _, given = parse_overrides("jhpt train", base, shlex.split(flags))
    assert load_config(base, given).model == BERTConfig(num_layers=12, max_length=1024)


def test_run_options_stand_beside_the_settings():
    flags = "--out there --coordinator host:1 --process-id 1 --num_processes 2 --seed 3"
    options, given = parse_overrides("jhpt train", load_config(), shlex.split(flags))
    assert (options.out, options.coordinator, options.process_id, options.num_processes) == ("there", "host:1", 1, 2)
    assert given == {"seed": 3}


def test_nothing_imports_jax_before_a_device_is_needed(tmp_path):
    """Importing, help, configuration and a typing mistake take no second for jax."""
    program = """
import contextlib, io, sys
import jhpt, jhpt.cli
from jhpt import Config, InputError, load_config

load_config("bert-base")
streams = io.StringIO()
with contextlib.redirect_stdout(streams), contextlib.redirect_stderr(streams):
    for arguments in ([], ["train", "--train.steps", "none"], ["train", "no-preset"], ["trian"],
                      ["tokenizer", "train", "--vocab-size", "9"]):
        jhpt.cli.main(arguments)
    with contextlib.suppress(SystemExit):
        jhpt.cli.main(["train", "--help"])
print(sorted({"jax", "jaxlib", "flax", "optax", "orbax", "grain"} & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
