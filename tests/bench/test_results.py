"""The file of a benchmark says which code was measured."""

import subprocess

from jhpt.bench import results


def git(folder, *arguments: str) -> None:
    who = ["-c", "user.name=any", "-c", "user.email=any"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    """Not that of the folder in which a benchmark runs; changes are named, and outside a checkout there is none."""
    commit = results.commit.__wrapped__
    code = tmp_path / "there" / "results.py"
    code.parent.mkdir()
    code.write_text("one")
    monkeypatch.setattr(results, "__file__", str(code))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    git(tmp_path, "init")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-m", "any")
    assert commit() is None, "it lies in somebody else's repository"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "any")
    name = commit()
    assert name is not None and len(name) == 12 and "-" not in name
    git(tmp_path, "tag", "v1")
    assert commit() == name
    code.write_text("two")
    assert commit() == f"{name}-dirty"
