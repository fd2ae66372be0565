"""A cache is built once, found by content, whole or absent, and never read when damaged."""

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.folders import cache_folder
from jhpt.core.manifest import MANIFEST, manifest_faults
from jhpt.training.data import cache
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end


class OtherTokenizer(ByteTokenizer):
    """Bytes under another name."""

    fingerprint = "bytes-other"


class WideTokenizer(ByteTokenizer):
    """Every byte as an id that needs more than two bytes."""

    vocab_size = 70_256
    fingerprint = "wide"
    end = None

    def encode(self, text):
        return super().encode(text) + 70_000


class FailingTokenizer(ByteTokenizer):
    """Fails at its second text."""

    def __init__(self):
        self.left = 1

    def encode(self, text):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().encode(text)


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts", {f"{index}.txt": f"text {index} " * 20 for index in range(5)})


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def write(folder: Path, contents: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


def open_cache(path, root, tokenizer=None, **changes):
    data = DataConfig(path=str(path), cache_dir=str(root), **{"validation_fraction": 0.2, **changes})
    return token_cache(data, tokenizer or ByteTokenizer())


def finished(root) -> list[str]:
    """What lies in the cache folder, locks and the memory of seen files apart."""
    return sorted(path.name for path in root.iterdir() if path.name != "seen" and path.suffix != ".lock")


def decoded(tokens) -> list[str]:
    """The documents in a stream of byte tokens."""
    parts = bytes(np.asarray(tokens).tolist()).split(bytes([END]))
    assert parts[-1] == b""
    return [part.decode() for part in parts[:-1]]


def test_tokens_are_those_of_all_documents_separated(texts, root):
    cache = open_cache(texts, root)
    assert len(decoded(cache.validation)) == 1  # one of five equal files is a fifth
    documents = decoded(cache.train) + decoded(cache.validation)
    assert sorted(documents) == sorted(file.read_text() for file in texts.iterdir())


def test_the_second_call_finds_what_the_first_built(texts, root):
    first, second = open_cache(texts, root), open_cache(texts, root)
    assert (first.built, second.built) == (True, False)
    assert first.key == second.key and finished(root) == [first.key]
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)


def test_known_files_are_not_read_again(texts, root, monkeypatch):
    key = open_cache(texts, root).key

    def unexpected(file):
        raise AssertionError(f"{file} was hashed again")

    monkeypatch.setattr(cache, "digest", unexpected)
    assert open_cache(texts, root).key == key


def test_the_same_content_in_another_folder_is_the_same(texts, root, tmp_path):
    """Other names in another order, too."""
    names = {f"{9 - int(file.stem)}.txt": file.read_text() for file in texts.iterdir()}
    first, second = open_cache(texts, root), open_cache(write(tmp_path / "moved" / "deep", names), root)
    assert first.key == second.key and not second.built


@pytest.mark.parametrize("given", [False, True], ids=["split", "validation given"])
def test_tokens_do_not_depend_on_names(texts, tmp_path, given):
    """The key knows no names, so two builders of one key must write the same stream."""
    names = {f"{9 - int(file.stem)}.txt": file.read_text() for file in texts.iterdir()}
    moved = write(tmp_path / "moved", names)
    first, second = (
        open_cache(path, tmp_path / f"cache of {path.name}", validation_path=str(path) if given else None)
        for path in (texts, moved)
    )
    assert first.built and second.built and first.key == second.key
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)


