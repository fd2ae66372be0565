"""An error that nothing has caught ends in one line and a file with the details."""

import pytest

from jhpt import cli
from jhpt.core.errors import Exit


@pytest.fixture
def broken(monkeypatch, tmp_path):
    def fail(arguments):
        raise ZeroDivisionError("no steps\nat all")

    monkeypatch.setitem(cli.COMMANDS, "doctor", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jhpt" / "crashes"


def test_one_line_and_a_file(broken, capsys):
    assert cli.main(["doctor", "--what ever"]) == Exit.CRASH
    out, error = capsys.readouterr()
    (file,) = broken.iterdir()
    assert error.count("\n") == 1 and "ZeroDivisionError: no steps" in error and str(file) in error and not out
    details = file.read_text()
    assert "jhpt doctor '--what ever'" in details and "Traceback" in details and "at all" in details
    assert "jax" in details and "python" in details


def test_details_are_shown_on_request(broken, capsys, monkeypatch):
    monkeypatch.setenv("JHPT_TRACEBACK", "1")
    cli.main(["doctor"])
    assert "Traceback" in capsys.readouterr().err


def test_without_a_folder_for_the_file_the_details_are_printed(broken, capsys):
    broken.parent.mkdir()
    broken.write_text("a file")
    assert cli.main(["doctor"]) == Exit.CRASH
    assert "Traceback" in capsys.readouterr().err
