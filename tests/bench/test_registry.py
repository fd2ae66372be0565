"""Where `jhpt bench` finds its benchmarks: in the package, and in a checkout's folder `benchmarks`."""

import os
import subprocess
import sys

import pytest

from jhpt.bench.registry import EVIDENCE, NAMES, PACKAGED, load
from jhpt.core.errors import NotHere


def test_every_benchmark_lies_in_one_place():
    assert sorted(NAMES) == sorted([*PACKAGED, *EVIDENCE])
    assert all(module.startswith("jhpt.bench.") for module in PACKAGED.values())
    assert all(module.startswith("benchmarks.") for module in EVIDENCE.values())


def test_processes_that_a_benchmark_starts_find_it(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert load("planner").run
    code = "import benchmarks.emulated, jhpt; print(benchmarks.__file__)"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert child.stdout.startswith(os.environ["PYTHONPATH"].split(os.pathsep)[0])


def test_an_installed_package_says_where_its_evidence_is(tmp_path):
    (tmp_path / "benchmarks").mkdir()  # another project's
    with pytest.raises(NotHere, match=r"'planner' is not part of the installed package.*checkout of jhpt's source"):
        load("planner", checkout=tmp_path)
    assert NotHere.status == 3