def test_one_changed_byte_is_another_key(texts, root):
    key = open_cache(texts, root).key
    file = texts / "3.txt"
    stat = file.stat()
    file.write_text(file.read_text().replace("text 3", "text_3", 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # whatever the resolution of the file system's clock
    changed = open_cache(texts, root)
    assert changed.built and changed.key != key
    file.write_text(file.read_text().replace("text_3", "text 3", 1))
    assert open_cache(texts, root).key == key


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": OtherTokenizer()},
        {"validation_fraction": 0.4},
        {"text_key": "body"},
        {"validation_path": "{texts}/0.txt"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_changes_the_tokens_changes_the_key(texts, root, changes):
    key = open_cache(texts, root).key
    changes = {k: v.format(texts=texts) if isinstance(v, str) else v for k, v in changes.items()}
    assert open_cache(texts, root, **changes).key != key


def test_text_and_jsonl_of_the_same_bytes_are_different(root, tmp_path):
    line = '{"text": "abc"}'
    folders = [write(tmp_path / name, {f"a.{name}": line}) for name in ("txt", "jsonl")]
    text, lines = (open_cache(folder, root, validation_fraction=0) for folder in folders)
    assert decoded(text.train) == [line]
    assert decoded(lines.train) == ["abc"]


def test_given_validation_files_are_held_out_whole(texts, root, tmp_path):
    held = write(tmp_path / "held", {"b.txt": "held out"})
    cache = open_cache(texts, root, validation_path=str(held))
    assert decoded(cache.validation) == ["held out"]
    assert len(decoded(cache.train)) == 5


@given(length=st.integers(1, 300), fraction=st.floats(0, 0.99))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_of_a_single_file_the_tail_is_held_out(tmp_path_factory, length, fraction):
    folder = tmp_path_factory.mktemp("single")
    content = "".join(chr(97 + index % 26) for index in range(length))
    cache = open_cache(write(folder / "text", {"a.txt": content}), folder / "cache", validation_fraction=fraction)
    assert decoded(np.concatenate([cache.train, cache.validation])) == [content]
    assert len(cache.validation) == int((length + 1) * fraction)


def test_a_wide_vocabulary_keeps_its_ids(texts, root):
    cache = open_cache(texts, root, WideTokenizer())
    assert cache.train.dtype == np.uint32
    assert np.asarray(cache.train).min() >= 70_000
    assert bytes((np.asarray(cache.validation) - 70_000).tolist()).decode() in {
        file.read_text() for file in texts.iterdir()
    }


def test_text_without_tokens_is_an_empty_cache(root, tmp_path):
    cache = open_cache(write(tmp_path / "blank", {"a.jsonl": "\n\n"}), root)
    assert (cache.train.size, cache.validation.size) == (0, 0)


def test_a_failure_halfway_leaves_nothing(texts, root):
    with pytest.raises(KeyboardInterrupt):
        open_cache(texts, root, FailingTokenizer())
    assert finished(root) == []
    assert open_cache(texts, root).built


def test_a_bad_line_leaves_nothing(root, tmp_path):
    folder = write(tmp_path / "bad", {"a.jsonl": '{"text": "fine"}\n{"text": '})
    with pytest.raises(InputError, match="line 2"):
        open_cache(folder, root)
    assert finished(root) == []


@pytest.mark.parametrize("locked", [True, False], ids=["with locks", "where locks do not work"])
def test_concurrent_builders_end_with_one(texts, root, monkeypatch, locked):
    builders = 4
    start = threading.Barrier(builders)
    if not locked:
        publish, ready = cache._publish, threading.Barrier(builders)
        monkeypatch.setattr(cache, "_lock", lambda path: contextlib.nullcontext())
        monkeypatch.setattr(cache, "_publish", lambda *args: (ready.wait(60), publish(*args)))

    def build(_):
        start.wait(60)
        return open_cache(texts, root)

    with ThreadPoolExecutor(builders) as pool:
        caches = list(pool.map(build, range(builders)))
    assert finished(root) == [caches[0].key]
    assert sum(one.built for one in caches) == (1 if locked else builders)
    for one in caches[1:]:
        np.testing.assert_array_equal(one.train, caches[0].train)


def damage_index(change):
    def damage(folder):
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "train-00000.bin", 7),
        lambda folder: os.truncate(folder / "validation-00000.bin", 0),
        lambda folder: (folder / "train-00000.bin").unlink(),
        lambda folder: (folder / "index.json").unlink(),
        lambda folder: (folder / "index.json").write_text('{"format": 1, "dt'),
        lambda folder: (folder / "index.json").write_text("[]"),
        lambda folder: (folder / "index.json").write_bytes(b"\xff"),
        damage_index(lambda index: index.pop("dtype")),
        damage_index(lambda index: index.update(dtype="uint7")),
        damage_index(lambda index: index.update(tokens=[1, 2])),
        damage_index(lambda index: index["tokens"].pop("validation")),
        damage_index(lambda index: index["tokens"].update(train=None)),
    ],
    ids=[
        "train cut off",
        "validation emptied",
        "train missing",
        "no index",
        "index cut off",
        "index a list",
        "index no text",
        "no dtype",
        "unknown dtype",
        "tokens a list",
        "no validation count",
        "no number",
    ],
)
def test_a_damaged_cache_is_made_again(texts, root, damage):
    whole = open_cache(texts, root)
    tokens = np.asarray(whole.train).copy()
    damage(whole.folder)
    said = []
    data = DataConfig(path=str(texts), cache_dir=str(root), validation_fraction=0.2)
    again = token_cache(data, ByteTokenizer(), said.append)
    assert again.built and f"{whole.folder} is damaged" in said[0]
    np.testing.assert_array_equal(again.train, tokens)
    assert not manifest_faults(whole.folder) and not open_cache(texts, root).built


def test_a_cache_without_a_manifest_is_refused_if_it_cannot_be_read(texts, root):
    """Those of earlier versions have none."""
    folder = open_cache(texts, root).folder
    (folder / MANIFEST).unlink()
    assert not open_cache(texts, root).built
    os.truncate(folder / "train-00000.bin", 7)
    with pytest.raises(InputError) as caught:
        open_cache(texts, root)
    assert f"rm -r {folder}" in str(caught.value)


def test_a_cache_folder_that_cannot_be_written_is_named(texts, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError) as caught:
        open_cache(texts, tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value) and "data.cache_dir" in str(caught.value)


def test_the_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jhpt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jhpt"


def test_a_disk_without_room_is_warned_of_before_tokenising(texts, root, monkeypatch):
    size = sum(file.stat().st_size for file in texts.iterdir())
    for free, warned in ((2 * size, False), (size // 2, True)):
        said, data = [], DataConfig(path=str(texts), cache_dir=str(root / str(free)))
        monkeypatch.setattr("shutil.disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        token_cache(data, ByteTokenizer(), said.append)
        assert any("data.cache_dir names another" in line for line in said) == warned
