"""Input that a generator has spoiled: a documented exit status, one message, no traceback, nothing written.

Each case is a valid file or list of flags and one mutation of it, by a seed.  Harmless mutations exist, so status 0 is
possible.
"""

import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from jhpt import cli
from jhpt.core.catalogue import cluster_named
from jhpt.core.errors import Exit
from jhpt.core.load import load_config, to_yaml
from jhpt.training.metrics import METRICS_FILE, read_metrics
from tests.conftest import text
from tests.covers import quick_and_exhaustive
from tests.test_cli import TINY, status_of, tree

CASES = 620
SECONDS, BYTES = 20, 2 << 30
"""Limits of a case."""

ENORMOUS = [10**12, -(10**12), 2**63, 10**40, 1e400, float("nan"), -1, 0, 1e-300, 0.5]
VALUES = [
    *ENORMOUS,
    None,
    True,
    "",
    "text",
    "\x00",
    "\ud800",
    [],
    {},
    [[]],
    {"a": {}},
    "1TB",
    "9" * 400,
    "h100x8x99999999999999",
]


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Spoils the bytes of a file."""
    kind = rng.choice(["flip", "cut", "insert", "double", "empty", "encoding", "deep", "long", "zeros", "shuffle"])
    place = rng.randrange(len(content))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    if kind == "insert":
        return (
            content[:place]
            + rng.choice([b"\xff\xfe", b"\0", b"{", b"]", b"\t", b": :", b"&a [*a]", b"!!python/none"])
            + content[place:]
        )
    if kind == "double":
        return content + content
    if kind == "encoding":
        return content.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == "deep":
        opening = rng.choice([b"[", b'{"a":', b"- "])
        return opening * rng.choice([90, 1000, 100_000])
    if kind == "long":
        return content + b"x " * 300_000
    if kind == "zeros":
        return bytes(len(content))
    if kind == "shuffle":
        lines = content.splitlines(keepends=True)
        rng.shuffle(lines)
        return b"".join(lines)
    return b""


def mutated_tree(rng: random.Random, value):
    """Spoils one value, somewhere in a tree."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        how = rng.random()
        if how < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if how < 0.2:
            return value | {rng.choice(["zzz", 7, ""]): value[key]}
        return value | {key: mutated_tree(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_tree(rng, value[place]), *value[place + 1 :]]
    return rng.choice(VALUES)


def spoiled(rng: random.Random, valid: dict | list, dump) -> bytes:
    """A file with this tree, spoiled before or after it is written."""
    if rng.random() < 0.5:
        return mutated_bytes(rng, dump(valid).encode())
    return dump(mutated_tree(rng, valid)).encode(errors="surrogatepass")


def as_yaml(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


CONFIG = yaml.safe_load(to_yaml(load_config(TINY | {"name": "tiny"})))
RENTED = {"device": "h100", "nodes": "2 x 8", "inside": "900 GB/s", "network": "400 Gbit/s", "host_memory": "1TB"}


def case_config(rng, here):
    (here / "mine.yaml").write_bytes(spoiled(rng, CONFIG, as_yaml))
    return ["plan", "mine.yaml", "--cluster", "h100x2x1", "--micro-batches", "1"]


def case_trained_config(rng, here):
    """Refused before anything runs, or the text is missing, which is refused, too."""
    (here / "mine.yaml").write_bytes(spoiled(rng, CONFIG | {"data": CONFIG["data"] | {"path": "nothing.txt"}}, as_yaml))
    return ["train", "mine.yaml", "--data.path", "nothing.txt", "--out", "run"]


def case_cluster(rng, here):
    if rng.random() < 0.5:
        (here / "cluster.yaml").write_bytes(spoiled(rng, RENTED, as_yaml))
    else:
        (here / "cluster.yaml").write_bytes(spoiled(rng, cluster_named("h100x2x2").model_dump(mode="json"), json.dumps))
    return ["plan", "gpt-tiny", "--cluster", "cluster.yaml", "--micro-batches", "1", "--model.num_layers", "1"]


PLAN: list[dict] = []


def case_plan(rng, here):
    if not PLAN:
        cli.main(
            ["plan", "gpt-tiny", "--cluster", "h100x2x1", "--model.num_layers", "1", "--out", str(here / "plan.json")]
        )
        PLAN.append(json.loads((here / "plan.json").read_text()))
    (here / "plan.json").write_bytes(spoiled(rng, PLAN[0], json.dumps))
    return ["train", "gpt-tiny", "--plan", "plan.json", "--data.path", "nothing.txt", "--out", "run"]


def case_profile(rng, here):
    """PipeDream's graph, whose format is text."""
    costs = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, parameter_size=32.0"
    lines = [f"node{n} -- {'Linear' if n > 1 else 'Input0'} -- {costs}" for n in range(1, 6)]
    lines += [f"\tnode{n} -- node{n + 1}" for n in range(1, 5)]
    (here / "graph.txt").write_bytes(mutated_bytes(rng, "\n".join(lines).encode()))
    return ["plan", "--profile", "graph.txt", "--cluster", "h100x2x1", "--batch", "4", "--micro-batches", "1"]


FLAGS = [
    "--train.steps",
    "--model.num_layers",
    "--model.d_model",
    "--data.batch_size",
    "--data.sequence_length",
    "--seed",
]
FLAGS += [
    "--optimizer.learning_rate",
    "--model.vocab_size",
    "--parallel.tensor",
    "--memory.budget_bytes",
    "--batch",
    "--price",
]
FLAGS += [
    "--cluster",
    "--budget",
    "--tokens",
    "--out",
    "--svg",
    "--optimizer.eps",
    "--model.dropout",
    "--evaluation.prompt",
]


def case_flags(rng, here):
    words = ["plan", "gpt-tiny", "--cluster", "h100x2x1", "--micro-batches", "1"]
    for flag in rng.sample(FLAGS, rng.choice([1, 2])):
        value = str(rng.choice(VALUES))
        words += [flag, value] if rng.random() < 0.8 else [f"{flag}={value}"]
    return [word for word in words if "\0" not in word]


def case_text(rng, here):
    """Text that a tokenizer is to be made of."""
    content = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in text(2000).splitlines())
    suffix = rng.choice([".jsonl", ".txt", ".jsonl.gz", ".parquet", ".jsonl.zst"])
    content = mutated_bytes(rng, content)
    if suffix.endswith("gz"):
        content = gzip.compress(content)
        content = content[: rng.randrange(1, len(content) + 1)]
    (here / f"text{suffix}").write_bytes(content)
    return ["tokenizer", "train", f"text{suffix}", "--vocab-size", "300", "--out", "made.json"]


def case_tokenizer(rng, here):
    valid = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
    valid |= {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    (here / "t.json").write_bytes(spoiled(rng, valid, json.dumps))
    return ["train", "gpt-tiny", "--data.tokenizer", "t.json", "--data.path", "nothing.txt", "--out", "run"]


def case_tensors(rng, here):
    """A folder in Hugging Face's layout."""
    folder = here / "hf"
    folder.mkdir()
    settings = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    (folder / "config.json").write_bytes(spoiled(rng, settings, json.dumps))
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [16, 8], "data_offsets": [0, 512]}}).encode()
    content = len(header).to_bytes(8, "little") + header + np.zeros(128, np.float32).tobytes()
    place = rng.randrange(len(content))
    (folder / "model.safetensors").write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
    return ["import", "hf", "hf", "--out", "run"]


