"""A file is complete or not there, and one that cannot be written is refused before the work."""

import pytest

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing


def test_a_file_takes_its_place_at_the_end(tmp_path):
    file = tmp_path / "out.txt"
    file.write_text("before")
    with replacing(file) as partial:
        partial.write_text("after")
        assert file.read_text() == "before"
    assert file.read_text() == "after" and list(tmp_path.iterdir()) == [file]


def test_nothing_is_left_of_a_file_whose_work_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "out.txt") as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_without_a_trace(tmp_path):
    check_writable("--out", None)
    check_writable("--out", tmp_path / "new.txt")
    assert not list(tmp_path.iterdir())
    (tmp_path / "there.txt").write_text("kept")
    check_writable("--out", tmp_path / "there.txt")
    assert (tmp_path / "there.txt").read_text() == "kept"
    for wrong in (tmp_path, tmp_path / "no" / "out.txt", tmp_path / "there.txt" / "out.txt"):
        with pytest.raises(InputError, match=r"--out .* cannot be written: .*; give a file in a folder that exists"):
            check_writable("--out", wrong)
