"""An error that nothing has caught ends in one line and a file with the details."""

import pytest

from jhpt import cli
from jhpt.core.errors import Exit, for_terminal


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


def test_messages_leave_a_terminal_as_it_is():
    assert for_terminal("plain, é\nsecond") == "plain, é\nsecond"
    assert for_terminal("a\x1b[2J\r\ud800") == "a\\x1b[2J\\r\\ud800"
    assert len(for_terminal("x" * 10**6)) < 1100 and "998,999" not in for_terminal("x" * 10**6)
    assert for_terminal("\n" * 10**5).endswith("more lines")


def test_a_panic_of_a_library_is_one_line(monkeypatch, tmp_path, capsys):
    """Rust's are no `Exception`."""

    class PanicException(BaseException):
        pass

    def panics(arguments):
        raise PanicException("index out of bounds")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "doctor", panics)
    assert cli.main(["doctor"]) == Exit.CRASH
    assert "index out of bounds; the details are in" in capsys.readouterr().err
