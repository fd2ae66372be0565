"""Hand-made bugs can still be made: a list that no longer fits the program would say nothing."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bugs(monkeypatch):
    """All of both lists."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "hand_made_bugs"))
    return [bug for name in ("bugs", "evidence") for bug in importlib.import_module(name).BUGS]


def test_every_bug_changes_one_line_that_is_there(bugs):
    assert len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        assert (ROOT / bug.file).read_text().count(bug.right) == 1 and bug.right != bug.wrong, bug.name
        assert (ROOT / bug.tests[0]).is_file(), bug.name
