"""Held-out text is not in the training text: pieces are counted as a set of them would be, and none is left."""

import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.config import DataConfig
from jhpt.training.data import cache, duplicates
from jhpt.training.data.cache import token_cache
from jhpt.training.data.corpus import find_files
from jhpt.training.data.documents import read
from jhpt.training.data.duplicates import END, PIECE, apart, shared_pieces
from jhpt.training.data.tokenizer import ByteTokenizer

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)

LINES = [
    "a = 1\n",
    "\n",
    "    return the_largest_of_all_values(first, second, third)\n",
    "-" * 70 + "\n",
    "x\r\n",
    "def f(a, b):\n",
    "é" * 30 + "\n",
]
"""Of random files; some are longer than a piece, some tell nothing."""

FILES = st.lists(st.lists(st.sampled_from(LINES), min_size=1, max_size=12), min_size=1, max_size=4)


def pieces(text: bytes) -> set[bytes]:
    """By definition."""
    all_of_them = {text[first : first + PIECE] for first in range(len(text) - PIECE + 1)}
    return {
        piece for piece in all_of_them if any(code != END and (code > 127 or chr(code).isalnum()) for code in piece)
    }


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def written(folder, files) -> list:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.txt" for number in range(len(files))]
    for path, lines in zip(paths, files, strict=True):
        path.write_bytes("".join(lines).encode())
    return paths


def as_read(parts) -> bytes:
    """The text of parts, with the mark behind each document."""
    texts = (text for part in parts for text in read(part, "text"))
    return b"".join(bytes([END]) if text is None else text.encode() for text in texts)


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(min_size=40, max_size=80))
@PROPERTY
def test_shared_pieces_are_those_of_both_sets(before, after, both):
    training, held = before + both + after, after + both
    assert shared_pieces(array(training), array(held)) == len(pieces(training) & pieces(held))


def test_blocks_of_pieces_overlap(monkeypatch):
    """A piece is found wherever it begins, also where blocks meet."""
    monkeypatch.setattr(duplicates, "BLOCK", 64)
    text = bytes(random.Random(0).choices(b"abcdefgh", k=500))
    for first in range(0, 450, 7):
        assert shared_pieces(array(text), array(text[first : first + PIECE])) == 1


@given(FILES, FILES)
@PROPERTY
def test_what_is_kept_shares_nothing(tmp_path_factory, training, held):
    """Neither inside a file nor where a line was left out, and nothing is left out that shares nothing."""
    base = tmp_path_factory.getbasetemp() / "apart"
    files, others = written(base / "training", training), written(base / "held", held)
    parts = apart(files, others)
    kept, marks = as_read(part for part, _ in parts), bytes([END])
    held_text = b"".join(file.read_bytes() + marks for file in others)
    assert not pieces(kept) & pieces(held_text)
    assert kept.count(marks) == len(files) and len(kept) == sum(count for _, count in parts) + len(files)
    whole = b"".join(file.read_bytes() + marks for file in files)
    assert kept == whole or pieces(whole) & pieces(held_text)
    for of_file, lines in zip(kept.split(marks), training, strict=False):
        rest = iter(lines)  # what is kept are lines of the file, in its order
        assert all(line in rest for line in of_file.decode().splitlines(keepends=True))


def test_only_lines_that_share_a_piece_are_left_out(tmp_path):
    same = "    raise ValueError('the same words in both of the files')\n"
    training, held = ["import a\n", same, "b = a.c\n"], ["import d\n", "\n", same, "e = d.f\n"]
    parts = apart(written(tmp_path / "training", [training, ["whole\n"]]), written(tmp_path / "held", [held]))
    # The line before stands in no piece of the held-out text; the line after neither.
    assert as_read(part for part, _ in parts) == b"import a\nb = a.c\n\xffwhole\n\xff"


@pytest.fixture(scope="module")
def default_text(tmp_path_factory):
    data = DataConfig(cache_dir=str(tmp_path_factory.mktemp("stdlib")))
    return data, token_cache(data, ByteTokenizer())


def test_the_default_text_shares_nothing(default_text):
    """Of the tokens as they are trained on and evaluated."""
    _, text = default_text
    assert shared_pieces(np.asarray(text.train), np.asarray(text.validation)) == 0
    assert text.validation.size > 0.04 * text.train.size  # and neither is almost gone
    assert text.train.size + text.validation.size > 0.9 * sum(file.stat().st_size for file in find_files("stdlib"))


def test_the_probe_notices_when_text_is_not_kept_apart(default_text, monkeypatch):
    data, kept_apart = default_text
    monkeypatch.setattr(cache, "_keeps_apart", lambda data: False)
    text = token_cache(data, ByteTokenizer())
    assert text.key != kept_apart.key and text.validation.size == kept_apart.validation.size
    assert shared_pieces(np.asarray(text.train), np.asarray(text.validation)) > 1_000


def test_tables_that_programs_wrote_are_no_default_text():
    names = {file.name for file in find_files("stdlib")}
    assert not names & {"cp1252.py", "cp1125.py", "koi8_t.py", "entities.py", "topics.py", "stringprep.py"}
    assert {"argparse.py", "heapq.py", "utf_8.py", "ast.py", "difflib.py", "_pydecimal.py", "keyword.py"} - names == {
        "keyword.py"
    }


def test_a_users_own_files_stay_whole(tmp_path):
    """Also if they are all alike."""
    files = written(tmp_path / "own", [LINES] * 4)
    data = DataConfig(path=str(tmp_path / "own"), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25)
    text = token_cache(data, ByteTokenizer())
    assert text.validation.size and text.train.size + text.validation.size == sum(
        file.stat().st_size + 1 for file in files
    )