KINDS = [
    case_config,
    case_trained_config,
    case_cluster,
    case_plan,
    case_profile,
    case_flags,
    case_text,
    case_tokenizer,
    case_tensors,
]


@pytest.mark.parametrize("seed", quick_and_exhaustive(range(CASES), [*range(4 * len(KINDS))]))
@pytest.mark.filterwarnings("ignore")
def test_it_ends_in_a_documented_way(seed, tmp_path, monkeypatch, capfd):
    rng = random.Random(seed)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    arguments = KINDS[seed % len(KINDS)](rng, here)
    before = tree(here)
    capfd.readouterr()

    status = status_of(arguments)

    out, error = capfd.readouterr()
    assert status in {Exit.DONE, Exit.INPUT, Exit.NOT_HERE}, (arguments, error)
    assert "Traceback" not in out + error, (arguments, error)
    if status:
        assert error.strip() and tree(here) == before, (arguments, error)
        assert re.search(r"\w+ \w+", error)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_metrics_are_read(seed, tmp_path):
    """What is whole is kept, wherever the fault is."""
    rng = random.Random(seed)
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in range(1, 30)]
    (tmp_path / METRICS_FILE).write_bytes(mutated_bytes(rng, ("\n".join(lines) + "\n").encode()))
    for record in read_metrics(tmp_path):
        assert isinstance(record["step"], int)


@pytest.mark.parametrize("words", ["--cluster h100x8x100000000000000", "--model.num_layers 100000 --cluster h100x8x1"])
def test_unbounded_searches_are_refused(words, capsys):
    assert cli.main(["plan", "gpt-13b", *words.split()]) == Exit.INPUT
    assert capsys.readouterr().err


@pytest.mark.parametrize("rate", ["1e-60", "1e60", "nan", "inf", "0"])
def test_numbers_that_float32_cannot_hold_are_refused(rate, capsys):
    assert cli.main(["train", "--optimizer.learning_rate", rate]) == Exit.INPUT
    assert "optimizer.learning_rate" in capsys.readouterr().err


def test_an_empty_run_directory_is_refused(capsys):
    assert cli.main(["train", "--out", ""]) == Exit.INPUT
    assert "--out is empty" in capsys.readouterr().err


def test_the_generator_makes_what_it_says():
    content = Path(__file__).read_bytes()
    assert len({mutated_bytes(random.Random(seed), content) for seed in range(60)}) > 30
