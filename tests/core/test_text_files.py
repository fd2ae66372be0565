"""Files of YAML and JSON are read with limits, and what is wrong is one message."""

import io
import json
import os

import pytest

from jhpt.core import text_files
from jhpt.core.errors import InputError
from jhpt.core.text_files import bounded_lines, read_text, tree_of, value_in

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize("tree", [{"a": [1, 2.5, None, {"b": "c"}]}, [], {"x": {"y": {}}}])
def test_trees_come_back(tree):
    assert tree_of(json.dumps(tree)) == tree


def test_aliases_are_understood():
    assert tree_of("a: &x [1, 2]\nb: *x\nc: {<<: {d: 1}, e: 2}") == {"a": [1, 2], "b": [1, 2], "c": {"d": 1, "e": 2}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a' is given twice, first in line 1"),
        ("x:\n  steps: 1\n  steps: 2\n", "line 3: 'steps' is given twice"),
        (BOMB, "aliases written out"),
        ("&a [*a]", "nested deeper"),
        ("[" * 500 + "]" * 500, "nested deeper"),
        ("[" * 100_000, "nested deeper"),
        ('{"a": ' * 200 + "1" + "}" * 200, "nested deeper"),
        ('{"a": ' * 100_000, "nested deeper"),
        ('{"a": }', "not valid JSON"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given twice"),
        ('{"a": [' + "[]," * 5_000_001 + "[]]}", "values are not read"),
        ("- 1\n" * 300_000, "characters of YAML"),
        ("a: [", "not valid YAML"),
        ("a: 2026-13-01", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(InputError) as caught:
        tree_of(text)
    assert words in str(caught.value)


def test_what_cannot_be_read(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(file)
    with pytest.raises(InputError, match="it is a folder"):
        read_text(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(InputError, match="cannot be read"):
        read_text("a\0b")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing")
    monkeypatch.setattr(text_files, "LARGEST", 1)
    with pytest.raises(InputError, match="is it the right file"):
        read_text(file)


def test_lines_are_bounded(monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 5)
    assert list(bounded_lines(io.StringIO("abc\n\nabcd"))) == ["abc\n", "\n", "abcd"]
    with pytest.raises(InputError, match="5 characters or more"):
        list(bounded_lines(io.StringIO("abc\nabcdefgh\n")))


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "a: [", "{a: 1, a: 2}", BOMB, "&a [*a]", "2026-13-01"])
def test_a_flag_that_no_file_could_hold_stays_text(text):
    assert value_in(text) == text
    assert value_in("[1, {a: 2}]") == [1, {"a": 2}]
