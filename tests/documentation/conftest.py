"""The files that the documentation names, and small sizes for its Python."""

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import jhpt
from jhpt.core.cluster_file import find_cluster
from jhpt.core.folders import cache_folder
from tests.bench.test_published import ROW, write
from tests.conftest import text
from tests.documentation.commands import ON_CORPUS, STEPS
from tests.documentation.extraction import blocks
from tests.huggingface.shapes import MODELS
from tests.huggingface.written import write_folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run on the corpus of `workplace`."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder / "corpus")
    files = {"data.path": str(folder / "corpus"), "data.cache_dir": str(folder / "cache"), "parallel.data": 1}
    return jhpt.train("gpt-tiny", out=folder / "run", overrides=STEPS | files).run_dir


@pytest.fixture
def workplace(tmp_path, monkeypatch, finished) -> Path:
    """The files that documented commands name, and a cache in which this machine has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    write(tmp_path / "runs.csv", ROW)
    write_folder(tmp_path / "models" / "mine", MODELS["llama"].model_copy(update={"vocab_size": 256}))
    write_folder(tmp_path / "models" / "bert", MODELS["bert"].model_copy(update={"vocab_size": 256}))
    for name in ("reviews.csv", "more.csv"):
        rows = (
            f"{'good' if number % 2 else 'bad'} hotel {number},{'a' if number % 2 else 'b'}" for number in range(40)
        )
        Path(name).write_text("\n".join(["text,label", *rows]))
    for name in ("my.yaml", "rented.yaml", "two-sources.yaml"):
        (block,) = (block for block in blocks() if block.language == "yaml" and f"# {name}" in block.text)
        Path(name).write_text(block.text)
    cluster = find_cluster("a100x8x1")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"name": "cpu"})
    cpus = cluster.model_copy(
        update={"name": f"{platform.node()}: 8 x cpu", "nodes": (node.model_copy(update={"device": device}),)}
    )
    measured = cache_folder() / "clusters" / "this machine"
    measured.mkdir(parents=True)
    cpus.save(measured / "cluster.json")
    Path("cluster.yaml").write_text((measured / "cluster.json").read_text())  # JSON is YAML
    shutil.copytree(finished, "runs/tiny")
    Path("prompts.txt").write_text("def \nimport \n")
    Path("documents.jsonl").write_text('{"text": "the mesh"}\n{"context": "the", "continuation": " mesh"}\n')
    np.save("tokens.npy", np.arange(12).reshape(2, 6))
    return tmp_path


def write_corpus(folder: Path) -> None:
    """Text and tokenizers of its words, as pages name them."""
    (folder / "more").mkdir(parents=True)
    for file in ("0.txt", "1.txt", "more/2.txt"):
        (folder / file).write_text(text(1 << 12))
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in text(1 << 12).splitlines()))
    special = {
        "tokenizer.json": ["[UNK]"],
        "words.json": ["[UNK]"],
        "pieces.json": ["[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    }
    for name, tokens in special.items():
        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train([str(folder / "0.txt")], trainers.WordLevelTrainer(vocab_size=100, special_tokens=tokens))
        tokenizer.save(str(folder.parent / name))


@pytest.fixture
def small(monkeypatch) -> None:
    """Runs and plans of Python code get small sizes on top of what they ask for."""
    train, plan = jhpt.train, jhpt.plan
    fewer = STEPS | ON_CORPUS | {"parallel.data": 1}

    def small_train(source=None, *, overrides=None, **options):
        return train(source, overrides={**(overrides or {}), **fewer}, **options)

    def small_plan(source=None, *, cluster, overrides=None, **options):
        less = cluster.replace("x8x8", "x4x1")
        return plan(source, cluster=less, overrides={**(overrides or {}), "model.num_layers": 1}, **options)

    monkeypatch.setattr(jhpt, "train", small_train)
    monkeypatch.setattr(jhpt, "plan", small_plan)
