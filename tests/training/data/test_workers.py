"""Tokens do not depend on how many processes write them, nor on where they are killed; what is done is not redone."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.manifest import MANIFEST
from jhpt.training.data import cache, workers
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.data.workers import WorkerLost

SHARD = 3000


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(workers, "SHARD_BYTES", SHARD)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A large JSONL file, which is cut, and small text files, which share shards."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    words = ["mesh", "größe", "𝄞", "a b c", "step\n"]
    text = lambda: " ".join(rng.choice(words, rng.integers(1, 60)))  # noqa: E731
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text()}) + "\n" for _ in range(200)))
    for number in range(12):
        (folder / f"{number}.txt").write_text(text() * 5)
    return folder


def settings(texts, root, **changes) -> DataConfig:
    return DataConfig(path=str(texts), cache_dir=str(root), **{"validation_fraction": 0.1, **changes})


def content(opened) -> tuple[bytes, bytes]:
    return np.asarray(opened.train).tobytes(), np.asarray(opened.validation).tobytes()


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory) -> tuple[bytes, bytes]:
    """What one process writes into one shard."""
    return content(token_cache(settings(texts, tmp_path_factory.mktemp("whole")), ByteTokenizer()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_tokens_do_not_depend_on_the_number_of_processes(texts, tmp_path, whole, count):
    said = []
    opened = token_cache(settings(texts, tmp_path, workers=count), ByteTokenizer(), said.append)
    assert content(opened) == whole
    assert len(list(opened.folder.glob("train-*.bin"))) > 6
    assert (f"by {count} processes" in said[0]) == (count > 1)


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from jhpt.core.config import DataConfig
from jhpt.training.data import workers
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import load_tokenizer

shard, left, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
workers.SHARD_BYTES = shard

@contextmanager
def killed(total):
    def advance(count):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    yield advance

token_cache(DataConfig.model_validate_json(settings), load_tokenizer("bytes"), progress=killed)
"""


@pytest.mark.parametrize(("count", "shards"), [(1, 2), (2, 1), (2, 6)])
def test_a_killed_run_goes_on_where_it_ended(texts, tmp_path, whole, count, shards):
    data = settings(texts, tmp_path, workers=count)
    arguments = [sys.executable, "-c", KILLED, str(SHARD), str(shards), data.model_dump_json()]
    assert subprocess.run(arguments, timeout=60).returncode == -signal.SIGKILL
    (partial,) = tmp_path.glob("*.partial")
    done = {file.name: file.stat() for file in partial.glob("*.bin")}
    assert len(done) >= shards
    said = []
    opened = token_cache(data, ByteTokenizer(), said.append)
    assert "going on where an earlier run ended" in said[0]
    assert opened.built and content(opened) == whole
    for name, before in done.items():
        now = (opened.folder / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), f"{name} was written again"
    assert not list(tmp_path.glob("*.partial"))
    assert {file.suffix for file in opened.folder.iterdir()} == {".bin", ".json"}


def test_shards_that_are_cut_otherwise_are_not_used(texts, tmp_path, whole, monkeypatch):
    data = settings(texts, tmp_path, workers=1)
    arguments = [sys.executable, "-c", KILLED, str(SHARD), "3", data.model_dump_json()]
    assert subprocess.run(arguments, timeout=60).returncode == -signal.SIGKILL
    monkeypatch.setattr(workers, "SHARD_BYTES", 2 * SHARD)
    assert content(token_cache(data, ByteTokenizer())) == whole


def test_a_bad_line_ends_all_processes_and_leaves_nothing(tmp_path):
    folder, root = tmp_path / "bad", tmp_path / "cache"
    folder.mkdir()
    good = json.dumps({"text": "x" * 500}) + "\n"
    (folder / "a.jsonl").write_text(good * 30 + '{"text": \n' + good * 30)
    with pytest.raises(InputError, match=r"a\.jsonl, line 31: not valid JSON"):
        token_cache(settings(folder, root, workers=2), ByteTokenizer())
    assert [path.name for path in root.iterdir() if path.suffix != ".lock"] == ["seen"]


def test_a_fault_of_encoding_that_is_found_while_a_file_is_cut_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"line\n" * 4000 + b"\xff")
    with pytest.raises(InputError, match="not UTF-8 at byte 20000;"):
        token_cache(settings(file, tmp_path / "cache", workers=2), ByteTokenizer())


def test_a_tokenizer_that_is_not_the_named_one_is_refused(texts, tmp_path):
    class Other(ByteTokenizer):
        fingerprint = "another"

    with pytest.raises(InputError, match=r"data\.tokenizer=bytes has changed"):
        token_cache(settings(texts, tmp_path, workers=2), Other())


def test_a_lost_process_is_reported_and_what_is_done_is_kept(texts, tmp_path, whole, monkeypatch):
    start = workers._start

    def killed_at_its_second_shard(job):
        process = start(job)
        readline, answers = process.stdout.readline, iter(range(10))

        def answer():
            if next(answers):
                process.kill()
                process.wait()
            return readline()

        process.stdout.readline = answer
        return process

    data = settings(texts, tmp_path, workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_start", killed_at_its_second_shard)
        with pytest.raises(WorkerLost, match=r"by SIGKILL.*data\.workers"):
            token_cache(data, ByteTokenizer())
    (partial,) = tmp_path.glob("*.partial")
    assert list(partial.glob("*.bin"))
    assert content(token_cache(data, ByteTokenizer())) == whole


def test_an_interrupted_build_keeps_what_is_done(texts, tmp_path, whole):
    data = settings(texts, tmp_path, workers=1)

    class Interrupted(ByteTokenizer):
        left = 5

        def encode_batch(self, texts):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().encode_batch(texts)

    with pytest.raises(KeyboardInterrupt):
        token_cache(data, Interrupted())
    (partial,) = tmp_path.glob("*.partial")
    assert len(list(partial.iterdir())) == 4  # and nothing unfinished
    assert content(token_cache(data, ByteTokenizer())) == whole


def test_a_worker_imports_no_jax():
    code = "import sys, jhpt.training.data.worker; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_caches_of_earlier_versions_are_read(texts, tmp_path, whole):
    """They have one file for each of the two, and no manifest."""
    opened = token_cache(settings(texts, tmp_path, workers=1), ByteTokenizer())
    index = json.loads((opened.folder / "index.json").read_text())
    for file in (*opened.folder.glob("*.bin"), opened.folder / MANIFEST):
        file.unlink()
    for name, tokens in zip(("train", "validation"), whole, strict=True):
        (opened.folder / f"{name}.bin").write_bytes(tokens)
    (opened.folder / "index.json").write_text(json.dumps({k: v for k, v in index.items() if k != "shards"}))
    again = token_cache(settings(texts, tmp_path), ByteTokenizer())
    assert not again.built and content(again) == whole


def test_files_are_hashed_once_even_if_the_build_is_interrupted(texts, tmp_path, monkeypatch):
    hashed = []
    digest = cache.digest
    monkeypatch.setattr(cache, "digest", lambda file: hashed.append(file) or digest(file))
    monkeypatch.setattr(cache, "write_shards", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            token_cache(settings(texts, tmp_path), ByteTokenizer())
    assert sorted(hashed) == sorted(texts.iterdir())
