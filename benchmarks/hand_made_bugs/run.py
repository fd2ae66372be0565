"""Shows that the suite catches hand-made bugs: makes each in a copy of the tree and runs the tests that should fail.

    python benchmarks/hand_made_bugs/run.py [--only TEXT]

First the same tests have to pass without any bug.  About 25 minutes on two cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bug import Bug
from bugs import BUGS
from evidence import BUGS as OF_EVIDENCE

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv*", "__pycache__", "build", "dist", "runs", ".*_cache", "*.egg-info")

PASSED, FAILED = 0, 1
"""Exit statuses of pytest; any other means that the tests did not run."""


def main() -> int:
    """Runs all, prints a line for each, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose names contain this text")
    only = parser.parse_args().only
    bugs = [bug for bug in (*BUGS, *OF_EVIDENCE) if only in bug.name]
    with tempfile.TemporaryDirectory(prefix="hand-made-bugs-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for tests in dict.fromkeys(bug.tests for bug in bugs):
            if (status := _pytest(tree, tests)) != PASSED:
                print(f"without a bug: {' '.join(tests)} ends with {status}")
                return 1
        caught = [_caught(tree, bug) for bug in bugs]
    print(f"{sum(caught)} of {len(caught)} caught")
    return int(not all(caught))


def _caught(tree: Path, bug: Bug) -> bool:
    """Whether the tests fail with the bug; the tree is as before afterwards."""
    file = tree / bug.file
    text = file.read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.file} has {text.count(bug.right)} times: {bug.right}")
    file.write_text(text.replace(bug.right, bug.wrong))
    start = time.perf_counter()
    status = _pytest(tree, (*bug.tests, "-n", "0", "-x"))  # stopped workers end with another status
    file.write_text(text)
    word = {PASSED: "MISSED", FAILED: "caught"}.get(status, f"status {status}")
    print(f"{word:8} {time.perf_counter() - start:5.0f} s  {bug.name}  ({bug.tests[0]})", flush=True)
    return status == FAILED


def _pytest(tree: Path, tests: tuple[str, ...]) -> int:
    """The exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
