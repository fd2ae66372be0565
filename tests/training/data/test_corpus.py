"""Files are found by name, and told apart and split by content."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.training.data import corpus
from jhpt.training.data.corpus import digest, find_files, split_files

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)


def write(folder, contents) -> list:
    """Files 000.txt, 001.txt, ... with these contents, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = [folder / f"{index:03}.txt" for index in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


def refusal(call) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


CONTENTS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12)
FRACTIONS = st.floats(0, 1, exclude_max=True)


@given(contents=CONTENTS, fraction=FRACTIONS)
@PROPERTY
def test_a_split_is_disjoint_complete_and_no_larger_than_asked(tmp_path_factory, contents, fraction):
    files = write(tmp_path_factory.getbasetemp() / "split", contents)
    train, held = split_files(sorted(files, key=digest), fraction)
    assert sorted(train + held) == files
    assert sum(file.stat().st_size for file in held) <= fraction * sum(map(len, contents))
    assert train


@given(contents=CONTENTS, fraction=FRACTIONS, order=st.randoms(use_true_random=False))
@PROPERTY
def test_a_split_follows_from_content_alone(tmp_path_factory, contents, fraction, order):
    """Another folder, other file names, another order of the list: the same text is held out."""
    base = tmp_path_factory.getbasetemp() / "splits"
    shuffled = order.sample(contents, len(contents))
    there, here = write(base / "a" / "deep", shuffled), write(base / "z", contents)
    order.shuffle(there)
    splits = [split_files(sorted(files, key=digest), fraction) for files in (here, there)]
    texts = [[[file.read_bytes() for file in part] for part in split] for split in splits]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("sizes", [[100] * 40, [10, 20, 30, 40] * 10])
def test_a_split_of_many_files_comes_close_to_the_share(tmp_path, sizes):
    files = write(tmp_path / "many", [bytes([index]) * size for index, size in enumerate(sizes)])
    _, held = split_files(sorted(files, key=digest), 0.25)
    share = sum(file.stat().st_size for file in held) / sum(sizes)
    assert 0.25 - max(sizes) / sum(sizes) < share <= 0.25


def test_a_large_file_is_never_held_out_for_a_small_share(tmp_path):
    """Whatever its hash: all text but one file must not go to validation."""
    for index in range(8):
        files = write(tmp_path / str(index), [bytes([index]) * 1000, b"small"])
        assert split_files(sorted(files, key=digest), 0.05)[1] == [files[1]]


def test_a_folder_gives_its_text_files_at_any_depth(tmp_path):
    (tmp_path / "deep" / "er.md").mkdir(parents=True)  # a folder, in spite of its name
    for name in ("b.txt", "a.jsonl", "deep/c.md", "deep/er.md/d.txt", "e.py", "f.txt.bak"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    names = [str(file.relative_to(tmp_path)) for file in find_files(str(tmp_path))]
    assert names == ["a.jsonl", "b.txt", "deep/c.md", "deep/er.md/d.txt"]


def test_globs_and_lists_name_each_file_once(tmp_path):
    for name in ("a.txt", "b.txt", "c.log"):
        (tmp_path / name).write_text("x")
    files = find_files([str(tmp_path / "*.txt"), str(tmp_path / "a.txt"), str(tmp_path / "c.log")])
    assert [file.name for file in files] == ["a.txt", "b.txt", "c.log"]


def test_the_users_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    assert find_files("~/a.txt") == [tmp_path / "a.txt"]
    assert "~nobody-of-this-name/a.txt" in refusal(lambda: find_files("~nobody-of-this-name/a.txt"))


def test_the_standard_library_is_there():
    files = find_files("stdlib")
    assert {"argparse.py", "heapq.py"} <= {file.name for file in files}
    assert not any(corpus.SKIPPED_FOLDERS & set(file.parts[-3:-1]) for file in files)


@pytest.mark.parametrize("setting", ["data.path", "data.validation_path"])
def test_what_is_not_there_is_named_with_its_setting(tmp_path, setting):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name, words in {
        "no.txt": "no text found",
        "*.csv": "no text",
        "empty.txt": "empty",
        "folder": ".jsonl",
    }.items():
        text = refusal(lambda name=name: find_files(str(tmp_path / name), setting))
        assert text.startswith(f"{setting}={tmp_path / name}") and words in text


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert f"data file {tmp_path} cannot be read" in refusal(lambda: digest(tmp_path))


def test_a_digest_knows_content_and_kind_but_no_name(tmp_path):
    a, b, other = write(tmp_path / "digests", [b"same", b"same", b"Same"])
    assert digest(a) == digest(b) != digest(other)
    lines = a.rename(a.with_suffix(".jsonl"))
    assert digest(lines) != digest(b)
